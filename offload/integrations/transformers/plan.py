"""Which pools hold what a model keeps, before they have memory."""

from __future__ import annotations

from typing import Literal

import attrs

from offload import PoolSpec
from offload.integrations.transformers.kept import Attention, Indexer, Kept, StatePart

Sort = Literal["kv", "indexer", "state"]


@attrs.frozen
class MemberPlan:
    """A member of the group."""

    sort: Sort
    spec: PoolSpec
    layers: tuple[int, ...]
    """The model layer of each of its own."""


def plans(kept: Kept, page_size: int) -> dict[str, MemberPlan]:
    """Return the members of a model's group, the anchor first.

    Layers of one sort that differ in size stand in members of their own: `kv`, `kv_2`.
    """
    made: dict[str, MemberPlan] = {}
    by_sort: dict[Sort, list[Attention | Indexer | tuple[StatePart, ...] | None]] = {
        "kv": [layer.attention for layer in kept.layers],
        "indexer": [layer.indexer for layer in kept.layers],
        "state": [layer.state for layer in kept.layers],
    }
    for sort, by_layer in by_sort.items():
        distinct = dict.fromkeys(each for each in by_layer if each is not None)
        for number, size in enumerate(distinct, start=1):
            layers = tuple(layer for layer, each in enumerate(by_layer) if each == size)
            spec = _spec(size, len(layers), page_size)
            made[sort if number == 1 else f"{sort}_{number}"] = MemberPlan(sort, spec, layers)
    return made


def _spec(
    size: Attention | Indexer | tuple[StatePart, ...], num_layers: int, page_size: int
) -> PoolSpec:
    if isinstance(size, tuple):
        components = {part.name: (part.shape, part.dtype) for part in size}
        return PoolSpec.state(num_layers=num_layers, components=components)
    if isinstance(size, Indexer):
        return PoolSpec.rows(
            num_layers=num_layers,
            page_size=page_size,
            row_bytes=page_size * size.dim * size.dtype.itemsize,
        )
    if size.latent:
        return PoolSpec.mla(
            num_layers=num_layers,
            page_size=page_size,
            latent_dim=size.key_dim + size.value_dim,
            rope_dim=size.value_dim,
            dtype=size.dtype,
        )
    return PoolSpec.mha(
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=size.num_heads,
        head_dim=size.key_dim,
        v_head_dim=None if size.value_dim == size.key_dim else size.value_dim,
        dtype=size.dtype,
    )
