"""io backend `memcpy_batch`: the runs of a layer, over all pools of a group, in one call of the CUDA driver.

The CUDA driver gives no order to the copies of one call, so none may touch the destination of another:
destination pages are distinct, runs of one page do not overlap, and no two members of a group share a pool.
A call takes at most `MAX_OPS` copies, and a layer with more takes several calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import attrs
import numpy as np

from offload.backend.addresses import addresses
from offload.backend.base import Jobs, PoolCopy
from offload.backend.direct import DirectCopy
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.driver.cuda_calls import Words, here
from offload.pool import DevicePool, HostPool

MAX_OPS = 4096
"""Copies in one call. 51,828 have crashed a CUDA driver (vllm#49276), and ROCm faults above 8,192."""

Ranges = tuple[Words, Words, Words]
"""Addresses of sources and of destinations, and sizes."""


class MemcpyBatchBackend:
    """Hands all runs of a layer to the CUDA driver at once."""

    name = "memcpy_batch"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> MemcpyBatchCopy:
        """Find out which bytes; each layer then shifts them by its stride."""
        return MemcpyBatchCopy(PoolCopy.of(device, host, direction, runs))

    def copy_members(self, jobs: Jobs) -> None:
        """Enqueue one layer of several members, as few calls as the limit allows."""
        copies = [(cast("MemcpyBatchCopy", prepared), layer) for prepared, layer in jobs]
        joined = _joined(part for copy, layer in copies for part in copy.parts(layer))
        copies[0][0].enqueue(joined)


@attrs.define(eq=False)
class MemcpyBatchCopy(DirectCopy):
    """Prepared copies of `memcpy_batch`."""

    _kept: list[Ranges] = attrs.field(init=False, factory=list)
    """Every array handed to the CUDA driver: it may read them until the copies have ended."""

    def copy(self, layer: int) -> None:
        """Enqueue the runs of one pool layer on the current stream."""
        self.enqueue(self.ranges(layer))

    def enqueue(self, ranges: Ranges) -> None:
        """Hand ranges to the CUDA driver, and keep them as long as this object lives."""
        calls = here()
        sources, destinations, sizes = ranges
        for start in range(0, len(sizes), MAX_OPS):
            part = slice(start, start + MAX_OPS)
            arrays = destinations[part], sources[part], sizes[part]
            self._kept.append(arrays)
            calls.copy_batch(*arrays)

    def ranges(self, layer: int) -> Ranges:
        """Return what one pool layer moves, over all components."""
        return _joined(self.parts(layer))

    def parts(self, layer: int) -> list[Ranges]:
        """Return the same, by component."""
        return [
            addresses(self._both, index, layer, self._ops(index, layer))
            for index in range(len(self._both.pairs))
        ]


def _joined(parts: Iterable[Ranges]) -> Ranges:
    sources, destinations, sizes = (np.concatenate(one) for one in zip(*parts, strict=True))
    return sources, destinations, sizes
