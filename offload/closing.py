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
    """The end of one scheduler, whoever asks for it and however often."""

    _shell: Shell
    _over: bool = False
    _running: anyio.Event | None = None
    """Set when the call that closes now has closed it, or was interrupted."""

    async def close(self, drain: bool = False, deadline: float | None = None) -> None:
        """Close; see `Scheduler.aclose`. A cancellation is raised when that is done, all else at once."""
        shell = self._shell
        if shell.loop.forked:
            shell.closing = True  # its threads and copies are the parent's
            return
        shell.loop.check_process("close")
        cancelled: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not self._over:
                if self._running is None:
                    ended = await self._close(drain, deadline)
                else:
                    ended = await _though_cancelled(self._running.wait)
                cancelled = cancelled or ended
        if cancelled is not None:
            raise cancelled

    async def leave(self) -> None:
        """Close where nobody will ask again: what interrupts that is raised when it is done."""
        try:
            await self.close()
        except BaseException:
            await self.close()
            raise

    async def _close(self, drain: bool, deadline: float | None) -> BaseException | None:
        """Close, unless something interrupts that; return the cancellation that came meanwhile."""
        self._running = running = anyio.Event()
        try:
            cancelled = await _though_cancelled(lambda: self._quieten(drain, deadline))
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

    async def _quieten(self, drain: bool, deadline: float | None) -> None:
        shell = self._shell
        shell.stop_intake()
        if drain and deadline is not None and not math.isinf(deadline):
            shell.timer.call_at(deadline, self._cancel_queued_soon)
        while not shell.take_inbox(POSTS):
            await checkpoint()
        actions.let_go_of_all(shell)
        requests = iter(shell.machine.names())
        while self._cancel_some(requests, _unwritten if drain else _unissued):
            await checkpoint()
        shell.ask_for_turn()
        await checkpoint()
        while shell.stuck is not None and shell.fail_some(shell.stuck):
            await checkpoint()
        while shell.working:
            await shell.driver.quiesce()
            if shell.working:
                await shell.change()
        if shell.fault is not None:
            await (
                shell.driver.quiesce()
            )  # it decides no more, and what is in the air lands all the same

    def _cancel_queued_soon(self) -> None:
        """Cancel everything that was not issued, a chunk per turn of the loop; nobody waits for it."""
        requests = iter(self._shell.machine.names())

        def some() -> None:
            if self._cancel_some(requests, _unissued):
                self._shell.loop.post(some)
            self._shell.ask_for_turn()

        some()

    def _cancel_some(self, requests: Iterator[int], which: Callable[[Piece], bool]) -> bool:
        """Cancel those of the next chunk that are such; return whether there may be more."""
        chunk = list(islice(requests, _CHUNK))
        for request in chunk:
            piece = self._shell.machine.find(request)
            if piece is not None and piece.parent is None and which(piece):
                self._shell.handle(Cancel(request))
        return len(chunk) == _CHUNK


async def _though_cancelled(step: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Take a step to its end, from its beginning after each cancellation: asyncio's own knows no shield."""
    cancelled: BaseException | None = None
    while True:
        try:
            await step()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
        else:
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
