"""Events on CUDA, the pool they come from, and what the threads of one driver share.

Theory of operation
-------------------
An event that was never recorded is silent: a query says done and a wait does nothing. So nobody but
`Hub.record` makes a `CudaEvent`, and it has recorded it before it returns.

A raw event goes back to the pool when the `CudaEvent` dies, which is when nothing can ask it any more;
never when it lands, because recording it again would change what a late query sees. (Waits that a stream
has already been given keep the old snapshot.) It belongs to the device on which it was recorded first, and
CUDA refuses it on streams of others, so each device has a pool of its own.

A thread that is not ours keeps its current device and its capture mode. What a graph capture elsewhere
would forbid, and would become invalid by, runs relaxed (`Hub.query`, `Hub.synchronize`); what makes a
context runs on a thread of ours (`Hub.apart`).

A device can be lost: CUDA calls some errors sticky, every later call returns them, and no event passes
any more. `Hub.lose` is told once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from offload.driver.cuda_calls import STICKY, CudaCalls, RawEvent, RawStream, bind, code, is_bound
from offload.driver.cuda_waiter import Waiter
from offload.driver.helper import helper_thread

Result = TypeVar("Result")


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
        self._free: dict[tuple[int, bool], deque[RawEvent]] = {}
        self._lock = threading.Lock()
        self._idle: RawStream | None = None

    def enter_thread(self) -> None:
        """Prepare a thread of ours: its device, and a capture mode that forbids it nothing."""
        bind(self.calls)
        self.calls.set_device(self.device)
        self.calls.relax_capture()

    def begin_thread(self) -> None:
        """Do that first on a thread that is to stay: tried twice, as nothing works on one without a device."""
        try:
            self.enter_thread()
        except Exception as error:  # noqa: BLE001 - judged here
            if self.is_fatal(error, self.enter_thread):
                self.lose(error)

    def apart(self, call: Callable[[], Result]) -> Result:
        """Run a call on a thread of ours that ends with it: it needs our device, and the caller keeps his."""
        made: Future[Result] = Future()

        def run() -> None:
            try:
                self.enter_thread()
                made.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it was asked for
                made.set_exception(error)

        thread = helper_thread(run, "offload-apart")
        thread.start()
        thread.join()
        return made.result()

    # ---- events -------------------------------------------------------------------------------------

    def record(self, stream: RawStream, waiter: Waiter, *, timing: bool = False) -> CudaEvent:
        """Mark the present end of a stream. The only maker of events."""
        kind = stream.device_index, timing
        try:
            raw = self._free[kind].pop()
        except (KeyError, IndexError):
            raw = self.calls.new_event(timing=timing)
        self.calls.record(raw, stream)
        return CudaEvent(self, raw, waiter, waiter.next_position(), kind)

    def give_back(self, raw: RawEvent, kind: tuple[int, bool]) -> None:
        """Take a raw event that nobody can ask any more. Any thread, the collector's included."""
        self._free.setdefault(kind, deque()).append(raw)

    def query(self, raw: RawEvent) -> bool:
        """Return whether an event has passed. Any thread, whatever another one captures."""
        if is_bound():
            return self.calls.query(raw)
        with self.calls.relaxed():
            return self.calls.query(raw)

    def synchronize(self, raw: RawEvent) -> None:
        """Block the calling thread until an event has passed. Any thread, whatever another one captures."""
        if is_bound():
            self.calls.synchronize(raw)
        else:
            with self.calls.relaxed():
                self.calls.synchronize(raw)

    # ---- streams of the hub's own -------------------------------------------------------------------

    def new_stream(self) -> RawStream:
        """Return a new stream of our device. Any thread, and that keeps its device."""
        return self.apart(self.calls.new_stream)

    def idle_stream(self) -> RawStream:
        """Return a stream on which nothing runs, made on first use by a thread of ours."""
        with self._lock:
            if self._idle is None:
                self._idle = self.calls.new_stream()
            return self._idle

    def close(self, *streams: RawStream) -> None:
        """Destroy these streams and the hub's own. No thread uses them any more."""
        ours = [*streams, *([] if self._idle is None else [self._idle])]
        self._idle = None
        if ours and self.lost is None:
            self.apart(partial(self._destroy, ours))

    def _destroy(self, streams: list[RawStream]) -> None:
        for stream in streams:
            self.calls.destroy_stream(stream)

    # ---- failure ------------------------------------------------------------------------------------

    def is_fatal(self, error: BaseException, probe: Callable[[], object]) -> bool:
        """Return whether an error ended the context: by its code, or because a probe fails again."""
        if code(error) in STICKY:
            return True
        try:
            probe()
        except Exception:  # noqa: BLE001 - whatever it is, the device does not answer
            return True
        return False

    def drained(self, stream: RawStream, *errors: BaseException | None) -> bool:
        """Block until a stream has come to its end; False: by these errors or new ones, it never will."""
        if any(error is not None and code(error) in STICKY for error in errors):
            return False
        drain = partial(self.calls.drain, stream)
        try:
            drain()
        except Exception as error:  # noqa: BLE001 - judged here
            return not self.is_fatal(error, drain)
        return True

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

    __slots__ = ("__weakref__", "_hub", "_kind", "_passed", "_waiter", "position", "raw")

    def __init__(
        self, hub: Hub, raw: RawEvent, waiter: Waiter, position: int, kind: tuple[int, bool]
    ) -> None:
        self.raw = raw
        self.position = position
        """Place among the events of its waiter."""
        self._hub = hub
        self._waiter = waiter
        self._kind = kind
        self._passed = False

    def __repr__(self) -> str:
        return f"<event {self.position} of {self._waiter.name}{', passed' if self._passed else ''}>"

    def __del__(self) -> None:
        self._hub.give_back(self.raw, self._kind)

    @property
    def timing(self) -> bool:
        """Whether it carries a time."""
        return self._kind[1]

    def order(self, stream: RawStream) -> None:
        """Order what is enqueued on `stream` from now on after this point; the host goes on."""
        self._hub.calls.wait(self.raw, stream)

    def query(self) -> bool:
        """Return whether it has passed. Never blocks."""
        if not self._passed:
            self._passed = self._hub.query(self.raw)
        return self._passed

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until passed; return whether it has. Raises on a lost device."""
        if self.query():
            return True
        if timeout is None:
            self._hub.synchronize(self.raw)
        else:
            passed = threading.Event()
            self._waiter.add(self, passed.set)
            passed.wait(timeout)
        return self.query()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when passed, on the thread that sees it; at once when that is known already.

        Asks CUDA nothing on the calling thread, which may be a loop's. On a lost device it is called too:
        whoever goes on meets the loss there.
        """
        if self._passed:
            callback()
        else:
            self._waiter.add(self, callback)
