"""Streams that are worker threads: real copies, really asynchronous, on any machine.

Theory of operation
-------------------
One worker per stream, issuing thread and copier in one. It sleeps on its inbox (a `SimpleQueue`: the
cheapest wake-up that Python has, 10 us against 11-12 for a semaphore or a condition), takes what came,
asks its `Runlist` for the most urgent next layer, copies it, tells the flight, and looks again.

* A layer is *issued* just before it is copied, so whatever has not begun can still be overtaken.
* An event is a ticket, `(stream, position)`: it has passed when the stream's `landed` count has reached
  the position. Making one costs nothing, and waiting makes one lock, for this waiter alone.
* A worker never sleeps in an event of another stream. While a fence is closed it hands out no layer, and
  sleeps on its inbox like ever; the fence puts a note there when it opens. So a stopped flight ends
  although the fence in front of it never opens.
* The link can be throttled: a copy that was quicker than `nbytes / rate` is followed by a sleep until the
  link would have been done. A sleep that lasts too long is made up for by the next copy.
* A worker catches everything, `BaseException` too: it fails that flight and goes on.

Order inside a landing: the position is counted (so `Event.query` is true), then the flight is told, then
waiters of the event wake. A failed layer tells the flight first, so that nobody who sees the event passed
finds the flight without its error.

A thread does not survive a fork, so a driver belongs to the process that made it: in a child `carry` raises,
and `close` returns at once. At interpreter exit every worker still alive is asked to stop after its layer and
waited for at most `EXIT_SECONDS`; what hangs after that is a daemon and dies with the process.

The workers leave torch's thread count alone: `torch.set_num_threads` in one thread becomes the default of
every thread started later, so a worker that set it would slow down the caller's forwards.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection

from offload.driver import foreign
from offload.driver.base import Event, Stream
from offload.driver.hooks import Hooks
from offload.driver.thread_stream import CallerStream, ThreadStream
from offload.errors import RequestError

EXIT_SECONDS = 1.0
"""How long interpreter exit waits for each worker: far longer than a layer, far shorter than patience."""


class ThreadsDriver:
    """Worker threads as streams; the default for pools in host memory.

    Args:
        link_bytes_per_second: How quick each stream's link may seem; None leaves copies as quick as
            memory is.
        hooks: Called around every layer copy, for tests.
        cpus: The cores that the workers keep to; None leaves it to the system. A worker that was woken by a
            thread that goes on computing often starts on that thread's core, and a load of a few
            milliseconds is over before it is moved away: it then overlaps with nothing. Linux.
    """

    name = "threads"
    fences = False
    lost = None

    def __init__(
        self,
        link_bytes_per_second: float | None = None,
        *,
        hooks: Hooks | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        if link_bytes_per_second is not None and not link_bytes_per_second > 0:
            raise RequestError(
                f"link_bytes_per_second is {link_bytes_per_second}; it must be above 0, or None for no limit",
                value=link_bytes_per_second,
            )
        self._rate = link_bytes_per_second
        self._hooks = hooks
        self._cpus = self._check(cpus)
        self._lock = threading.Lock()
        self._streams: dict[str, ThreadStream] = {}
        self._caller = CallerStream()
        self._closed = threading.Event()
        # Runs when the driver is forgotten, or at interpreter exit, whichever comes first.
        self._end = weakref.finalize(self, _end, self._streams, self._lock, self._closed)

    @staticmethod
    def _check(cpus: Collection[int] | None) -> frozenset[int] | None:
        """Refuse cores that this process may not use."""
        if cpus is None:
            return None
        if not hasattr(os, "sched_setaffinity"):
            raise RequestError("cpus needs Linux; pass None to leave the cores to the system")
        mine = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cpus)  # the system knows best: ask it here, not in the worker
        except (OSError, ValueError, OverflowError) as error:
            raise RequestError(
                f"cpus is {sorted(cpus)}: the system gives this process none of them. Pass cores it "
                "may use, or None.",
                value=cpus,
            ) from error
        finally:
            os.sched_setaffinity(0, mine)
        return frozenset(cpus)

    def __repr__(self) -> str:
        return f"<ThreadsDriver {', '.join(self._streams) or 'no streams'}>"

    def stream(self, name: str) -> Stream:
        """Return the stream of that name; its thread starts on first use."""
        found = self._streams.get(name)
        if found is not None:
            return found
        with self._lock:
            if self._closed.is_set():
                raise RequestError(f"cannot make stream {name!r}: the driver is closed")
            if name not in self._streams:
                self._streams[name] = ThreadStream(name, self._rate, self._hooks, self._cpus)
            return self._streams[name]

    def compute_stream(self) -> Stream:
        """Return the calling thread as a stream."""
        return self._caller

    def marks(self) -> tuple[Event, ...]:
        """Return nothing: what the calling thread has computed has happened."""
        return ()

    def events(self, after: object) -> tuple[Event, ...]:
        """Return events for what a caller passed as `after=`."""
        return foreign.events(after)

    def capturing(self) -> bool:
        """Return False: there are no graphs here."""
        return False

    def now(self) -> float:
        """Return the time in seconds, on the clock of deadlines: `time.perf_counter`."""
        return time.perf_counter()

    now_ns = staticmethod(time.perf_counter_ns)
    """Return the time in nanoseconds, on the same clock: without a call of ours, as every stamp takes it."""

    @property
    def alarm(self) -> None:
        """None: seconds are the loop's own."""
        return None

    async def quiesce(self) -> None:
        """Do nothing: time passes by itself."""

    def close(self) -> None:
        """End and join all threads. Any number of times; in a fork it only forgets them."""
        with self._lock:
            self._closed.set()
            streams = list(self._streams.values())
        for stream in streams:
            stream.stop()
        for stream in streams:
            stream.join()
        self._end.detach()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()


def _end(streams: dict[str, ThreadStream], lock: threading.Lock, closed: threading.Event) -> None:
    """Stop workers that nobody closed, with patience that ends; none starts any more."""
    with lock:
        closed.set()
        left = list(streams.values())
    for stream in left:
        stream.stop()
    deadline = time.perf_counter() + EXIT_SECONDS
    for stream in left:
        stream.join(max(0.0, deadline - time.perf_counter()))
