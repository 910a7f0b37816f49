"""Waking an event loop from another thread: the one place that knows asyncio from trio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Protocol


class Signal(Protocol):
    """A one-shot event of the loop, for one waiter. Waiting for one that is not set is a checkpoint."""

    def set(self) -> object:
        """Wake who waits. On the loop's thread."""

    def wait(self) -> Awaitable[object]:
        """Return what suspends until it is set."""


def running_on_asyncio() -> bool:
    """Return whether this thread runs an asyncio loop; inside anyio, False means trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class FutureSignal:
    """A signal of asyncio for one waiter: a future, at a third of an event's price."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        """Wake who waits; one who was cancelled needs it no more."""
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        """Return what suspends until it is set."""
        return self._future


def signals() -> Callable[[], Signal]:
    """Return what makes signals for the loop that runs now: its own, a tenth of the price of anyio's."""
    if running_on_asyncio():
        return partial(FutureSignal, asyncio.get_running_loop())

    import trio

    return trio.Event


def poster(context: Context | None = None) -> Callable[[Callable[[], object]], bool]:
    """Return a function that runs a callback on the loop that runs now, from any thread, in one context.

    It never blocks and never raises: it returns False when that loop has been closed, and the callback
    is then dropped. A loop that is stopped but not closed takes the callback and may never run it, so
    nothing that a thread waits for may depend on it.

    Args:
        context: None takes a copy of the caller's.
    """
    own = copy_context() if context is None else context
    if running_on_asyncio():
        loop = asyncio.get_running_loop()

        def post(callback: Callable[[], object]) -> bool:
            try:
                loop.call_soon_threadsafe(callback, context=own)
            except RuntimeError:  # the loop is closed
                return False
            return True

        return post

    import trio.lowlevel

    token = trio.lowlevel.current_trio_token()

    def post_trio(callback: Callable[[], object]) -> bool:
        try:
            token.run_sync_soon(own.run, callback)
        except trio.RunFinishedError:
            return False
        return True

    return post_trio
