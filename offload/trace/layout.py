"""Timeline -> lanes: the thread id of every slice, so that each lane holds nested or disjoint slices only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from offload.trace import lanes
from offload.trace.records import ASYNC_LANE, Layer, Step, Wait
from offload.trace.timeline import Timeline

Item: TypeAlias = "tuple[int, int, int, int]"
"""`(start, -end, kind, index)`: sorts as lanes are filled, outer slices first."""


@attrs.frozen
class Placement:
    """The thread id of each record, in the order of the timeline's tuples; 0 where it has none."""

    steps: Sequence[int]
    waits: Sequence[int]
    layers: Sequence[int]
    copies: Sequence[int]
    ticks: Sequence[int]
    plans: Sequence[int]
    issues: Sequence[int]

    def threads(self) -> set[int]:
        """Return every lane in use, and the four that a trace always shows."""
        used = set(lanes.FAMILIES)
        for kind in attrs.astuple(self, recurse=False):
            used.update(kind)
        return used - {0}


def place(timeline: Timeline) -> Placement:
    """Give each slice its lane."""
    t = timeline
    steps, waits, layers = [0] * len(t.steps), [0] * len(t.waits), [0] * len(t.layers)
    _fill(lanes.FORWARD, _forward_groups(t), (steps, waits, layers), nested=True)
    copies = [0] * len(t.copies)
    for family, direction in ((lanes.LOAD, "load"), (lanes.BACKUP, "backup")):
        _fill(family, _stream_groups(t, direction), (copies,), nested=False)
    ticks, plans, issues = [0] * len(t.ticks), [0] * len(t.plans), [0] * len(t.copies)
    _fill(lanes.SCHEDULER, [_scheduler_items(t)], (ticks, plans, issues), nested=True)
    return Placement(steps, waits, layers, copies, ticks, plans, issues)


def _forward_groups(t: Timeline) -> list[list[Item]]:
    """Return the slices of each forward lane, in the order of the lanes."""
    groups: dict[int, list[Item]] = {}
    kinds: tuple[Sequence[Step | Wait | Layer], ...] = (t.steps, t.waits, t.layers)
    for kind, ones in enumerate(kinds):
        for index, one in enumerate(ones):
            if one.lane != ASYNC_LANE:
                groups.setdefault(one.lane, []).append((one.start, -one.end, kind, index))
    return [groups.get(lane, []) for lane in range(max(groups, default=-1) + 1)]


def _stream_groups(t: Timeline, direction: str) -> list[list[Item]]:
    groups: dict[str, list[Item]] = {}
    for index, one in enumerate(t.copies):
        if one.direction == direction:
            groups.setdefault(one.stream, []).append((one.start, -one.end, 0, index))
    return [groups[stream] for stream in sorted(groups)]


def _scheduler_items(t: Timeline) -> list[Item]:
    items = [(one.start, -one.end, 0, index) for index, one in enumerate(t.ticks)]
    items += [(one.start, -one.end, 1, index) for index, one in enumerate(t.plans)]
    items += [(one.issue, -one.issued, 2, index) for index, one in enumerate(t.copies) if one.issue]
    return items


def _fill(
    family: int, groups: Sequence[list[Item]], kinds: Sequence[list[int]], *, nested: bool
) -> None:
    """Put each group on its own lane, and what does not fit there on lanes after the last group's."""
    extra = max(1, len(groups)) - 1
    for own, items in enumerate(groups):
        items.sort()
        offsets = lanes.place(((start, -end) for start, end, _, _ in items), nested=nested)
        for (_, _, kind, index), offset in zip(items, offsets, strict=True):
            kinds[kind][index] = lanes.tid(family, own if not offset else extra + offset)
        extra += max(offsets, default=0)
