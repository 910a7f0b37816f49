"""The blocking face: the same scheduler for threads, and for engines that have no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import attrs

from offload import acts
from offload.admission import admit, submit_nowait
from offload.core.kinds import Direction
from offload.core.pages import PagesLike
from offload.counters import Counters
from offload.errors import SchedulerClosedError
from offload.flight import LOOK_S
from offload.group import PagePair
from offload.parking import Place
from offload.statistics import Statistics
from offload.submit import After, Submission
from offload.timer import Alarm
from offload.transfer import Transfer
from offload.waits import check_timeout

if TYPE_CHECKING:
    from offload.shell import Shell

T = TypeVar("T")


@attrs.define(eq=False)
class _Knock:
    """A thread's place in the line: woken, it tries again on the loop's thread."""

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
class _Admission:
    """A submission of another thread, on its way in. All but `future` is the loop's business."""

    shell: Shell
    submission: Submission
    future: Future[Transfer] = attrs.field(factory=Future)
    place: Place | None = None
    alarm: Alarm | None = None

    def start(self) -> None:
        """Submit, or stand in line."""
        shell, wanted = self.shell, self.submission
        try:
            shell.refuse_closed()
            if shell.line.open_for(wanted.priority, wanted.nbytes):
                self._admit()
                return
            if wanted.hold is not None:
                acts.let_go(shell, wanted.hold.pieces)
            knock = _Knock(lambda: shell.post(self._again))
            self.place = shell.line.enter(wanted.priority, wanted.nbytes, knock)
            if wanted.deadline is not None:
                self.alarm = shell.timer.call_at(wanted.deadline, self.place.expire)
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
            elif shell.line.may_go(place):
                self._admit()
                self._withdraw()
            else:
                assert isinstance(place.event, _Knock)
                place.event.clear()
        except BaseException as error:  # noqa: BLE001 - the same
            self._withdraw()
            self._fail(error)

    def _admit(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(admit(self.shell, self.submission))
            except BaseException as error:  # noqa: BLE001 - the same
                self.future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def give_up(self) -> bool:
        """Withdraw after a timeout; return False when it was too late and the transfer exists."""
        if not self.future.cancel():
            return False
        self.shell.post(self._withdraw)
        return True

    def _withdraw(self) -> None:
        if self.place is not None:
            self.shell.line.leave(self.place)
        if self.alarm is not None:
            self.shell.timer.cancel(self.alarm)


@attrs.define(eq=False, repr=False)
class ThreadFace:
    """Every name of the shell, blocking. Any thread but the loop's own."""

    _shell: Shell

    def load(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Submit a load, as `Scheduler.load`; block while there is no room.

        Raises:
            TimeoutError: No room within `timeout` seconds, or before the deadline: nothing was submitted.
        """
        return self._submit(
            self._shell.desk.submission(
                Direction.LOAD, host_pages, device_pages,
                priority=priority, deadline=deadline, after=after, join=join,
                io_backend=io_backend, members=members,
            ),
            timeout,
        )  # fmt: skip

    def backup(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Submit a backup, as `Scheduler.backup`; block while there is no room. Raises as `load`."""
        return self._submit(
            self._shell.desk.submission(
                Direction.BACKUP, host_pages, device_pages,
                priority=priority, deadline=deadline, after=after, streaming=streaming,
                io_backend=io_backend, members=members,
            ),
            timeout,
        )  # fmt: skip

    def load_nowait(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a load; raise `anyio.WouldBlock` where `load` would wait for room."""
        submission = self._shell.desk.submission(
            Direction.LOAD, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, join=join,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return self._submit_nowait(submission)

    def backup_nowait(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a backup; raise `anyio.WouldBlock` where `backup` would wait for room."""
        submission = self._shell.desk.submission(
            Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return self._submit_nowait(submission)

    def hold(self) -> AbstractContextManager[None]:
        """Keep back what this thread submits until the block ends; then it is one batch."""
        return acts.hold(self._shell)

    def now(self) -> float:
        """Return the time in seconds on the clock of deadlines."""
        return self._shell.now()

    def busy(
        self,
        *,
        device_pages: PagesLike = (),
        host_pages: PagesLike = (),
        members: Mapping[str, PagePair] | None = None,
    ) -> bool:
        """Return whether any of these pages may still be read or written. Arguments as `Scheduler.busy`."""
        places = self._shell.places(device_pages, host_pages, members)
        return self._call(lambda: self._shell.busy(places))

    def wait_idle(
        self,
        *,
        device_pages: PagesLike = (),
        host_pages: PagesLike = (),
        members: Mapping[str, PagePair] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Block until these pages are free of traffic, whatever became of the transfers. Arguments as `busy`.

        Raises:
            TimeoutError: Not within `timeout` seconds.
            SchedulerClosedError: The loop or the device is gone, and they never will be.
            RequestError: A request uses them that is kept back by the `hold` this wait is in.
        """
        shell = self._shell
        shell.check_may_block("wait for idle pages")
        check_timeout(timeout)
        places = shell.places(device_pages, host_pages, members)
        # Everything this thread posted comes first; afterwards the tables alone know.
        if self._call(lambda: shell.busy(places)):
            acts.refuse_waiting_for(shell, places)

        def idle() -> bool:
            return shell.over or not shell.busy(places)

        if not shell.bell.wait(idle, timeout):
            raise TimeoutError(f"pages are still busy after {timeout} s")
        if shell.busy(places):
            raise SchedulerClosedError("wait for idle pages") from shell.stuck

    @property
    def counters(self) -> Counters:
        """The live counts that `statistics` and metrics are read from. Read only."""
        return self._shell.counters

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        return self._shell.statistics()

    def _submit(self, submission: Submission, timeout: float | None) -> Transfer:
        shell = self._shell
        shell.check_may_block("submit")
        shell.refuse_closed()
        check_timeout(timeout)
        admission = _Admission(shell, submission)
        if not shell.post(admission.start):
            raise SchedulerClosedError
        try:
            answered = _answered(
                shell, admission.future, timeout or (None if timeout is None else _INSTANT)
            )
        except BaseException:  # a signal's, or an exception thrown into this thread
            _undo(admission.future, admission.give_up)
            raise
        if not answered and admission.give_up():
            raise TimeoutError(f"no room within {timeout} s; nothing was submitted")
        return admission.future.result()

    def _submit_nowait(self, submission: Submission) -> Transfer:
        return self._call(lambda: submit_nowait(self._shell, submission), undo=_undo)

    def _call(
        self,
        act: Callable[[], T],
        undo: Callable[[Future[T], Callable[[], bool]], None] | None = None,
    ) -> T:
        shell = self._shell
        shell.check_may_block("call the scheduler")
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                    future.set_exception(error)

        if not shell.post(run):
            raise SchedulerClosedError
        try:
            _answered(shell, future, None)
        except BaseException:
            if undo is not None:
                undo(future, future.cancel)
            raise
        return future.result()


_INSTANT = 0.05
"""Seconds that a timeout of 0 gives the loop to say whether there is room: it bounds the wait for room."""


def _undo(future: Future[Transfer], give_up: Callable[[], bool]) -> None:
    """Take back a submit whose thread was thrown out of waiting for it."""
    if not give_up() and future.done() and future.exception() is None:
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
                raise SchedulerClosedError from None
        else:
            return True
