"""The event loop that a scheduler lives on, and how other threads reach it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING

from offload.driver.loops import poster, running_on_asyncio, signals
from offload.errors import RequestError

if TYPE_CHECKING:
    import trio.lowlevel

_FAR_S = 1e6
"""Twelve days: no loop takes so long to close, and each can wait so long."""


class LoopHandle:
    """The loop that was running when it was made.

    Nothing that a thread waits for may depend on it alone: a loop can stop, or be closed, at any time.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        # One for all that runs there: whoever asks for a turn leaves nothing of his own task in it, and no alarm
        # keeps what a task has set.
        self._context = copy_context()
        self.post_threadsafe = poster(self._context)
        """As `post`, without asking which thread this is."""
        self.signal = signals()
        self._asyncio = asyncio.get_running_loop() if running_on_asyncio() else None
        self._trio = None if self._asyncio is not None else _trio_token()

    @property
    def here(self) -> bool:
        """Whether this thread is the loop's."""
        return threading.get_ident() == self._thread

    @property
    def closed(self) -> bool:
        """Whether the loop has ended for good. One that is only stopped cannot be told from a busy one."""
        return self._asyncio.is_closed() if self._asyncio is not None else _ended(self._trio)

    @property
    def alive(self) -> bool:
        """Whether it may run what is posted: it has not ended, and this is its process."""
        return not self.forked and not self.closed

    def post(self, callback: Callable[[], object]) -> bool:
        """Run `callback` on the loop soon, from any thread; return False when the loop is closed."""
        return self.soon(callback) if self.here else self.post_threadsafe(callback)

    def soon(self, callback: Callable[[], object]) -> bool:
        """Do as `post`, on the loop's own thread."""
        if self._asyncio is None:
            return self.post_threadsafe(callback)
        try:
            self._asyncio.call_soon(callback, context=self._context)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def alarm(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the loop after so many seconds; return what cancels that."""
        if self._asyncio is not None:
            delay = max(0.0, seconds)
            return self._asyncio.call_later(delay, callback, context=self._context).cancel
        import trio

        scope = trio.CancelScope()

        async def ring() -> None:
            with scope:
                await trio.sleep(max(0.0, seconds))
                callback()

        trio.lowlevel.spawn_system_task(ring, context=self._context.copy())
        return scope.cancel

    def at_end(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` when the loop has ended, or may have: ask `closed`. Return what takes that back.

        Of an asyncio loop that is closed without `shutdown_asyncgens` nobody hears: ask `closed` then too.
        """
        if self._asyncio is None:
            return _at_end_of_trio(callback)
        return _at_end_of_asyncio(self._asyncio, callback)

    def check(self, call: str, instead: str = "", *, remedy: str = "") -> None:
        """Raise unless the caller runs on this loop.

        Args:
            call: What was called.
            instead: What to call on other threads; the same of `from_thread`, unless this says otherwise.
            remedy: What else to do there, as a sentence.

        Raises:
            RequestError: It runs on another thread, or on another loop of this thread.
        """
        if self._asyncio is not None:
            try:
                if asyncio.get_running_loop() is self._asyncio:
                    return  # on this thread, and in the process that started it
            except RuntimeError:
                pass  # none runs here
        self.check_process(call)
        if threading.get_ident() != self._thread:
            instead = instead or f"scheduler.from_thread.{call}"
            remedy = remedy or f"Use {instead}, which works from any thread."
            raise RequestError(
                f"{call} was called on another thread than the scheduler's event loop. {remedy}"
            )
        if not self._running():
            raise RequestError(
                f"{call} was called on another event loop than the scheduler's. A scheduler "
                "belongs to the loop that opened it; open one per loop."
            )

    def _running(self) -> bool:
        """Return whether our loop runs on this thread; or none does, and ours may go on."""
        if self._asyncio is not None:
            try:
                running = asyncio.get_running_loop()
            except RuntimeError:  # none does: we may be between two callbacks of ours
                running = None
            if running is not None:
                return running is self._asyncio
        token = _trio_token()
        return token is self._trio if token is not None else not self.closed

    @property
    def forked(self) -> bool:
        """Whether this process was forked off the one that opened the scheduler."""
        return os.getpid() != self._process

    def check_process(self, call: str) -> None:
        """Raise in a process that was forked off: the scheduler's threads stayed in its parent.

        Raises:
            RequestError: This is not the process that opened the scheduler.
        """
        if self.forked:
            raise RequestError(
                f"cannot {call} in process {os.getpid()}: the scheduler was opened in process "
                f"{self._process}, and its threads did not come along when that forked. Open a "
                "scheduler in this process."
            )


class _Omen:
    """What a loop that shuts down is to call in a far future; dropped before, it says so."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __call__(self) -> None:
        """Never mind."""

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be in the middle of its end
            self._callback()


def _at_end_of_asyncio(
    loop: asyncio.AbstractEventLoop, callback: Callable[[], object]
) -> Callable[[], None]:
    """Hear of a loop's end in two steps, so that no timer stands in it while it lives.

    A loop that shuts down closes its async generators first; ours then leaves a timer behind, and a loop
    that is closed drops its timers. A loop that goes on after all only keeps that timer.
    """
    wanted = [callback]

    async def until_shutdown() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if wanted:
                loop.call_later(_FAR_S, _Omen(wanted.pop()))

    generator = until_shutdown()
    with contextlib.suppress(StopIteration):
        generator.asend(None).send(None)  # as far as its yield

    def take_back() -> None:
        wanted.clear()
        with contextlib.suppress(StopIteration):
            generator.aclose().send(None)

    return take_back


def _at_end_of_trio(callback: Callable[[], object]) -> Callable[[], None]:
    """Hear of the end of trio's loop when it takes no posts any more."""
    import trio

    class End(trio.abc.Instrument):
        def after_run(self) -> None:
            callback()

    end = End()
    trio.lowlevel.add_instrument(end)

    def take_back() -> None:
        with contextlib.suppress(RuntimeError, KeyError):  # the loop has ended
            trio.lowlevel.remove_instrument(end)

    return take_back


def _ended(token: trio.lowlevel.TrioToken | None) -> bool:
    """Return whether a loop of trio has ended. Asked often: what is posted for that is posted once."""
    import trio

    try:
        if token is not None:
            token.run_sync_soon(_nothing, idempotent=True)
    except trio.RunFinishedError:
        return True
    return False


def _trio_token() -> trio.lowlevel.TrioToken | None:
    """Return what stands for the trio loop that runs on this thread; None when there is none."""
    if "trio" not in sys.modules:
        return None
    import trio.lowlevel

    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None


def _nothing() -> None:
    """What is posted only to see whether it can be."""


class NoLoop(LoopHandle):
    """The loop of a scheduler that was not opened yet: it can do nothing."""

    _asyncio = None

    def __init__(self) -> None:
        """Know no loop."""

    @property
    def here(self) -> bool:
        """Never."""
        return False

    @property
    def closed(self) -> bool:
        """Not yet."""
        return False

    @property
    def alive(self) -> bool:
        """Not yet."""
        return False

    @property
    def forked(self) -> bool:
        """Not that anybody knows."""
        return False

    def post(self, callback: Callable[[], object]) -> bool:
        """Refuse.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "the scheduler is not open. Use it inside `async with open_scheduler(...)`, or "
            "start_scheduler where there is no event loop."
        )

    def check_process(self, call: str) -> None:
        """Refuse as `post` does."""
        self.post(lambda: None)
