"""What measures a forward: points of a compute stream, and when the device passed them.

Where compute is a thread, a point is a time that is known at once. On a GPU it is an event, and its time is
known when the device has passed it, long after the host has gone on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Mark: TypeAlias = object
"""A point, as its stopwatch makes it."""

Interval: TypeAlias = "tuple[int, int] | None"
"""Start and end in nanoseconds of the host's clock; None: it could not be measured."""


class Stopwatch(Protocol):
    """Measures what compute does between two points."""

    def mark(self) -> Mark | None:
        """Mark the present end of the calling thread's compute stream; None where that cannot be.

        It cannot while the stream captures a graph, or where the call for it fails.
        """

    def between(self, first: Mark, last: Mark, told: Callable[[Interval], None]) -> None:
        """Call `told` once with the time between two points of one stream, when both have passed.

        On any thread, this one at once included; in the order of the points where the stream is one. It
        must not block.
        """
