"""Events as tickets: a stream and a position on it.

A stream counts what has passed in `landed`; a ticket has passed when the count has reached its position.
Who wants to be told leaves a callback in the stream's `Watchers`. No wake-up is lost: a watcher is
stored first and looks at the count afterwards, the stream counts first and looks for watchers
afterwards, so one of the two sees the other. Nobody looks again later: so where no global lock orders what
they do, the stream looks under the lock that a watcher is stored under, and whoever takes it second sees all.
"""

from __future__ import annotations

import heapq
import sys
import threading
from collections.abc import Callable
from typing import Protocol

_FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether a thread may look before others see what it has written."""


class Counted(Protocol):
    """A stream as its tickets see it."""

    @property
    def landed(self) -> int:
        """Position of the last thing that has passed."""

    @property
    def name(self) -> str:
        """For people."""

    def watch(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once `position` has passed; return a function that takes it back."""


class Ticket:
    """A point in a stream's order. Two tickets of one point are equal."""

    __slots__ = ("position", "stream")

    def __init__(self, stream: Counted, position: int) -> None:
        self.stream = stream
        self.position = position

    def __repr__(self) -> str:
        return f"<event {self.position} of {self.stream.name}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ticket):
            return NotImplemented
        return self.stream is other.stream and self.position == other.position

    def __hash__(self) -> int:
        return hash((id(self.stream), self.position))

    def query(self) -> bool:
        """Return whether everything up to here has passed. Never blocks."""
        return self.stream.landed >= self.position

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until passed; return whether it has. `timeout` in seconds."""
        if self.query():
            return True
        parked = threading.Lock()
        parked.acquire()
        forget = self.stream.watch(self.position, parked.release)
        if not parked.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            forget()
        return self.query()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when passed, on the thread that sees it; at once when it already has."""
        if self.query():
            callback()
        else:
            self.stream.watch(self.position, callback)


class _Watcher:
    """One callback and when it is due."""

    __slots__ = ("callback", "order")

    def __init__(self, order: tuple[int, int], callback: Callable[[], object]) -> None:
        self.order = order
        self.callback: Callable[[], object] | None = callback

    def __lt__(self, other: _Watcher) -> bool:
        return self.order < other.order

    def forget(self) -> None:
        self.callback = None


class Watchers:
    """The callbacks that wait for positions of one stream. Any thread."""

    __slots__ = ("_heap", "_lock", "_made", "_stream")

    def __init__(self, stream: Counted) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._heap: list[_Watcher] = []
        self._made = 0

    def add(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Store a callback, or call it at once; return a function that takes it back."""
        with self._lock:
            self._made += 1
            watcher = _Watcher((position, self._made), callback)
            heapq.heappush(self._heap, watcher)
        self.notify()
        return watcher.forget

    def notify(self) -> None:
        """Call what is due, each once. After every change of the stream's `landed`."""
        while self._heap or _FREE_THREADED:
            with self._lock:
                if not self._heap or self._heap[0].order[0] > self._stream.landed:
                    return
                callback = heapq.heappop(self._heap).callback
            if callback is not None:
                callback()
