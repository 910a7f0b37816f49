"""Deadlines: one heap, and one alarm set for the earliest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush

import attrs

from offload.driver.base import Driver
from offload.loop import Home


@attrs.define(eq=False)
class Timer:
    """Calls back on the loop's thread when the driver's clock passes a time."""

    _driver: Driver
    _home: Home
    _heap: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list)
    _count: itertools.count[int] = attrs.field(factory=itertools.count)
    _alarm: Callable[[], None] | None = None
    """Cancels the alarm that is set."""

    _set_for: float = 0.0

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call `callback` when the clock passes `when`. It must not mind being late, or no longer needed."""
        heappush(self._heap, (when, next(self._count), callback))
        if self._alarm is None or when < self._set_for:
            self._set()

    def close(self) -> None:
        """Forget everything."""
        self._heap.clear()
        if self._alarm is not None:
            self._alarm()
            self._alarm = None

    def _set(self) -> None:
        if self._alarm is not None:
            self._alarm()
            self._alarm = None
        if self._heap:
            self._set_for = self._heap[0][0]
            set_alarm = self._driver.alarm or self._home.alarm
            self._alarm = set_alarm(self._set_for - self._driver.now(), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self._driver.now()
        while self._heap and self._heap[0][0] <= now:
            heappop(self._heap)[2]()
        self._set()
