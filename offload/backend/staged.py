"""io backend `staged`: rows are put in the host pool's order on the device; the copy engine alone uses the link.

A backup gathers a layer's rows into device memory in which each page lies as the host pool wants it, and
copies from there. A load goes the other way.

How long the copies over the link are is the host layout's matter. Where one layer of a page is one run they
are at least that long, and pages that are neighbours in a layer (`layer_first`) are one copy. Where it is many
runs (`page_first`: one per token, 2 KiB for 8 heads of 128; `page_head`: one per token and head, 256 bytes)
each of them is a copy by itself: the copy engine moves those slowly, and `kernel` is the better choice.

Staging memory is bounded, one block per direction: what does not fit goes in several turns. Turns follow each
other on the stream, so no turn overwrites what the one before still needs. It is not of that stream's own
memory: torch keeps memory that was let go, and the stream that it belongs to, longer than ours lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import attrs
import numpy as np
import torch

from offload.backend.base import PoolCopy
from offload.backend.direct import DirectCopy
from offload.backend.kernel import KernelBackend, KernelCopy, rows_of
from offload.backend.kernel_rows import Rows
from offload.backend.memcpy_batch import MemcpyBatchCopy, Shifts
from offload.core.geometry import WORD, ComponentGeometry
from offload.core.kinds import Direction
from offload.core.plan import Runs, coalesce
from offload.driver.cuda_calls import here
from offload.pool import DevicePool, HostPool, Pool

STAGING_BYTES = 32 << 20
"""Staging memory of one direction, unless a single page needs more: 0.6 ms of a 55 GB/s link, so the
pause between two turns is small beside a turn."""


@attrs.frozen(eq=False)
class Staging:
    """Device memory for some pages of one layer. To the other backends it looks like a pool."""

    memory: torch.Tensor
    parts: tuple[ComponentGeometry, ...]
    pinned: bool = False

    @classmethod
    def like(cls, memory: torch.Tensor, host: tuple[ComponentGeometry, ...], pages: int) -> Staging:
        """Return memory in which every page is packed in the order in which the host pool has it.

        Components start at whole words whatever `pages` is, so one variant of the kernel serves all.
        """
        parts: list[ComponentGeometry] = []
        offset = 0
        for part in host:
            parts.append(_packed(part, offset))
            offset += _whole_words(pages * part.nbytes)
        return cls(memory, tuple(parts))

    def flat(self, component: str, layer: int) -> tuple[torch.Tensor, ComponentGeometry]:
        """Return the whole memory, and where a component lies in it: in the same place for every layer."""
        return self.memory, next(part for part in self.parts if part.name == component)


def _packed(host: ComponentGeometry, offset: int) -> ComponentGeometry:
    """Return the host's component with its axes in the same order and no gaps, one layer alone."""
    steps = {"token_stride": 0, "head_stride": 0, "dim_stride": 0}
    inner_first = sorted(
        zip(steps, host.axes, strict=True), key=lambda each: (each[1][1], each[1][0])
    )
    step = host.component.itemsize
    for name, (size, _) in inner_first:
        steps[name] = step
        step *= size
    return attrs.evolve(
        host,
        offset=offset,
        page_stride=host.nbytes,
        layer_stride=0,
        token_stride=steps["token_stride"],
        head_stride=steps["head_stride"],
        dim_stride=steps["dim_stride"],
        breaks=(),
    )


@attrs.frozen(eq=False)
class _Way:
    """What every turn between two pools has in common: found once, and kept between batches."""

    both: PoolCopy
    """The pair; its runs are of no matter."""
    staging: Staging
    load: bool
    room: int
    """Pages of a turn."""
    rows: tuple[Rows, ...]
    """Of the kernel, between the device pool and staging."""
    shifts: Shifts
    """Of the copies, between the host pool and staging."""

    @classmethod
    def between(cls, both: PoolCopy, memory: torch.Tensor, room: int, *, load: bool) -> _Way:
        """Return it for one pair and direction, over staging memory for so many pages."""
        theirs = tuple(pair[0 if load else 1] for pair in both.pairs)
        staging = Staging.like(memory, theirs, room)
        first, second = (cls._half(both, staging, half, both.runs) for half in (0, 1))
        return cls(both, staging, load, room, rows_of(second if load else first), {})

    @staticmethod
    def _half(both: PoolCopy, staging: Staging, half: int, runs: Runs) -> PoolCopy:
        """Return the copy into the staging memory (0), or out of it (1)."""
        pool, nbytes = cast("Pool", staging), runs.num_pages * _nbytes(staging)
        middle = zip(both.pairs, staging.parts, strict=True)
        if half == 0:
            pairs = tuple((ours, part) for (ours, _), part in middle)
            return PoolCopy(both.source, pool, pairs, runs, nbytes)
        pairs = tuple((part, theirs) for (_, theirs), part in middle)
        return PoolCopy(pool, both.destination, pairs, runs, nbytes)

    def turns(self, runs: Runs) -> Iterator[tuple[DirectCopy, DirectCopy]]:
        """Yield the two copies of each turn, in the order in which they are enqueued."""
        source, destination = runs.pages
        host = source if self.load else destination
        order = np.argsort(host, kind="stable")  # host neighbours together
        for start in range(0, len(order), self.room):
            turn = order[start : start + self.room]
            slots = np.arange(len(turn))
            first = self._half(self.both, self.staging, 0, coalesce(source[turn], slots))
            second = self._half(self.both, self.staging, 1, coalesce(slots, destination[turn]))
            if self.load:
                yield MemcpyBatchCopy(first, self.shifts), KernelCopy.of(second, self.rows)
            else:
                yield KernelCopy.of(first, self.rows), MemcpyBatchCopy(second, self.shifts)


class StagedBackend:
    """Relayout on the device, and the host pages' runs over the link."""

    name = "staged"

    def __init__(self) -> None:
        self._memory: dict[Direction, torch.Tensor] = {}
        self._ways: dict[tuple[Pool, Pool], _Way] = {}
        self._kernels = KernelBackend()

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> StagedCopy:
        """Split the pages into turns, and prepare both copies of each."""
        both = PoolCopy.of(device, host, direction, runs)
        if not runs.num_pages:
            return StagedCopy(both, ())
        return StagedCopy(both, tuple(self._way(both, direction, _room(device)).turns(runs)))

    def warm_up(self, device: DevicePool, host: HostPool, direction: Direction) -> None:
        """Take the staging memory, and launch every variant of the kernel for no pages."""
        page = np.zeros(1, np.int64)
        staged = self.prepare(device, host, direction, coalesce(page, page))
        for kernel in staged.kernels:
            self._kernels.warm_up_copy(kernel, layers_at_once=False)

    def _way(self, both: PoolCopy, direction: Direction, room: int) -> _Way:
        memory = self._block(both, direction, room)
        key = both.source, both.destination
        found = self._ways.get(key)
        if found is None or found.staging.memory is not memory:
            load = direction is Direction.LOAD
            found = self._ways[key] = _Way.between(both, memory, room, load=load)
        return found

    def _block(self, both: PoolCopy, direction: Direction, pages: int) -> torch.Tensor:
        """Return this direction's memory. Both directions have their own stream, so nothing is shared."""
        nbytes = sum(_whole_words(pages * part.nbytes) for part, _ in both.pairs)
        found = self._memory.get(direction)
        if found is None or found.numel() < nbytes:
            load = direction is Direction.LOAD
            device = (both.destination if load else both.source).device
            found = self._memory[direction] = here().device_memory(nbytes, device)
        return found


def _room(device: DevicePool) -> int:
    """Return how many pages of one layer are staged at a time."""
    return max(1, STAGING_BYTES // device.geometry.page_bytes)


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD


def _nbytes(staging: Staging) -> int:
    return sum(part.nbytes for part in staging.parts)


@attrs.define(eq=False)
class StagedCopy(DirectCopy):
    """Prepared copies of `staged`."""

    _turns: tuple[tuple[DirectCopy, DirectCopy], ...]

    @property
    def kernels(self) -> list[KernelCopy]:
        """Those of its copies that are kernels."""
        return [copy for turn in self._turns for copy in turn if isinstance(copy, KernelCopy)]

    def copy(self, layer: int) -> None:
        """Enqueue both copies of every turn of one pool layer on the current stream."""
        for first, second in self._turns:
            first.copy(layer)
            second.copy(layer)

    def num_ops(self, layer: int) -> int:
        """Return the number of launches and of ranges handed to the copy engine."""
        return sum(copy.num_ops(layer) for turn in self._turns for copy in turn)
