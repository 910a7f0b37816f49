"""Whole transfers by job number: what the second door's worker does. Imports no vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from offload import (
    BlockingScheduler,
    DevicePool,
    HostPool,
    Pair,
    PoolGroup,
    PoolSpec,
    RequestError,
    State,
    Transfer,
    TransferFailed,
)

Pages = NDArray[np.int64]


@attrs.frozen
class Ended:
    """A job of which nothing touches memory any more."""

    number: int
    good: bool
    nbytes: int
    seconds: float
    """From its submit."""


def sub_pages(
    chunks: Sequence[int] | Pages, count: int, *, first: int, blocks_per_chunk: int
) -> Pages:
    """Return the host page of each block of a chunked transfer.

    Args:
        chunks: Chunk ids in order; chunk `c` is the pages `c * blocks_per_chunk` and on.
        count: Blocks of the transfer.
        first: Index of its first block in its request: it may stand in the middle of a chunk.

    Raises:
        RequestError: The chunks do not hold so many blocks.
    """
    skip = first % blocks_per_chunk
    pages = np.asarray(chunks, np.int64)[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)
    found = pages.ravel()[skip : skip + count]
    if len(found) != count:
        raise RequestError(
            f"{count} blocks from block {first} on do not fit into {len(chunks)} chunks of "
            f"{blocks_per_chunk} blocks"
        )
    return found


def opaque_group(tensors: Sequence[torch.Tensor], num_host_pages: int) -> PoolGroup:
    """Return tensors of opaque pages with host memory behind them, one layer each.

    Shapes:
        tensors: [blocks, bytes] of one byte an element; pages may step further than they are long.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, tensor in enumerate(tensors):
        alike.setdefault((tensor.shape, tensor.stride()), []).append(layer)
    pairs: dict[str, Pair] = {}
    for number, layers in enumerate(alike.values()):
        mine = [tensors[layer].view(torch.uint8) for layer in layers]
        spec = PoolSpec.rows(num_layers=len(mine), page_size=1, row_bytes=mine[0].shape[1])
        device = DevicePool.adopt(spec, {"row": mine}, axes="p d")
        host = HostPool.allocate(
            spec,
            num_pages=num_host_pages,
            layout="layer_first",
            pinned=device.device.type == "cuda",
        )
        pairs[f"kv{number or ''}"] = Pair(device, host, layers=layers)
    return PoolGroup(layer_names=None, **pairs)


@attrs.define(eq=False)
class Jobs:
    """Transfers that are under way, by number. One thread."""

    scheduler: BlockingScheduler
    timeout_s: float
    _running: dict[int, tuple[Transfer, float]] = attrs.field(init=False, factory=dict)

    def store(self, number: int, device_pages: Pages, host_pages: Pages) -> None:
        """Start to copy blocks to the host, after what this thread's stream has queued."""
        scheduler = self.scheduler
        transfer = scheduler.backup(
            device_pages=device_pages, host_pages=host_pages,
            deadline=scheduler.now() + self.timeout_s, timeout=self.timeout_s,
        )  # fmt: skip
        self._running[number] = (transfer, time.perf_counter())

    def load(self, number: int, host_pages: Pages, device_pages: Pages) -> None:
        """Start to copy blocks to the device, after what this thread's stream has queued."""
        scheduler = self.scheduler
        transfer = scheduler.load(
            host_pages=host_pages, device_pages=device_pages,
            deadline=scheduler.now() + self.timeout_s, timeout=self.timeout_s,
        )  # fmt: skip
        self._running[number] = (transfer, time.perf_counter())

    def ended(self) -> list[Ended]:
        """Return the jobs that have ended since the last call."""
        over = []
        for number, (transfer, began) in list(self._running.items()):
            if transfer.done and transfer.state is not State.DRAINING:
                del self._running[number]
                good = transfer.state is State.DONE
                over.append(Ended(number, good, transfer.nbytes, time.perf_counter() - began))
        return over

    def wait(self, numbers: Iterable[int]) -> None:
        """Block until these jobs touch no memory any more, however they ended.

        Raises:
            TimeoutError: Not within `timeout_s`.
        """
        for number in numbers:
            found = self._running.get(number)
            if found is None:
                continue
            try:
                found[0].result(self.timeout_s)
            except TransferFailed:
                found[0].wait_source_reusable(self.timeout_s)

    def close(self) -> None:
        """Stop; wait until nothing moves."""
        self.scheduler.close(timeout=self.timeout_s)
