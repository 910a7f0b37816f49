"""io backend `memcpy_batch`: the runs of a layer in one call of the CUDA driver.

The CUDA driver gives no order to the copies of one call, so none may touch the destination of another:
destination pages are distinct, and runs of one page do not overlap. A call takes at most `MAX_OPS` copies,
and a layer with more takes several calls.
"""

from __future__ import annotations

import attrs
import numpy as np

from offload.backend.addresses import addresses
from offload.backend.base import PoolCopy
from offload.backend.direct import DirectCopy
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.driver.cuda_calls import Words, here
from offload.pool import DevicePool, HostPool

MAX_OPS = 4096
"""Copies in one call. 51,828 have crashed a CUDA driver (vllm#49276), and ROCm faults above 8,192."""


class MemcpyBatchBackend:
    """Hands all runs of a layer to the CUDA driver at once."""

    name = "memcpy_batch"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> MemcpyBatchCopy:
        """Find out which bytes; each layer then shifts them by its stride."""
        return MemcpyBatchCopy(PoolCopy.of(device, host, direction, runs))


@attrs.define(eq=False)
class MemcpyBatchCopy(DirectCopy):
    """Prepared copies of `memcpy_batch`."""

    _kept: list[tuple[Words, Words, Words]] = attrs.field(init=False, factory=list)
    """Every array handed to the CUDA driver: it may read them until the copies have ended."""

    def copy(self, layer: int) -> None:
        """Enqueue the runs of one pool layer on the current stream."""
        calls = here()
        sources, destinations, sizes = self.ranges(layer)
        for start in range(0, len(sizes), MAX_OPS):
            part = slice(start, start + MAX_OPS)
            arrays = destinations[part], sources[part], sizes[part]
            self._kept.append(arrays)
            calls.copy_batch(*arrays)

    def ranges(self, layer: int) -> tuple[Words, Words, Words]:
        """Return addresses of sources and of destinations, and sizes, of all components."""
        parts = [
            addresses(self._both, index, layer, self._ops(index, layer))
            for index in range(len(self._both.pairs))
        ]
        sources, destinations, sizes = (np.concatenate(one) for one in zip(*parts, strict=True))
        return sources, destinations, sizes
