"""Deadlines: one heap, and one alarm set for the earliest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import attrs

from offload.driver.base import Driver
from offload.loop import LoopHandle

_SWEEP = 256
"""Forgotten alarms below which a sweep is not worth it."""

_PER_RING = 512
"""Calls made in one turn of the loop, when many have the same time: about 5 ms."""


def _not_at_all(_: Callable[[], None]) -> None:
    """Call nobody back any more."""


@attrs.define(order=True)
class Alarm:
    """One call to come. Cancelled, it is only a number in the heap."""

    when: float
    number: int
    callback: Callable[[], None] | None = attrs.field(order=False)


@attrs.define(eq=False)
class Timer:
    """Calls back on the loop's thread when the driver's clock passes a time."""

    _driver: Driver
    _loop: LoopHandle
    _do: Callable[[Callable[[], None]], None]
    """How to call back: nobody else would hear of what is raised."""

    _heap: list[Alarm] = attrs.field(factory=list)
    _cancelled: int = 0
    _count: itertools.count[int] = attrs.field(factory=itertools.count)
    _alarm: Callable[[], None] | None = None
    """Cancels the alarm that is set."""

    _set_for: float = 0.0

    def call_at(self, when: float, callback: Callable[[], None]) -> Alarm:
        """Call `callback` when the clock passes `when`; it must not mind being late. Returns what to cancel."""
        alarm = Alarm(when, next(self._count), callback)
        heappush(self._heap, alarm)
        if self._alarm is None or when < self._set_for:
            self._set()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Forget a call. The heap is swept when most of it is forgotten: far deadlines hold nothing."""
        if alarm.callback is None:
            return
        alarm.callback = None
        self._cancelled += 1
        if self._cancelled > _SWEEP and 2 * self._cancelled > len(self._heap):
            self._heap = [each for each in self._heap if each.callback is not None]
            heapify(self._heap)
            self._cancelled = 0

    def close(self) -> None:
        """Forget everything, who is called back first of all: he knows us."""
        self._do = _not_at_all
        self._heap.clear()
        if self._alarm is not None:
            self._alarm()
            self._alarm = None

    def _set(self) -> None:
        if self._alarm is not None:
            self._alarm()
            self._alarm = None
        if self._heap:
            self._set_for = self._heap[0].when
            set_alarm = self._driver.alarm or self._loop.alarm
            self._alarm = set_alarm(
                self._set_for - self._driver.now(), lambda: self._do(self._ring)
            )

    def _ring(self) -> None:
        self._alarm = None
        now, made = self._driver.now(), 0
        while self._heap and self._heap[0].when <= now and made < _PER_RING:
            alarm = heappop(self._heap)
            if alarm.callback is None:
                self._cancelled = max(0, self._cancelled - 1)
            else:
                made += 1
                callback, alarm.callback = alarm.callback, None
                callback()
        self._set()
