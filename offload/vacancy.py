"""Waiting until pages are free of traffic: for whoever has them, and woken when he gives them back.

A waiter stands behind one request at a time, the youngest that has any of its pages: it is seldom woken more than
once, however many others wait and however much else goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
from anyio.lowlevel import checkpoint

from offload import actions
from offload.admission_thread import call
from offload.asked import closed_error, in_use
from offload.errors import RequestError
from offload.flight import LOOK_S

if TYPE_CHECKING:
    from offload.driver.loops import Signal
    from offload.shell import Places, Shell

POSTS = 1024
"""Posts of other threads that are taken before pages are looked at, per turn of the loop: about 10 ms."""

ANYBODY = -1
"""Whom they stand behind whose pages are held by no request of its own: each change wakes them."""


@attrs.define(eq=False)
class Vacancies:
    """Who waits for pages, by the request that has them. The loop's thread alone."""

    _waiting: dict[int, dict[Signal | threading.Event, None]] = attrs.field(factory=dict)
    _due: deque[Signal | threading.Event] = attrs.field(factory=deque)
    """Those who are to be woken."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._due)

    @contextmanager
    def entered(self, holder: int, waiter: Signal | threading.Event) -> Iterator[None]:
        """Let somebody stand behind a request."""
        self.enter(holder, waiter)
        try:
            yield
        finally:
            self.leave(holder, waiter)

    def enter(self, holder: int, waiter: Signal | threading.Event) -> None:
        """Let somebody stand behind a request."""
        self._waiting.setdefault(holder, {})[waiter] = None

    def leave(self, holder: int, waiter: Signal | threading.Event) -> None:
        """Let somebody go, woken or not."""
        behind = self._waiting.get(holder)
        if behind is not None:
            behind.pop(waiter, None)
            if not behind:
                del self._waiting[holder]

    def vacate(self, holder: int) -> None:
        """Note that a request has given its pages back, or else that something has changed."""
        for each in (holder, ANYBODY):
            behind = self._waiting.pop(each, None)
            if behind:
                self._due.extend(behind)

    def wake(self, most: int) -> bool:
        """Wake those who are due, so many at most; return whether there are more."""
        for _ in range(min(most, len(self._due))):
            self._due.popleft().set()
        return bool(self._due)

    def wake_all(self) -> None:
        """Wake everybody: no pages are given back any more."""
        for holder in list(self._waiting):
            self.vacate(holder)
        self.wake(len(self._due))


async def until_idle(shell: Shell, places: Places) -> None:
    """Suspend until nobody has any of these pages. Raises as `Scheduler.idle`."""
    while not shell.take_inbox(POSTS):
        await checkpoint()
    while in_use(places):
        if shell.stuck is not None:
            raise closed_error(shell, "wait for idle pages") from shell.stuck
        actions.refuse_waiting_for(shell, places)
        signal = shell.loop.signal()
        with shell.vacancies.entered(_in_the_way(shell, places), signal):
            await signal.wait()
        shell.catch_up()


def block_until_idle(shell: Shell, places: Places, timeout: float | None) -> None:
    """Block this thread until nobody has any of these pages. Raises as `ThreadFace.wait_idle`."""
    end = None if timeout is None else time.monotonic() + timeout

    def stand(bed: threading.Event) -> int | None:
        if shell.stuck is not None or not in_use(places):
            return None
        holder = _in_the_way(shell, places)
        shell.vacancies.enter(holder, bed)
        return holder

    busy = True
    while busy and not shell.over:
        bed = threading.Event()
        # Everything this thread posted comes first; afterwards the tables alone know.
        holder = call(shell, lambda bed=bed: stand(bed))  # type: ignore[misc]
        if holder is None:
            break
        try:
            actions.refuse_waiting_for(shell, places)
            if not _slept(shell, bed, end):
                raise TimeoutError(f"pages are still busy after {timeout} s")
        finally:
            if not bed.is_set():
                shell.post(lambda bed=bed, holder=holder: shell.vacancies.leave(holder, bed))  # type: ignore[misc]
        busy = in_use(places)
    if in_use(places):
        raise closed_error(shell, "wait for idle pages") from shell.stuck


def _slept(shell: Shell, bed: threading.Event, end: float | None) -> bool:
    """Block this thread until it is woken, or nothing will happen any more; return False when it is late."""
    while not bed.is_set() and not shell.over:
        left = LOOK_S if end is None else end - time.monotonic()
        if left <= 0:
            return False
        bed.wait(
            min(left, LOOK_S)
        )  # a loop that is closed wakes nobody: who waits looks for that himself
    return True


def _in_the_way(shell: Shell, places: Places) -> int:
    """Return the youngest request that has any of these pages, or `ANYBODY`. On the loop's thread.

    Raises:
        RequestError: One that will never give them back.
    """
    youngest = max((max(table.peek(pages, write=True), default=ANYBODY) for table, pages in places))
    if youngest == ANYBODY:
        return ANYBODY  # they are locked
    piece = shell.machine.find(youngest)
    if piece is None:
        raise RequestError(
            "these pages include some that a scheduler with a lost device had in the air: they are never free "
            "again, so a wait for them would not end."
        )
    return youngest if piece.parent is None else ANYBODY
