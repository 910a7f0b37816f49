"""Waking an event loop from another thread: the one place that knows asyncio from trio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Signal(Protocol):
    """A one-shot event of the loop. Waiting for one that is not set is a checkpoint."""

    def set(self) -> object:
        """Wake who waits. On the loop's thread."""

    def is_set(self) -> bool:
        """Return whether it was set."""

    async def wait(self) -> object:
        """Suspend until it is set."""


def running_on_asyncio() -> bool:
    """Return whether this thread runs an asyncio loop; inside anyio, False means trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def signals() -> Callable[[], Signal]:
    """Return what makes signals for the loop that runs now: its own events, a tenth of the price of anyio's."""
    if running_on_asyncio():
        return asyncio.Event

    import trio

    return trio.Event


def poster() -> Callable[[Callable[[], object]], bool]:
    """Return a function that runs a callback on the loop that runs now, from any thread.

    It never blocks and never raises: it returns False when that loop has been closed, and the callback
    is then dropped. A loop that is stopped but not closed takes the callback and may never run it, so
    nothing that a thread waits for may depend on it.
    """
    if running_on_asyncio():
        loop = asyncio.get_running_loop()

        def post(callback: Callable[[], object]) -> bool:
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:  # the loop is closed
                return False
            return True

        return post

    import trio.lowlevel

    token = trio.lowlevel.current_trio_token()

    def post_trio(callback: Callable[[], object]) -> bool:
        try:
            token.run_sync_soon(callback)
        except trio.RunFinishedError:
            return False
        return True

    return post_trio
