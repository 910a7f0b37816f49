"""From page pairs to copies: runs of pages, planned once, and their bytes in any two geometries.

A *run* is `count` pages that follow each other on both sides. Runs depend on the page pairs alone, so they
are found once per page rule and serve every layer and every member of a group that follows the rule.
What a run means in bytes depends on the two geometries, never on the request.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from offload.core.geometry import ComponentGeometry, pair_runs
from offload.core.hazards import Pages
from offload.core.kinds import Direction
from offload.core.request import Part

Offsets = NDArray[np.int64]
"""Byte offsets or sizes, int64: they pass 2**31."""

_STEP = (1 << 32) + 1  # both halves of a key grow by one


_ONE = np.ones(1, np.int64)

_FEW = 4096
"""Pages up to which sorting costs no more than looking whether they come in order."""


@attrs.define(eq=False)
class Runs:
    """Pages that are neighbours on both sides, sorted by source, then destination."""

    source: Pages
    """First source page of each run."""

    destination: Pages
    """First destination page of each run."""

    count: Pages
    """Pages of each run, at least one."""

    num_pages: int
    """Their sum."""

    def __len__(self) -> int:
        """Return how many runs there are."""
        return len(self.count)

    @cached_property
    def pages(self) -> tuple[Pages, Pages]:
        """Source and destination pages, one pair per page."""
        first = np.cumsum(self.count) - self.count
        within = np.arange(self.num_pages) - np.repeat(first, self.count)
        return (
            np.repeat(self.source, self.count) + within,
            np.repeat(self.destination, self.count) + within,
        )

    @cached_property
    def by_destination(self) -> tuple[Pages, Pages]:
        """The same pairs in the order of their destinations."""
        source, destination = self.pages
        order = np.argsort(destination)
        return source[order], destination[order]


class Scratch:
    """Buffers that one planning thread keeps, because fresh ones cost more than the sort in page faults."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._steps = np.empty(0, np.int64)

    def take(self, n: int) -> tuple[Pages, Pages]:
        """Return two arrays of `n` numbers, overwritten by the next call."""
        if n > len(self._keys):
            self._keys, self._steps = np.empty(n, np.int64), np.empty(n, np.int64)
        return self._keys[:n], self._steps[:n]


def coalesce(source: Pages, destination: Pages, scratch: Scratch | None = None) -> Runs:
    """Sort page pairs and join neighbours.

    Both pages of a pair go into one number, so sorting the values sorts the pairs; a run goes on where
    that number grows by one in both halves.

    Args:
        source: Page ids below 2**31; may repeat.
        destination: As many, distinct.
    """
    n = len(source)
    if n < 2:
        return Runs(source, destination, _ONE[:n], n)
    keys, steps = (
        (np.empty(n, np.int64), np.empty(n, np.int64)) if scratch is None else scratch.take(n)
    )
    np.left_shift(source, 32, out=keys)
    np.bitwise_or(keys, destination, out=keys)
    after, before, steps = keys[1:], keys[:-1], steps[: n - 1]
    if n <= _FEW:
        keys.sort()
        np.subtract(after, before, out=steps)
    else:
        np.subtract(after, before, out=steps)
        if np.count_nonzero(steps < 0):  # pages often come in order: then the sort is saved
            keys.sort()
            np.subtract(after, before, out=steps)
    cuts = (steps != _STEP).nonzero()[0]
    if not len(cuts):
        return Runs(keys[:1] >> 32, keys[:1] & _STEP - 2, np.array([n]), n)
    bounds = np.empty(len(cuts) + 2, np.int64)  # where runs start, and the end
    bounds[0], bounds[-1] = 0, n
    np.add(cuts, 1, out=bounds[1:-1])
    first = keys[bounds[:-1]]
    starts = first >> 32
    np.bitwise_and(first, _STEP - 2, out=first)
    return Runs(starts, first, np.subtract(bounds[1:], bounds[:-1]), n)


Plan: TypeAlias = dict[int, Runs]
"""What a batch moves, by member of the group that it touches. Members that share their pages share the runs."""


def plan_copy(direction: Direction, every: list[Part], scratch: Scratch | None = None) -> Plan:
    """Plan the copies of a batch.

    Members whose pages are the same arrays, as those that follow the anchor have, are planned once.

    Args:
        every: The parts of all its requests, with distinct destinations.
    """
    if len({part[0] for part in every}) == 1:  # a single pair of pools, most often
        return {every[0][0]: coalesce(*_joined(direction, every), scratch)}
    members: dict[int, list[Part]] = {}
    for part in every:
        members.setdefault(part[0], []).append(part)
    planned: dict[tuple[int, ...], Runs] = {}
    plan: Plan = {}
    for member, theirs in members.items():
        rule = tuple(id(pages) for part in theirs for pages in part[1:])
        runs = planned.get(rule)
        if runs is None:
            runs = planned[rule] = coalesce(*_joined(direction, theirs), scratch)
        plan[member] = runs
    return plan


def _joined(direction: Direction, parts: list[Part]) -> tuple[Pages, Pages]:
    if len(parts) == 1:
        _, host, device = parts[0]
    else:
        host = np.concatenate([host for _, host, _ in parts])
        device = np.concatenate([device for _, _, device in parts])
    return (host, device) if direction is Direction.LOAD else (device, host)


@attrs.frozen(eq=False)
class Ops:
    """Contiguous copies of one component of one layer: byte offsets into the two arrays, and sizes."""

    source: Offsets
    destination: Offsets
    nbytes: Offsets

    def __len__(self) -> int:
        """Return how many copies there are."""
        return len(self.nbytes)

    def shifted(self, source: int, destination: int) -> Ops:
        """Return the same copies so many bytes further on each side: another layer's."""
        return Ops(self.source + source, self.destination + destination, self.nbytes)


def copy_ops(
    runs: Runs, source: ComponentGeometry, destination: ComponentGeometry, layer: int
) -> Ops:
    """Return the copies that move one component of one pool layer, as few as the geometries allow.

    Offsets are those of `ComponentGeometry.at`: into the layer's own array where it has one.
    """
    if source.adjacent and destination.adjacent:
        first, other, nbytes = runs.source, runs.destination, runs.count * source.nbytes
        starts = source.at(layer, 0) + first * source.page_stride
        ends = destination.at(layer, 0) + other * destination.page_stride
    else:
        inner = pair_runs(source, destination)
        pages, others = runs.pages
        starts = source.at(layer, 0) + pages * source.page_stride
        ends = destination.at(layer, 0) + others * destination.page_stride
        for count, (step, other_step) in inner.loops:
            index = np.arange(count)
            starts = (starts[:, None] + index * step).ravel()
            ends = (ends[:, None] + index * other_step).ravel()
        nbytes = np.full(len(starts), inner.nbytes)
    ops = Ops(starts, ends, nbytes)
    if source.breaks or destination.breaks:
        return _split(
            ops, np.array(source.breaks, np.int64), np.array(destination.breaks, np.int64)
        )
    return ops


def _split(ops: Ops, source_breaks: Offsets, destination_breaks: Offsets) -> Ops:
    """Cut copies where either side meets a break, until none crosses one."""
    start, end, nbytes = ops.source, ops.destination, ops.nbytes
    while True:
        room = np.minimum(_room(start, source_breaks), _room(end, destination_breaks))
        long = np.flatnonzero(room < nbytes)
        if not len(long):
            return Ops(start, end, nbytes)
        head = room[long]
        start = np.concatenate((start, start[long] + head))
        end = np.concatenate((end, end[long] + head))
        nbytes = np.concatenate((np.minimum(nbytes, room), nbytes[long] - head))


def _room(offsets: Offsets, breaks: Offsets) -> Offsets:
    """Return the bytes from each offset to the next break after it."""
    bounds = np.append(breaks, np.iinfo(np.int64).max)
    room: Offsets = bounds[np.searchsorted(bounds, offsets, side="right")] - offsets
    return room
