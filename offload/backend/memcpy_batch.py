"""io backend `memcpy_batch`: the runs of a layer, over all pools of a group, in one call of the CUDA driver.

The CUDA driver gives no order to the copies of one call, so none may touch the destination of another:
destination pages are distinct, runs of one page do not overlap, and no two members of a group share a pool.
A call takes at most `MAX_OPS` copies, and a layer with more takes several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import numpy as np

from offload.backend.addresses import address, addresses
from offload.backend.base import Jobs, PoolCopy
from offload.backend.direct import DirectCopy
from offload.core.geometry import ComponentGeometry
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.driver.cuda_calls import Words, here
from offload.pool import DevicePool, HostPool, Pool

MAX_OPS = 4096
"""Copies in one call. 51,828 have crashed a CUDA driver (vllm#49276), and ROCm faults above 8,192."""

Ranges = tuple[Words, Words, Words]
"""Addresses of sources and of destinations, and sizes."""

Shifts = dict[int, list[tuple[np.uint64, np.uint64]]]
"""By layer and component, how far its sources and its destinations lie behind those of layer 0: modulo 2**64,
as addresses are added."""


class MemcpyBatchBackend:
    """Hands all runs of a layer to the CUDA driver at once."""

    name = "memcpy_batch"

    def __init__(self) -> None:
        self._shifts: dict[tuple[Pool, Pool], Shifts] = {}

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> MemcpyBatchCopy:
        """Find out which bytes; how far each layer shifts them is kept for the next batch."""
        both = PoolCopy.of(device, host, direction, runs)
        shifts = self._shifts.setdefault((both.source, both.destination), {})
        return MemcpyBatchCopy(both, shifts)

    def copy_members(self, jobs: Jobs) -> None:
        """Enqueue one layer of several members, as few calls as the limit allows."""
        copies = [(cast("MemcpyBatchCopy", prepared), layer) for prepared, layer in jobs]
        copies[0][0].enqueue(joined(copies))


@attrs.define(eq=False)
class MemcpyBatchCopy(DirectCopy):
    """Prepared copies of `memcpy_batch`."""

    _shifts: Shifts = attrs.field(factory=dict)
    _kept: list[Ranges] = attrs.field(init=False, factory=list)
    """Every array handed to the CUDA driver: it may read them until the copies have ended."""

    _first: list[Ranges] = attrs.field(init=False, factory=list)
    """Layer 0, by component: other layers are the same, moved by a number."""

    _sizes: dict[tuple[int, ...], Words] = attrs.field(init=False, factory=dict)
    """Sizes of this and others together, by whose they are."""

    def copy(self, layer: int) -> None:
        """Enqueue the runs of one pool layer on the current stream."""
        self.enqueue(self.ranges(layer))

    def ranges(self, layer: int) -> Ranges:
        """Return what one pool layer moves, over all components."""
        return joined([(self, layer)])

    def enqueue(self, ranges: Ranges) -> None:
        """Hand ranges to the CUDA driver, and keep them as long as this object lives."""
        calls = here()
        sources, destinations, sizes = ranges
        for start in range(0, len(sizes), MAX_OPS):
            part = slice(start, start + MAX_OPS)
            arrays = destinations[part], sources[part], sizes[part]
            self._kept.append(arrays)
            calls.copy_batch(*arrays)

    def parts(self, layer: int) -> list[Ranges]:
        """Return what one pool layer moves, by component."""
        return [
            addresses(self._both, index, layer, self._ops(index, layer))
            for index in range(len(self._both.pairs))
        ]

    @property
    def first(self) -> list[Ranges]:
        """What layer 0 moves, by component."""
        if not self._first:
            self._first = self.parts(0)
        return self._first

    def shifts(self, layer: int) -> list[tuple[np.uint64, np.uint64]]:
        """Return what is added to layer 0, by component."""
        found = self._shifts.get(layer)
        if found is None:
            both = self._both
            found = self._shifts[layer] = [
                (_behind(both.source, ours, layer), _behind(both.destination, theirs, layer))
                for ours, theirs in both.pairs
            ]
        return found

    def sizes(self, others: Sequence[MemcpyBatchCopy]) -> Words:
        """Return the sizes of all these copies, which are those of any layer; made once."""
        key = tuple(map(id, others))
        found = self._sizes.get(key)
        if found is None:
            parts = [part[2] for copy in others for part in copy.first]
            found = self._sizes[key] = np.concatenate(parts)
        return found


def joined(copies: Sequence[tuple[MemcpyBatchCopy, int]]) -> Ranges:
    """Return what layers of several copies move together."""
    if any(copy.cut for copy, _ in copies):
        parts = [part for copy, layer in copies for part in copy.parts(layer)]
        sources, destinations, sizes = (np.concatenate(one) for one in zip(*parts, strict=True))
        return sources, destinations, sizes
    sizes = copies[0][0].sizes([copy for copy, _ in copies])
    sources, destinations = np.empty(len(sizes), np.uint64), np.empty(len(sizes), np.uint64)
    start = 0
    for copy, layer in copies:
        for (first, other, _), shifts in zip(copy.first, copy.shifts(layer), strict=True):
            end = start + len(first)
            np.add(first, shifts[0], out=sources[start:end])
            np.add(other, shifts[1], out=destinations[start:end])
            start = end
    return sources, destinations, sizes


def _behind(pool: Pool, part: ComponentGeometry, layer: int) -> np.uint64:
    first = address(pool, part, 0)
    behind = address(pool, part, layer) - first + layer * part.layer_stride
    return np.uint64(behind % (1 << 64))
