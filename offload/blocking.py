"""A scheduler with a loop thread of its own, for engines that have no event loop."""

from __future__ import annotations

import atexit
import contextlib
import threading
from types import TracebackType
from typing import Self

import anyio
import attrs

from offload.asked import check_may_block
from offload.driver.helper import helper_thread
from offload.scheduler import Scheduler
from offload.threadface import ThreadFace
from offload.waits import check_timeout

EXIT_SECONDS = 1.0
"""How long interpreter exit waits for a scheduler that nobody closed."""


@attrs.define(eq=False, repr=False)
class BlockingScheduler(ThreadFace):
    """The blocking face of a scheduler that runs on a thread of its own. Made by `start_scheduler`."""

    _scheduler: Scheduler = attrs.field(init=False)
    _exit: anyio.Event = attrs.field(init=False)
    _ready: threading.Event = attrs.field(init=False, factory=threading.Event)
    _faults: list[BaseException] = attrs.field(init=False, factory=list)
    _thread: threading.Thread = attrs.field(init=False)
    _drain: bool = attrs.field(init=False, default=False)
    _unwanted: bool = attrs.field(init=False, default=False)

    @classmethod
    def start(cls, scheduler: Scheduler) -> Self:
        """Start the loop thread; return when the scheduler is open on it."""
        shell = scheduler._shell
        shell.private = True
        face = cls(shell)
        face._scheduler = scheduler
        face._thread = helper_thread(face._main, "offload-loop")
        try:
            face._thread.start()
            face._ready.wait()
        except BaseException:  # a signal's: nobody will ever hold what opens now
            face._unwanted = True  # it looks at this when it is ready; we look whether it is
            with contextlib.suppress(BaseException):
                face.close() if face._ready.is_set() else face._thread.join()
            raise
        if face._faults:
            raise face._faults[0]
        atexit.register(face._close_at_exit)
        return face

    def _close_at_exit(self) -> None:
        """End the loop's thread before the interpreter does, which would end it inside a copy."""
        with contextlib.suppress(BaseException):
            self.close(timeout=EXIT_SECONDS)

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised to whoever starts or closes it
            self._faults.append(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._exit = anyio.Event()
        async with self._scheduler:
            self._ready.set()
            if self._unwanted:
                return
            await self._exit.wait()
            await self._scheduler.aclose(drain=self._drain)

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """Stop intake, cancel what is queued (or finish it: `drain`), wait until nothing moves; end the thread.

        Any number of times; a call without `drain` ends the drain of one before it.

        Raises:
            TimeoutError: Not within `timeout` seconds; closing goes on, and `close` may be called again.
        """
        check_timeout(timeout)
        shell = self._shell
        if self._thread.is_alive():
            check_may_block(shell, "close", "Close it in another thread.")

            def leave() -> None:
                shell.stop_intake()
                self._drain = drain
                if not drain:
                    self._scheduler._closing.hurry()
                self._exit.set()

            shell.post(leave)
            self._thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                raise TimeoutError(f"the scheduler was not closed within {timeout} s")
        atexit.unregister(self._close_at_exit)
        if self._faults:
            raise self._faults[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BaseException as fault:
            if error is None or not isinstance(fault, Exception):
                raise  # a signal's is for who is signalled
            error.add_note(f"The scheduler failed too: {fault!r}")
