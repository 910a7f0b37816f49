"""Waiting for other people's events: one thread for each, however many requests wait for it.

A thread that blocks in somebody's `wait` cannot be taken back. So it knows nothing but that event, and whoever
waits for it weakly: a request that was cancelled, or whose scheduler has closed, is let go at once, and the thread
ends when the event has fired, or has raised.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from offload.driver.helper import helper_thread


class Watching(Protocol):
    """Who wants to be told that an event has fired. Kept alive by others."""

    def fire(self, error: BaseException | None) -> None:
        """The event has fired, or raised this. On the thread that waited for it."""


class _Lookout:
    """One event that somebody watches."""

    def __init__(self, event: object, wait: Callable[[], bool]) -> None:
        self.event = event
        self.watching: WeakValueDictionary[int, Watching] = WeakValueDictionary()
        self._wait = wait

    def run(self) -> None:
        """Wait for the event; tell everybody who still wants to know."""
        error: BaseException | None = None
        try:
            while not self._wait():
                pass
        except BaseException as raised:  # noqa: BLE001 - for whom it was to let go
            error = raised
        with _lock:
            if _lookouts.get(id(self.event)) is self:
                del _lookouts[id(self.event)]
            watching = list(self.watching.values())
        for one in watching:
            try:
                one.fire(error)
            except BaseException:  # noqa: BLE001 - one that cannot be told is no reason not to tell others
                told = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(told))


_lock = threading.RLock()  # a signal handler, or a finalizer, may come by inside
_lookouts: dict[int, _Lookout] = {}
"""By the id of an event, which its lookout keeps alive."""

_count = itertools.count()


def look_out(event: object, wait: Callable[[], bool], watching: Watching) -> None:
    """Tell `watching` once when an event has fired.

    Args:
        wait: Blocks until it has, and returns whether it has. It must not refer to who watches.

    Raises:
        RuntimeError: There can be no further thread.
    """
    with _lock:
        found = _lookouts.get(id(event))
        if found is None:
            found = _Lookout(event, wait)
            helper_thread(found.run, "offload-after").start()
            _lookouts[id(event)] = found
        found.watching[next(_count)] = watching
