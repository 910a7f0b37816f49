"""Back-pressure: who waits for room, in which order, and how room is passed on.

Nobody is handed a permit. Whoever stands first is woken when there may be room, looks again, and submits in
the same breath; a waiter that is cancelled after it was woken wakes the next one as it leaves. So a permit
can be neither lost nor taken twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

import attrs

from offload.core.budget import Budget

_SWEEP = 256
"""Places that were left, below which a sweep is not worth it."""


REFUSE_AT_ONCE = 256
"""Waiters woken at once when the scheduler closes: about 5 ms of the loop."""


class Settable(Protocol):
    """What wakes a waiter: an event of the loop, or a callback's stand-in."""

    def set(self) -> object:
        """Wake it."""

    def is_set(self) -> bool:
        """Whether it was woken and has not looked yet."""


@attrs.define(eq=False)
class Place:
    """One waiter in the lot."""

    priority: float
    number: int
    nbytes: int
    event: Settable
    expired: bool = False
    left: bool = False

    def expire(self) -> None:
        """Wake it because its deadline has passed."""
        if not self.left:
            self.expired = True
            self.event.set()


@attrs.define(eq=False)
class ParkingLot:
    """Waiters for room, by priority and then by arrival."""

    budget: Budget
    """What knows how much is queued. The lot refers to nothing that refers to it."""

    most: int | None
    """Bytes that may be queued; None is unbounded."""

    _heap: list[tuple[float, int, Place]] = attrs.field(factory=list)
    _count: itertools.count[int] = attrs.field(factory=itertools.count)
    parked: int = 0
    """How many wait."""

    _refused: Iterator[Place] = attrs.field(factory=lambda: iter(()))
    """Those who are still to hear that the scheduler has closed."""

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes may be submitted now; into an empty queue anything may."""
        queued = self.budget.queued_bytes
        return self.most is None or not queued or queued + nbytes <= self.most

    def open_for(self, priority: float, nbytes: int) -> bool:
        """Return whether a newcomer may submit at once: there is room, and nobody as urgent waits."""
        if self.most is not None and not self.fits(nbytes):
            return False
        head = self._head() if self.parked else None
        return head is None or head.priority < priority

    def enter(self, priority: float, nbytes: int, event: Settable) -> Place:
        """Enter the lot; `leave` it in any case."""
        place = Place(priority, next(self._count), nbytes, event)
        heappush(self._heap, (-priority, place.number, place))
        self.parked += 1
        return place

    def may_go(self, place: Place) -> bool:
        """Return whether a woken waiter may submit."""
        return self._head() is place and self.fits(place.nbytes)

    def leave(self, place: Place) -> None:
        """Leave the lot, served or not, and let the next one look."""
        if not place.left:
            place.left = True
            self.parked -= 1
            if len(self._heap) > _SWEEP and len(self._heap) > 2 * self.parked:
                self._heap = [entry for entry in self._heap if not entry[2].left]
                heapify(self._heap)
            self.wake()
            self._refuse_next()

    def wake(self) -> None:
        """Let the first waiter look, if there is room for it."""
        head = self._head()
        if head is not None and not head.event.is_set() and self.fits(head.nbytes):
            head.event.set()

    def refuse(self) -> None:
        """Wake everybody, some at a time: the scheduler has closed. Who leaves wakes another."""
        self._refused = iter([place for _, _, place in self._heap])
        for _ in range(REFUSE_AT_ONCE):
            self._refuse_next()

    def _refuse_next(self) -> None:
        for place in self._refused:
            if not place.left:
                place.event.set()
                return

    def _head(self) -> Place | None:
        heap = self._heap
        while heap and heap[0][2].left:
            heappop(heap)
        return heap[0][2] if heap else None
