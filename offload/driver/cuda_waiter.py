"""The threads that wait for events of CUDA streams and say so.

Theory of operation
-------------------
The events of one stream pass in stream order. So a `Waiter` sleeps in the CUDA driver on the oldest one,
asks the following ones without blocking, and delivers all that passed. Streams pass in no order among
each other, so nobody shares a waiter.

A waiter that is stopped ends its thread when nothing is left to wait for. Somebody may hold an event of it
still, and watch that later: then the thread starts again, for as long as that takes.

When the device is lost no event passes any more, and waiters deliver what is left, so nobody hangs.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload.driver.helper import helper_thread

if TYPE_CHECKING:
    from offload.driver.cuda_event import CudaEvent, Hub


class Waiter:
    """A thread that waits for events of one stream; it starts with the first one that somebody watches."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self._hub = hub
        self._heap: list[tuple[int, int, CudaEvent, Callable[[], object]]] = []
        self._added = 0
        self._position = 0
        self._stopped = False
        self._alive = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Waiter {self.name}: {len(self._heap)} waited for>"

    def next_position(self) -> int:
        """Return the place of an event that was just recorded."""
        with self._changed:
            self._position += 1
            return self._position

    def add(self, event: CudaEvent, callback: Callable[[], object]) -> None:
        """Call `callback` once `event` has passed, or the device is lost; at one event in this order."""
        with self._changed:
            self._start()
            self._added += 1
            heapq.heappush(self._heap, (event.position, self._added, event, callback))
            self._changed.notify()

    def start(self) -> None:
        """Start the thread now, so that no `add` has to."""
        with self._changed:
            self._start()

    def _start(self) -> None:
        if self._alive:
            return
        self._thread = helper_thread(self._run, f"offload-{self.name}-wait")
        self._alive = True
        try:
            self._thread.start()
        except BaseException:
            self._alive = False
            raise

    def stop(self) -> None:
        """Ask the thread to end once nothing is left to wait for."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread."""
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join(timeout)

    def _run(self) -> None:
        self._hub.begin_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._heap or self._stopped)
                if not self._heap:
                    self._alive = False
                    return
                event = self._heap[0][2]
            if self._await(event):
                self._deliver()

    def _await(self, event: CudaEvent) -> bool:
        """Sleep until an event has passed or the device is lost; False: look again."""
        if self._hub.lost is not None:
            return True
        try:
            self._hub.synchronize(event.raw)
        except Exception as error:  # noqa: BLE001 - judged here, and never the event's own fault
            if not self._hub.is_fatal(error, event.query):
                return False
            self._hub.lose(error)
        return True

    def _deliver(self) -> None:
        """Call back, in order, for everything that has passed."""
        while True:
            with self._changed:
                if not self._heap or not self._passed(self._heap[0][2]):
                    return
                callback = heapq.heappop(self._heap)[3]
            callback()

    def _passed(self, event: CudaEvent) -> bool:
        if self._hub.lost is not None:
            return True
        try:
            return event.query()
        except Exception:  # noqa: BLE001 - the next synchronize meets the same error and judges it
            return False
