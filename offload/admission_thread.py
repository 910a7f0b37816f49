"""A submit of another thread, on its way in: the thread waits, the loop's thread admits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

import attrs

from offload import actions, admission
from offload.asked import check_may_block, closed_error
from offload.entry import Entry
from offload.flight import LOOK_S
from offload.parking import Place
from offload.timer import Alarm
from offload.transfer import Transfer
from offload.waits import check_timeout

if TYPE_CHECKING:
    from offload.shell import Shell

T = TypeVar("T")

_INSTANT = 0.05
"""Seconds that a timeout of 0 gives the loop to say whether there is room."""


def submit(shell: Shell, entry: Entry, timeout: float | None) -> Transfer:
    """Admit a request; block this thread while there is no room.

    Raises:
        TimeoutError: No room within `timeout` seconds, or before the deadline; or the loop has not looked by
            then, and the text says which. Nothing was submitted.
        SchedulerClosedError: It is closed, or its loop has ended.
    """
    check_may_block(shell, "submit", _instead(entry))
    shell.refuse_closed()
    check_timeout(timeout)
    entrant = _Entrant(shell, entry, timeout)
    patience = timeout or (None if timeout is None else _INSTANT)
    try:
        if not shell.post(entrant.start):
            raise closed_error(shell)
        answered = _answered(shell, entrant.future, patience)
    except BaseException:  # a signal's, or an exception thrown into this thread
        if not entrant.give_up():
            entrant.future.add_done_callback(_undo)
        raise
    if not answered and entrant.give_up():
        raise entrant.too_late()
    return entrant.future.result()


def submit_nowait(shell: Shell, entry: Entry) -> Transfer:
    """Admit a request, or raise `anyio.WouldBlock` where it would have to wait for room."""
    check_may_block(shell, "submit", _instead(entry))
    return call(shell, lambda: admission.submit_nowait(shell, entry), _undo)


def _instead(entry: Entry) -> str:
    """Return what to call on the loop's own thread."""
    submit = f"scheduler.{entry.direction}"
    return f"Call `await {submit}(...)` or `{submit}_nowait(...)`, or submit in a worker thread."


def call(shell: Shell, act: Callable[[], T], undo: Callable[[Future[T]], None] | None = None) -> T:
    """Have something done on the loop's thread; block this one until it is.

    Args:
        undo: Called with what came of it when this thread was thrown out of waiting meanwhile.

    Raises:
        SchedulerClosedError: The loop has ended.
    """
    check_may_block(shell, "call `from_thread`", "Call the scheduler itself.")
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(act())
            except BaseException as error:  # raised in the thread that waits
                future.set_exception(error)
                if not isinstance(error, Exception):  # a signal's, which interrupted the loop
                    raise

    try:
        if not shell.post(run):
            raise closed_error(shell)
        _answered(shell, future, None)
    except BaseException:
        if not future.cancel() and undo is not None:
            future.add_done_callback(undo)
        raise
    return future.result()


@attrs.define(eq=False)
class _Retry:
    """A thread's place in the parking lot: woken, it tries again on the loop's thread."""

    again: Callable[[], object]
    _woken: bool = False

    def set(self) -> None:
        """Try again soon."""
        if not self._woken:
            self._woken = True
            self.again()

    def is_set(self) -> bool:
        """Whether it is about to try."""
        return self._woken

    def clear(self) -> None:
        """Wait to be woken once more."""
        self._woken = False


@attrs.define(eq=False)
class _Entrant:
    """A request of another thread, on its way in. All but `future` is the loop's business."""

    shell: Shell
    entry: Entry
    timeout: float | None
    """Seconds that its thread waits for room; None is without end."""

    looked: bool = False
    """Whether the loop has looked for room."""

    future: Future[Transfer] = attrs.field(factory=Future)
    place: Place | None = None
    alarm: Alarm | None = None

    def start(self) -> None:
        """Submit, or park."""
        shell, wanted = self.shell, self.entry
        try:
            shell.refuse_closed()
            if shell.parking.open_for(wanted.priority, wanted.request.nbytes):
                self._admit()
                return
            self.looked = True
            if self.timeout == 0:
                self._fail(self.too_late())
                return
            if wanted.hold is not None:
                actions.let_go(shell, wanted.hold.pieces)
            retry = _Retry(lambda: shell.post(self._again))
            self.place = shell.parking.enter(wanted.priority, wanted.request.nbytes, retry)
            if wanted.request.deadline is not None:
                self.alarm = shell.timer.call_at(wanted.request.deadline, self.place.expire)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._fail(error)

    def _again(self) -> None:
        shell, place = self.shell, self.place
        assert place is not None
        if place.left:
            return
        try:
            shell.refuse_closed()
            if self.future.cancelled():
                self._withdraw()
            elif place.expired:
                raise TimeoutError("the deadline passed while it waited for room")
            elif shell.parking.may_go(place):
                self._admit()
                self._withdraw()
            else:
                assert isinstance(place.event, _Retry)
                place.event.clear()
        except BaseException as error:  # noqa: BLE001 - the same
            self._withdraw()
            self._fail(error)

    def _admit(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(admission.admit(self.shell, self.entry))
            except BaseException as error:  # the same
                self.future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
        if not isinstance(error, Exception):  # a signal's: the loop's thread was interrupted
            raise error

    def too_late(self) -> TimeoutError:
        """Return what its thread is told when it has waited for so long."""
        why = (
            "no room"
            if self.looked
            else "the scheduler's loop was busy and has not looked for room"
        )
        return TimeoutError(f"{why} within {self.timeout} s; nothing was submitted")

    def give_up(self) -> bool:
        """Withdraw after a timeout; return False when it was too late and the transfer exists."""
        if not self.future.cancel():
            return False
        self.shell.post(self._withdraw)
        return True

    def _withdraw(self) -> None:
        if self.place is not None:
            self.shell.parking.leave(self.place)
        if self.alarm is not None:
            self.shell.timer.cancel(self.alarm)


def _undo(future: Future[Transfer]) -> None:
    """Take back a submit whose thread was thrown out of waiting for it."""
    if future.exception() is None:
        future.result().cancel()


def _answered(shell: Shell, future: Future[T], timeout: float | None) -> bool:
    """Block until the loop's thread has answered; return whether it has within `timeout`.

    Raises:
        SchedulerClosedError: The loop has ended before it answered.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_S if end is None else end - time.monotonic()
        try:
            future.exception(min(max(left, 0.0), LOOK_S))
        except FutureTimeout:
            if end is not None and time.monotonic() >= end:
                return False
            if shell.dead:
                raise closed_error(shell) from None
        else:
            return True
