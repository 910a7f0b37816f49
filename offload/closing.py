"""Closing: intake stops, what is queued is cancelled or drained, what moves lands, the pools are given back.

Every step may be taken again: whoever is interrupted in one leaves what the next call finishes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import anyio
import attrs
from anyio.lowlevel import checkpoint

from offload import actions
from offload.core.batch import Piece
from offload.core.events import Cancel
from offload.errors import RequestError
from offload.vacancy import POSTS

if TYPE_CHECKING:
    from offload.shell import Shell

_CHUNK = 128
"""Requests cancelled per turn while closing: about 3 ms of the loop, which has other things to do."""


@attrs.define(eq=False)
class Closing:
    """The end of one scheduler, whoever asks for it and however often.

    A drain is only patience in front of the closing itself, and anything may end it: a cancellation, its deadline,
    or a call that does not drain. What comes then takes no longer than the copies in the air.
    """

    _shell: Shell
    _hurried: bool = False
    """Whether a drain is over, or given up: what is still queued is cancelled."""

    _over: bool = False
    _running: anyio.Event | None = None
    """Set when the call that closes now has closed it, or was interrupted."""

    async def close(self, drain: bool = False, deadline: float | None = None) -> None:
        """Close; see `Scheduler.aclose`. A cancellation is raised when that is done, all else at once."""
        shell = self._shell
        if shell.loop.forked:
            shell.closing = True  # its threads and copies are the parent's
            return
        if shell.loop.closed:
            await self._bury()
            return
        shell.loop.check("aclose", remedy="Close it there.")
        cancelled: BaseException | None = None
        if drain and not self._hurried:
            cancelled = await _cancellation(self._drain(deadline))
        self.hurry()
        with anyio.CancelScope(shield=True):
            while not self._over:
                if self._running is None:
                    ended = await self._close()
                else:
                    ended = await _though_cancelled(self._running.wait)
                cancelled = cancelled or ended
        if cancelled is not None:
            raise cancelled

    async def _bury(self) -> None:
        """Close after the loop's end, on whatever loop: nothing is decided any more, and what is in the air lands."""
        shell = self._shell
        if not self._over:
            self._over = True
            shell.stop_intake()
            shell.ownership.release_after_loop()
            await shell.driver.quiesce()
            shell.close()

    def hurry(self) -> None:
        """Let no drain wait any longer for what is only queued."""
        self._hurried = True
        self._shell.notify()

    async def leave(self) -> None:
        """Close where nobody will ask again: what interrupts that is raised when it is done."""
        try:
            await self.close()
        except BaseException:
            await self.close()
            raise

    async def _drain(self, deadline: float | None) -> None:
        """Wait until all that was queued has landed, or somebody is in a hurry."""
        shell, alarm = self._shell, None
        shell.stop_intake()
        if deadline is not None and deadline != math.inf:
            if deadline <= shell.driver.now():
                return
            alarm = shell.timer.call_at(deadline, self.hurry)
        try:
            await self._give_up(_unwritten)
            while self._patient():
                await shell.driver.quiesce()
                if self._patient():
                    await shell.change()
        finally:
            if alarm is not None:
                shell.timer.cancel(alarm)

    def _patient(self) -> bool:
        return self._shell.working and not self._hurried

    async def _close(self) -> BaseException | None:
        """Close, unless something interrupts that; return the cancellation that came meanwhile."""
        self._running = running = anyio.Event()
        try:
            cancelled = await _though_cancelled(self._quieten)
            try:
                self._shell.close()
            except Exception:
                self._over = True  # it would fail again, and the pools are given back
                raise
            self._over = True
            return cancelled
        finally:
            self._running = None
            running.set()

    async def _quieten(self) -> None:
        shell = self._shell
        shell.stop_intake()
        await self._give_up(_unissued)
        while shell.stuck is not None and shell.fail_some(shell.stuck):
            await checkpoint()
        while shell.working:
            await shell.driver.quiesce()
            if shell.working:
                await shell.change()
        if shell.fault is not None:  # it decides no more, and what is in the air lands all the same
            await shell.driver.quiesce()

    async def _give_up(self, which: Callable[[Piece], bool]) -> None:
        """Cancel those requests that are such, a chunk per turn of the loop, after all that was posted."""
        shell = self._shell
        while not shell.take_inbox(POSTS):
            await checkpoint()
        actions.let_go_of_all(shell)
        requests = iter(shell.machine.names())
        while self._cancel_some(requests, which):
            await checkpoint()
        shell.ask_for_turn()
        await checkpoint()

    def _cancel_some(self, requests: Iterator[int], which: Callable[[Piece], bool]) -> bool:
        """Cancel those of the next chunk that are such; return whether there may be more."""
        chunk = list(islice(requests, _CHUNK))
        for request in chunk:
            piece = self._shell.machine.find(request)
            if piece is not None and piece.parent is None and which(piece):
                self._shell.handle(Cancel(request))
        return len(chunk) == _CHUNK


async def _cancellation(step: Awaitable[object]) -> BaseException | None:
    """Take a step, and return the cancellation that ended it, if one did."""
    try:
        await step
    except anyio.get_cancelled_exc_class() as error:
        return error
    return None


async def _though_cancelled(step: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Take a step to its end, from its beginning after each cancellation: asyncio's own knows no shield."""
    cancelled: BaseException | None = None
    while (ended := await _cancellation(step())) is not None:
        cancelled = ended
    return cancelled


def check_deadline(deadline: float | None) -> None:
    """Raise unless this is a time, or None.

    Raises:
        RequestError: It is not.
    """
    if deadline is None or _is_time(deadline):
        return
    raise RequestError(
        f"deadline is {deadline!r}; it takes a time on the scheduler's clock, or None"
    )


def _unissued(piece: Piece) -> bool:
    return piece.unissued


def _unwritten(piece: Piece) -> bool:
    """Return whether a forward has not written all of a streaming backup: nobody will drain it."""
    return piece.stream is not None and len(piece.stream.written) < piece.last


def _is_time(value: object) -> bool:
    """Return whether this is a number other than nan."""
    return isinstance(value, (int, float)) and not math.isnan(value)
