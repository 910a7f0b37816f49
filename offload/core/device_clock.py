"""Device timestamps on the host's clock: what makes GPU lanes out of pooled timing events.

A device tells only the distance between two of its events, in milliseconds as a 32-bit float: steps of
61 ns one second from the first event, 4 us after a minute, a quarter of a millisecond after an hour. So
distances are taken from an *anchor*, an event whose host time is known, and the anchor is renewed at
least every second. The length of a copy comes from its own two events, which are close together.

Two anchors do not agree to the nanosecond, and readers drop slices that overlap: the times of a stream
are clamped into its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import attrs

EventT = TypeVar("EventT")

RENEW_NS: Final = 1_000_000_000
"""How old an anchor may grow: the resolution of a 32-bit float of milliseconds is 61 ns there."""

TRIES: Final = 3
"""An anchor is the tightest of so many; a preempted host thread spoils one of them, rarely two."""


@attrs.define(eq=False)
class DeviceClock(Generic[EventT]):
    """Turns a pair of timing events into host nanoseconds, in the order of one stream.

    One per stream, used by the thread that sees its completions.
    """

    record: Callable[[], EventT]
    """Records a timing event on an *idle* stream and waits until the device has passed it."""
    elapsed_ms: Callable[[EventT, EventT], float]
    """Milliseconds from the first event to the second; both have passed."""
    now: Callable[[], int]
    """Host nanoseconds."""
    renew_ns: int = RENEW_NS
    _anchor: tuple[EventT, int] | None = attrs.field(default=None, init=False)
    _last_end: int = attrs.field(default=0, init=False)

    def interval(self, first: EventT, last: EventT, issued_ns: int = 0) -> tuple[int, int]:
        """Return when the work between two events ran: `(start_ns, end_ns)` of the host.

        Args:
            first: Recorded before the work.
            last: Recorded after it; it has passed.
            issued_ns: When the host enqueued it; nothing starts before that.
        """
        event, host_ns = self._current()
        start = host_ns + round(self.elapsed_ms(event, first) * 1e6)
        end = start + round(self.elapsed_ms(first, last) * 1e6)
        start, end = clamp(start, end, after=max(self._last_end, issued_ns))
        self._last_end = end
        return start, end

    def _current(self) -> tuple[EventT, int]:
        if self._anchor is None or self.now() - self._anchor[1] >= self.renew_ns:
            self._anchor = self._take()
        return self._anchor

    def _take(self) -> tuple[EventT, int]:
        best: tuple[int, EventT, int] | None = None
        for _ in range(TRIES):
            before = self.now()
            event = self.record()
            after = self.now()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None
        return best[1], best[2]


def clamp(start: int, end: int, *, after: int) -> tuple[int, int]:
    """Return the interval moved, and cut if it must be, so that it starts no earlier than `after`."""
    start = max(start, after)
    return start, max(start, end)
