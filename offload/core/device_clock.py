"""Device timestamps on the host's clock: what makes GPU lanes out of pooled timing events.

A device tells only the distance between two of its events, in milliseconds as a 32-bit float: steps of
61 ns one second from the first event, 4 us after a minute, a quarter of a millisecond after an hour. So
distances are taken from an *anchor*, an event whose host time is known, and the anchor is renewed at
least every second. The length of a copy comes from its own two events, which are close together.

What a device says of two events in the wrong order is not the same everywhere. So an anchor serves the events
that were recorded after it, and those that had passed before it was taken; for one that may be either, the
anchor before it is kept.

Two anchors do not agree to the nanosecond, and readers drop slices that overlap: the times of a stream
are clamped into its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import attrs

EventT = TypeVar("EventT")

RENEW_NS: Final = 1_000_000_000
"""How old an anchor may grow: the resolution of a 32-bit float of milliseconds is 61 ns there."""

TRIES: Final = 3
"""An anchor is the tightest of so many; a preempted host thread spoils one of them, rarely two."""


@attrs.frozen(eq=False)
class _Anchor(Generic[EventT]):
    """An event that has passed, and when."""

    event: EventT
    host_ns: int
    known_ns: int
    """When the host knew: what is recorded from then on comes after it."""


@attrs.define(eq=False)
class DeviceClock(Generic[EventT]):
    """Turns a pair of timing events into host nanoseconds, in the order of one stream.

    One per stream, used by the thread that sees its completions.
    """

    record: Callable[[], EventT | None]
    """Records a timing event on an *idle* stream and returns when the device has passed it; None when that
    takes too long to say when it was."""
    elapsed_ms: Callable[[EventT, EventT], float]
    """Milliseconds from the first event to the second, which passed later."""
    now: Callable[[], int]
    """Host nanoseconds."""
    renew_ns: int = RENEW_NS
    _anchors: deque[_Anchor[EventT]] = attrs.field(factory=lambda: deque(maxlen=2), init=False)
    """The newest first."""
    _last_end: int = attrs.field(default=0, init=False)

    def interval(self, first: EventT, last: EventT, issued_ns: int) -> tuple[int, int]:
        """Return when the work between two events ran: `(start_ns, end_ns)` of the host.

        Args:
            first: Recorded before the work.
            last: Recorded after it; it has passed.
            issued_ns: When the host enqueued it, before it recorded `first`; nothing starts before that.
        """
        return self.measured(first, last, issued_ns) or self.seen(issued_ns)

    def measured(self, first: EventT, last: EventT, issued_ns: int) -> tuple[int, int] | None:
        """Return the same; None where there is no anchor to tell it by."""
        start = self._when(first, issued_ns)
        if start is None:
            return None
        return self._in_order(start, start + _ns(self.elapsed_ms(first, last)), issued_ns)

    def seen(self, issued_ns: int) -> tuple[int, int]:
        """Return the same for work whose events carry no times, by when the host sees its end: now.

        It is late by as long as the host took to see it, and begins when it was enqueued, or when what was
        before it ended.
        """
        return self._in_order(issued_ns, self.now(), issued_ns)

    def _in_order(self, start: int, end: int, issued_ns: int) -> tuple[int, int]:
        start, end = clamp(start, end, after=max(self._last_end, issued_ns))
        self._last_end = end
        return start, end

    def _when(self, event: EventT, issued_ns: int) -> int | None:
        """Return the host's time of an event that has passed; None without an anchor."""
        for anchor in self._anchors:
            if anchor.known_ns <= issued_ns < anchor.host_ns + 2 * self.renew_ns:
                when = anchor.host_ns + _ns(self.elapsed_ms(anchor.event, event))
                self._renew()
                return when
        fresh = self._take()
        if fresh is None:
            return None
        if not self._anchors or self._old():
            self._anchors.appendleft(fresh)
        return fresh.host_ns - _ns(self.elapsed_ms(event, fresh.event))

    def _renew(self) -> None:
        fresh = self._take() if self._old() else None
        if fresh is not None:
            self._anchors.appendleft(fresh)

    def _old(self) -> bool:
        return self.now() - self._anchors[0].host_ns >= self.renew_ns

    def _take(self) -> _Anchor[EventT] | None:
        best: tuple[int, EventT, int] | None = None
        for _ in range(TRIES):
            before = self.now()
            event = self.record()
            after = self.now()
            if event is None:
                break
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        return None if best is None else _Anchor(best[1], best[2], self.now())


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def clamp(start: int, end: int, *, after: int) -> tuple[int, int]:
    """Return the interval moved, and cut if it must be, so that it starts no earlier than `after`."""
    start = max(start, after)
    return start, max(start, end)
