"""The pools of a DeepSeek-V4 model, from its sizes.

Every layer keeps a sliding window of tokens; most also keep the whole past compressed, 4 or 128 tokens to
one entry. Compressed pools share the pages of the full past, and window pools have pages of their own:

| member             | layers    | one page                                     | pages     |
|--------------------|-----------|----------------------------------------------|-----------|
| `c4`               | ratio 4   | page_size / 4 entries, padded                | anchor    |
| `c4_indexer`       | ratio 4   | page_size / 4 index rows                     | as `c4`   |
| `c4_indexer_scale` | ratio 4   | their scales, where those are kept apart     | as `c4`   |
| `c128`             | ratio 128 | page_size / 128 entries, padded              | as `c4`   |
| `swa`              | all       | swa_page_size tokens, padded                 | own       |
| `c4_state`         | ratio 4   | a ring of the compressor's states            | as `swa`  |
| `c4_indexer_state` | ratio 4   | a ring of the indexer's compressor's states  | as `swa`  |

Source: the pool list of SGLang's HiCache for DeepSeek-V4. The sizes of one entry are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs
import torch

from offload.arguments import positive
from offload.core.kinds import Layout
from offload.errors import GeometryError, UnknownNameError
from offload.group import Pair, PoolGroup
from offload.pool import DevicePool
from offload.spec import PoolSpec

_RATIOS = (4, 128)


@attrs.frozen
class V4Pool:
    """One pool of the group."""

    spec: PoolSpec
    layers: tuple[int, ...]
    """The model layers that it has, in the order of its own."""

    window: bool
    """Whether its pages are those of the sliding window."""


def _ratios(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class DeepSeekV4:
    """What a rank's pools are computed from."""

    compress_ratios: tuple[int, ...] = attrs.field(converter=_ratios)
    """By layer: 4 or 128 tokens to one compressed entry; anything else: the window alone."""

    page_size: int
    """Tokens of a page of the compressed pools; a multiple of every ratio."""

    swa_page_size: int
    """Tokens of a page of the window."""

    entry_bytes: int = 584
    """One token, or one compressed entry: 448 fp8 values, 64 bf16 ones of the rope part, 8 scales."""

    page_multiple: int = 576
    """Pages of entries are padded to a multiple of so many bytes."""

    indexer_bytes: int = 132
    """One index row: 128 fp8 values and their scale. 64 where rows are fp4."""

    indexer_scale_bytes: int = 0
    """Scales of an index row that lie in a pool of their own, as with fp4 rows (4); 0: none do."""

    ring_size: int = 8
    """States that a compressor of ratio 4 keeps: of two windows, which overlap."""

    state_bytes: int = 8192
    """One state: 2 x 512 values and as many scores, of 4 bytes."""

    indexer_state_bytes: int = 2048
    """The same for the indexer, with 128 values."""

    def pools(self) -> dict[str, V4Pool]:
        """Return the pools by member name, the anchor first.

        Raises:
            GeometryError: A size is not positive, or a ratio does not divide the page.
        """
        self._check()
        four, far = (self._layers(ratio) for ratio in _RATIOS)
        slots = self.page_size // 4
        rows = {
            "c4": (four, self._padded(slots)),
            "c4_indexer": (four, slots * self.indexer_bytes),
            "c4_indexer_scale": (four, slots * self.indexer_scale_bytes),
            "c128": (far, self._padded(self.page_size // 128)),
        }
        found = {
            name: self._rows(layers, self.page_size, nbytes, window=False)
            for name, (layers, nbytes) in rows.items()
            if layers and nbytes
        }
        every = tuple(range(len(self.compress_ratios)))
        nbytes = self._padded(self.swa_page_size)
        found["swa"] = self._rows(every, self.swa_page_size, nbytes, window=True)
        if four:
            found["c4_state"] = self._state(four, self.state_bytes)
            found["c4_indexer_state"] = self._state(four, self.indexer_state_bytes)
        return found

    def allocate(
        self, *, num_pages: int, num_swa_pages: int, device: str | torch.device = "cpu"
    ) -> dict[str, DevicePool]:
        """Return new device pools by member name; an engine adopts its own tensors with `pools` instead."""
        return {
            name: DevicePool.allocate(
                pool.spec, num_pages=num_swa_pages if pool.window else num_pages, device=device
            )
            for name, pool in self.pools().items()
        }

    def _check(self) -> None:
        positive(
            "DeepSeekV4",
            layers=len(self.compress_ratios),
            page_size=self.page_size,
            swa_page_size=self.swa_page_size,
            page_multiple=self.page_multiple,
        )
        wrong = [
            ratio for ratio in _RATIOS if ratio in self.compress_ratios and self.page_size % ratio
        ]
        if wrong:
            raise GeometryError(
                "DeepSeekV4",
                expected={"page_size": f"a multiple of {' and '.join(map(str, wrong))}"},
                got={"page_size": self.page_size},
            )

    def _layers(self, ratio: int) -> tuple[int, ...]:
        return tuple(layer for layer, each in enumerate(self.compress_ratios) if each == ratio)

    def _padded(self, entries: int) -> int:
        return -(-entries * self.entry_bytes // self.page_multiple) * self.page_multiple

    def _rows(
        self, layers: tuple[int, ...], page_size: int, nbytes: int, *, window: bool
    ) -> V4Pool:
        spec = PoolSpec.rows(num_layers=len(layers), page_size=page_size, row_bytes=nbytes)
        return V4Pool(spec, layers, window)

    def _state(self, layers: tuple[int, ...], nbytes: int) -> V4Pool:
        spec = PoolSpec.state(
            num_layers=len(layers),
            components={"state": ((nbytes,), torch.uint8)},
            ring_size=self.ring_size,
        )
        return V4Pool(spec, layers, window=True)


def deepseek_v4(
    sizes: DeepSeekV4,
    devices: Mapping[str, DevicePool],
    *,
    num_host_pages: int,
    num_swa_host_pages: int,
    layout: str = Layout.PAGE_FIRST,
) -> PoolGroup:
    """Return the group of a DeepSeek-V4 model.

    Requests name the pages of the compressed pools, and those of the window as `members={"swa": ...}`.

    Args:
        devices: By member name, one for each of `sizes.pools()`.

    Raises:
        UnknownNameError: `devices` has a name that is none of the members.
        GeometryError: A pool is missing, or has other sizes.
    """
    pools = sizes.pools()
    for name in devices:
        if name not in pools:
            raise UnknownNameError("member of a DeepSeek-V4 group", name, pools)
    wrong = [name for name, pool in pools.items() if _spec(devices, name) != pool.spec]
    if wrong:
        raise GeometryError(
            "the pools of a DeepSeek-V4 group",
            expected={name: _said(pools[name].spec) for name in wrong},
            got={name: _said(_spec(devices, name)) for name in wrong},
        )
    pairs = {}
    for name, pool in pools.items():
        pages: Literal["same", "own"] = "own" if name == "swa" else "same"
        follows = "swa" if pool.window and name != "swa" else None
        number = num_swa_host_pages if pool.window else num_host_pages
        pairs[name] = Pair.backed(
            devices[name], number, layout, pages=pages, follows=follows, layers=pool.layers
        )
    return PoolGroup(layer_names=None, **pairs)


def _spec(devices: Mapping[str, DevicePool], name: str) -> PoolSpec | None:
    return attrs.evolve(devices[name].spec, layer_names=None) if name in devices else None


def _said(spec: PoolSpec | None) -> str:
    if spec is None:
        return "absent"
    return f"{spec.num_layers} layers, {spec.layer_bytes} bytes in a layer of a page"
