"""Groups that known models need, built from an engine's device pools.

Each function takes device pools, allocated or adopted, makes the host pools that back them, and returns
the group. Anything else is a `PoolGroup` written out by hand; these only save that.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from offload.core.kinds import Layout
from offload.errors import GeometryError
from offload.group import Pair, PoolGroup
from offload.group_member import PageRule
from offload.groups_v4 import DeepSeekV4, deepseek_v4
from offload.pool import DevicePool

__all__ = [
    "DeepSeekV4",
    "deepseek_v4",
    "hybrid_state",
    "packed_draft",
    "sliding_window",
    "with_draft",
    "with_indexer",
]

_PAGE_FIRST = Layout.PAGE_FIRST


def with_indexer(
    kv: DevicePool,
    indexer: DevicePool,
    *,
    num_host_pages: int,
    layout: str = _PAGE_FIRST,
    indexer_layers: Sequence[int] | None = None,
) -> PoolGroup:
    """Return keys and values, `kv`, with rows of a sparse-attention index beside them, `indexer`.

    Args:
        indexer_layers: The model layers that have an index; None: the first ones, one for each.
    """
    return PoolGroup(
        kv=Pair.backed(kv, num_host_pages, layout),
        indexer=Pair.backed(indexer, num_host_pages, layout, layers=indexer_layers),
    )


def sliding_window(
    full: DevicePool,
    swa: DevicePool,
    *,
    full_layers: Sequence[int],
    swa_layers: Sequence[int],
    num_host_pages: int,
    num_swa_host_pages: int,
    layout: str = _PAGE_FIRST,
) -> PoolGroup:
    """Return full-attention layers, `full`, and sliding-window layers with pages of their own, `swa`."""
    return PoolGroup(
        full=Pair.backed(full, num_host_pages, layout, layers=full_layers),
        swa=Pair.backed(swa, num_swa_host_pages, layout, pages="own", layers=swa_layers),
    )


def hybrid_state(
    kv: DevicePool,
    state: DevicePool,
    *,
    kv_layers: Sequence[int],
    state_layers: Sequence[int],
    num_host_pages: int,
    num_host_slots: int,
    layout: str = _PAGE_FIRST,
) -> PoolGroup:
    """Return attention layers, `kv`, and recurrent layers whose slots are pages of their own, `state`.

    Args:
        num_host_slots: Host pages of the states: a page is one slot.
    """
    return PoolGroup(
        kv=Pair.backed(kv, num_host_pages, layout, layers=kv_layers),
        state=Pair.backed(state, num_host_slots, layout, pages="own", layers=state_layers),
    )


def with_draft(
    target: DevicePool,
    draft: DevicePool,
    *,
    num_host_pages: int,
    layout: str = _PAGE_FIRST,
    pages: PageRule | None = None,
) -> PoolGroup:
    """Return a model, `target`, and its draft model side by side, `draft`, each in a pool of its own.

    The draft's layers stand behind the target's: layer `i` of the draft is `target.num_layers + i`.

    Args:
        pages: The draft's pages, made of the target's; None: the same.
    """
    behind = range(target.num_layers, target.num_layers + draft.num_layers)
    return PoolGroup(
        target=Pair.backed(target, num_host_pages, layout),
        draft=Pair.backed(draft, num_host_pages, layout, pages=pages or "same", layers=behind),
    )


def packed_draft(
    target: DevicePool, draft: DevicePool, *, num_host_pages: int, layout: str = _PAGE_FIRST
) -> PoolGroup:
    """Return a model and its draft model in one pair of pools, the draft's layers behind the target's.

    A page of the host pool then holds both. Layer `i` of the draft is `target.num_layers + i`.

    Raises:
        GeometryError: The two differ in more than their number of layers, or not every layer has tensors
            of its own.
    """
    return PoolGroup(kv=Pair.backed(_joined(target, draft), num_host_pages, layout))


def _joined(target: DevicePool, draft: DevicePool) -> DevicePool:
    """Return one pool over the tensors of two."""
    ours, theirs = _described(target), _described(draft)
    wanted = ours | {"tensors": _ONE_PER_LAYER}
    differ = [name for name in wanted if not wanted[name] == ours[name] == theirs[name]]
    if differ:
        raise GeometryError(
            "a draft pool that is packed with its target",
            expected={name: wanted[name] for name in differ},
            got={name: f"{theirs[name]} (target: {ours[name]})" for name in differ},
            remedy="Use groups.with_draft, which keeps two pools.",
        )
    tensors = {name: [*target.tensors[name], *draft.tensors[name]] for name in target.tensors}
    names = [pool.spec.layer_names or () for pool in (target, draft)]
    spec = attrs.evolve(
        target.spec,
        num_layers=target.num_layers + draft.num_layers,
        layer_names=(*names[0], *names[1]) if all(names) else None,
    )
    return DevicePool.adopt(spec, tensors, axes=target.geometry.axes.text)


_ONE_PER_LAYER = "one per layer"


def _described(pool: DevicePool) -> dict[str, object]:
    spec = pool.spec
    facts: dict[str, object] = {
        "kind": spec.kind.value,
        "page_size": spec.page_size,
        "pages": pool.num_pages,
        "axes": pool.geometry.axes.text,
        "tensors": "one for all layers" if "l" in pool.geometry.axes.order else _ONE_PER_LAYER,
    }
    return facts | {part.name: f"{part.row_shape} of {part.dtype}" for part in spec.components}
