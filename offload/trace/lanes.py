"""Which lane a slice is drawn on, so that no two slices of a lane overlap partly.

Readers of a trace drop a slice that overlaps another of its thread by even a nanosecond unless one holds
the other. What cannot share a lane gets another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FORWARD: Final = 1
LOAD: Final = 2
BACKUP: Final = 3
SCHEDULER: Final = 4
FAMILIES: Final = {
    FORWARD: "forward",
    LOAD: "load H2D",
    BACKUP: "backup D2H",
    SCHEDULER: "scheduler",
}
"""The lanes of a trace from top to bottom, by the thread id of the first of each family."""

STRIDE: Final = 10
"""Further lanes of a family are `first + 10`, `first + 20`, ...: 12 is the second load lane."""


def place(slices: Iterable[tuple[int, int]], *, nested: bool) -> list[int]:
    """Return the lowest lane, from 0, on which each slice fits.

    Args:
        slices: `(start, end)`, sorted by start, the longer one first.
        nested: Whether a slice may lie inside another one of its lane. Copies may not: one inside another
            would read as its part.
    """
    open_ends: list[list[int]] = []
    return [_place_one(open_ends, start, end, nested) for start, end in slices]


def _place_one(open_ends: list[list[int]], start: int, end: int, nested: bool) -> int:
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or (nested and end <= ends[-1]):
            ends.append(end)
            return lane
    open_ends.append([end])
    return len(open_ends) - 1


def tid(family: int, lane: int) -> int:
    """Return the thread id of a family's lane."""
    return family + STRIDE * lane


def name(thread: int) -> str:
    """Return the lane's name: `forward`, `forward #2`, ..."""
    lane, family = divmod(thread, STRIDE)
    return FAMILIES[family] + (f" #{lane + 1}" if lane else "")


def sort_index(thread: int) -> int:
    """Return where the lane stands: all of a family together."""
    lane, family = divmod(thread, STRIDE)
    return family * 1000 + lane
