"""Events on CUDA, the pool they come from, and the threads that wait for them.

Theory of operation
-------------------
An event that was never recorded is silent: a query says done and a wait does nothing. So nobody but
`Hub.record` makes a `CudaEvent`, and it has recorded it before it returns.

A raw event goes back to the pool when the `CudaEvent` dies, which is when nothing can ask it any more;
never when it lands, because recording it again would change what a late query sees. (Waits that a stream
has already been given keep the old snapshot.)

A `Waiter` is a thread for the events of one stream. Those pass in stream order, so it sleeps in the CUDA
driver on the oldest one, asks the following ones without blocking, and delivers all that passed.

A device can be lost: CUDA calls some errors sticky, every later call returns them, and no event passes
any more. `Hub.lose` is told once; waiters then deliver what is left with `lost` set, so nobody hangs.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from offload.driver.cuda_calls import STICKY, CudaCalls, RawEvent, RawStream, bind, code


class Hub:
    """What the streams, waiters and events of one driver share."""

    def __init__(
        self, calls: CudaCalls, device: int, now_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.calls = calls
        self.device = device
        self.now_ns = now_ns
        self.pid = os.getpid()
        self.lost: BaseException | None = None
        self.kept: list[object] = []
        """What was under way when the device was lost: nothing says any more when it may go."""
        self.on_lost: list[Callable[[], None]] = []
        """Called once each, on the thread that saw the loss."""
        self._free: dict[bool, deque[RawEvent]] = {False: deque(), True: deque()}
        self._lock = threading.Lock()
        self._idle: RawStream | None = None

    def enter_thread(self) -> None:
        """Prepare a thread of ours: its device, and a capture mode that forbids it nothing."""
        bind(self.calls)
        self.calls.set_device(self.device)
        self.calls.relax_capture()

    def record(self, stream: RawStream, waiter: Waiter, *, timing: bool = False) -> CudaEvent:
        """Mark the present end of a stream. The only maker of events."""
        free = self._free[timing]
        try:
            raw = free.pop()
        except IndexError:
            raw = self.calls.new_event(timing=timing)
        self.calls.record(raw, stream)
        return CudaEvent(self, raw, waiter, waiter.next_position(), timing=timing, pooled=True)

    def idle_stream(self) -> RawStream:
        """Return a stream on which nothing runs, made on first use by a thread of ours."""
        with self._lock:
            if self._idle is None:
                self._idle = self.calls.new_stream()
            return self._idle

    def close(self) -> None:
        """Destroy what is the hub's own. No thread uses it any more."""
        if self._idle is not None and self.lost is None:
            self.calls.destroy_stream(self._idle)
        self._idle = None

    def adopt(self, raw: RawEvent, waiter: Waiter) -> CudaEvent:
        """Return an event that somebody else has recorded. It never goes into the pool."""
        return CudaEvent(self, raw, waiter, waiter.next_position(), timing=False, pooled=False)

    def give_back(self, raw: RawEvent, *, timing: bool) -> None:
        """Take a raw event that nobody can ask any more. Any thread, the collector's included."""
        self._free[timing].append(raw)

    def is_fatal(self, error: BaseException, probe: Callable[[], object]) -> bool:
        """Return whether an error ended the context: by its code, or because a probe fails again."""
        if code(error) in STICKY:
            return True
        try:
            probe()
        except Exception:  # noqa: BLE001 - whatever it is, the device does not answer
            return True
        return False

    def lose(self, error: BaseException) -> None:
        """Declare the device lost. Any thread; only the first time counts."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = error
        for callback in self.on_lost[:]:
            callback()


class CudaEvent:
    """A recorded point of a stream."""

    __slots__ = (
        "__weakref__",
        "_hub",
        "_passed",
        "_pooled",
        "_waiter",
        "position",
        "raw",
        "timing",
    )

    def __init__(
        self,
        hub: Hub,
        raw: RawEvent,
        waiter: Waiter,
        position: int,
        *,
        timing: bool,
        pooled: bool,
    ) -> None:
        self.raw = raw
        self.timing = timing
        self.position = position
        """Place among the events of its waiter."""
        self._hub = hub
        self._waiter = waiter
        self._pooled = pooled
        self._passed = False

    def __repr__(self) -> str:
        return f"<event {self.position} of {self._waiter.name}{', passed' if self._passed else ''}>"

    def __del__(self) -> None:
        if self._pooled:
            self._hub.give_back(self.raw, timing=self.timing)

    def order(self, stream: RawStream) -> None:
        """Order what is enqueued on `stream` from now on after this point; the host goes on."""
        self._hub.calls.wait(self.raw, stream)

    def query(self) -> bool:
        """Return whether it has passed. Never blocks."""
        if not self._passed:
            self._passed = self._hub.calls.query(self.raw)
        return self._passed

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until passed; return whether it has. Raises on a lost device."""
        if self.query():
            return True
        if timeout is None:
            self._hub.calls.synchronize(self.raw)
        else:
            passed = threading.Event()
            self._waiter.add(self, passed.set)
            passed.wait(timeout)
        return self.query()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when passed, on the thread that sees it; at once when it already has.

        On a lost device it is called too: whoever goes on meets the loss there.
        """
        try:
            passed = self.query()
        except Exception:  # noqa: BLE001 - the waiter meets the same error and judges it
            passed = False
        if passed:
            callback()
        else:
            self._waiter.add(self, callback)


class Waiter:
    """A thread that waits for events of one stream and says so."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self._hub = hub
        self._heap: list[tuple[int, int, CudaEvent, Callable[[], object]]] = []
        self._added = 0
        self._position = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"offload-{name}-wait", daemon=True)
        hub.on_lost.append(self._wake)
        self._thread.start()

    def next_position(self) -> int:
        """Return the place of an event that was just recorded."""
        with self._changed:
            self._position += 1
            return self._position

    def add(self, event: CudaEvent, callback: Callable[[], object]) -> None:
        """Call `callback` once `event` has passed, or the device is lost; at one event in this order."""
        with self._changed:
            self._added += 1
            heapq.heappush(self._heap, (event.position, self._added, event, callback))
            self._changed.notify()

    def stop(self) -> None:
        """Ask the thread to end once nothing is left to wait for."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._hub.enter_thread()
        except Exception as error:  # noqa: BLE001 - a thread without a device can do nothing
            self._hub.lose(error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._heap or self._closing)
                if not self._heap:
                    return
                event = self._heap[0][2]
            if self._await(event):
                self._deliver()

    def _await(self, event: CudaEvent) -> bool:
        """Sleep until an event has passed or the device is lost; False: look again."""
        if self._hub.lost is not None:
            return True
        try:
            self._hub.calls.synchronize(event.raw)
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
