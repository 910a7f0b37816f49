"""A CUDA stream with its two threads: one enqueues, one waits.

Theory of operation
-------------------
The *issuing* thread asks its `Runlist` for the most urgent next layer, enqueues it and records an event.
The *waiting* thread (`Waiter`) sees events pass, in stream order, and tells the flights.

* What has been enqueued cannot be overtaken, so only a little is enqueued ahead: at least `AHEAD_LAYERS`
  layers, which keeps the wire busy, and more only while they are small, up to `AHEAD_BYTES`. A more urgent
  flight then goes in front of all else at the next layer boundary.
* A layer that could not be enqueued completely may have started copies all the same. So an event is
  recorded whatever happened: it is the drain event, and the flight fails and ends when it has passed.
  Where even that cannot be recorded the stream is waited for, and the flight fails then; the device is lost
  only if that cannot be done either, or an error is sticky.
* The work of a layer (index tensors, descriptors) is referred to until its event has passed; on a lost
  device for good, as it may still be read.
* On a lost device every flight fails, then ends, whether or not anything of it was enqueued: no copy of it
  will be seen to end. `CudaDriver.lost` tells the scheduler which kind of ending it was.

`cuda_stamps.py` tells when a layer ran, `cuda_told.py` tells the flights.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import cast

import attrs

from offload.core.runlist import Runlist
from offload.driver.base import Event, Flight, Work
from offload.driver.cuda_calls import RawStream
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_stamps import Stamps
from offload.driver.cuda_told import Told
from offload.driver.cuda_waiter import Waiter
from offload.driver.helper import helper_thread
from offload.errors import RequestError

AHEAD_LAYERS = 2
"""Layers that may always be enqueued ahead: one that moves and one behind it, so that the wire never idles."""

AHEAD_BYTES = 64 << 20
"""Bytes up to which more layers may be: at 50 GB/s an urgent load then waits 1.3 ms at most for them."""


@attrs.define(eq=False)
class _Ticket:
    """One enqueued layer, kept until its event has passed."""

    flight: Flight
    layer: int
    work: Work
    event: CudaEvent
    begun: CudaEvent | None
    issue_ns: int
    error: BaseException | None
    nbytes: int


class CudaStream:
    """One direction's stream and the flights it carries."""

    def __init__(self, name: str, hub: Hub, raw: RawStream) -> None:
        self.name = name
        self.raw = raw
        self._hub = hub
        self._waiter = Waiter(hub, name)
        self._waiter.start()
        self._stamps = Stamps(hub, raw, self._waiter)
        self._runlist: Runlist[Flight] = Runlist()
        self._inbox: SimpleQueue[Flight | None] = SimpleQueue()
        self._gates: deque[Event] = deque()
        self._last: dict[int, CudaEvent] = {}
        self._told = Told(hub)
        self._issued = [0, 0]  # layers, bytes: written by the issuing thread
        self._passed = [0, 0]  # layers, bytes: written by the waiting thread
        self._full = False
        self._closing = False
        hub.on_lost.append(self.kick)
        self._thread = helper_thread(self._run, f"offload-{name}-issue")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} {self._passed[0]}/{self._issued[0]} layers passed>"

    # ---- any thread ---------------------------------------------------------------------------------

    def carry(self, flight: Flight) -> None:
        """Take a flight. Any thread; returns at once."""
        if os.getpid() != self._hub.pid:
            raise RequestError(
                f"cannot submit: this process is a fork of {self._hub.pid}, and CUDA does not survive "
                "a fork. Open a scheduler in a process that was spawned."
            )
        if self._closing:
            raise RequestError(f"cannot submit: stream {self.name!r} is closed. Open a scheduler.")
        self._inbox.put(flight)

    def kick(self) -> None:
        """Look again. Any thread, after close too: nothing happens then."""
        self._inbox.put(None)

    def wait(self, event: Event) -> None:
        """Order everything enqueued from now on after `event`; the host goes on.

        An event that is not CUDA's holds back what is not enqueued yet, on the host.
        """
        if isinstance(event, CudaEvent):
            event.order(self.raw)
        elif not event.query():
            self._gates.append(event)
            event.watch(self.kick)

    def record(self) -> Event:
        """Mark this point of the stream."""
        return self._mark(timing=False)

    def stop(self) -> None:
        """Ask both threads to end when what was enqueued has passed."""
        self._closing = True
        self._inbox.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for both threads."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._waiter.join(timeout)

    # ---- the issuing thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self._hub.begin_thread()
        while not self._closing:
            while not self._inbox.empty():
                self._admit(self._inbox.get())
            if self._hub.lost is not None:
                self._give_up()
            picked = None if self._held() else self._pick()
            self._reap(picked[0] if picked is not None else None)
            if picked is not None:
                self._issue(picked[0], picked[1], cast("Work", picked[2]))
            elif self._inbox.empty():
                self._admit(self._inbox.get())
        self._abandon()
        self._waiter.stop()

    def _admit(self, flight: Flight | None) -> None:
        """Prepare a flight and let it join the others; None was a kick."""
        if flight is None:
            return
        self._told.take(flight)
        try:
            if not flight.stopped and self._hub.lost is None:
                with self._hub.calls.using(self.raw):
                    flight.prepare()
        except BaseException as error:  # noqa: BLE001 - it is the flight's, not the thread's
            self._runlist.left.append(flight)
            self._told.fail(flight, 0, error)
        else:
            self._runlist.add(flight)

    def _held(self) -> bool:
        """Return whether nothing may be enqueued now; then only what is stopped leaves."""
        while self._gates and self._gates[0].query():
            self._gates.popleft()
        self._full = True  # before the look: a landing that comes between kicks
        layers = self._issued[0] - self._passed[0]
        nbytes = self._issued[1] - self._passed[1]
        self._full = layers >= AHEAD_LAYERS and nbytes >= AHEAD_BYTES
        held = self._full or bool(self._gates) or self._hub.lost is not None
        if held:
            self._runlist.sweep()
        return held

    def _pick(self) -> tuple[Flight, int, object] | None:
        """Ask the runlist; a flight whose own `next_layer` raises fails alone."""
        while True:
            try:
                return self._runlist.pick()
            except BaseException as error:  # noqa: BLE001 - it is the flight's, not the thread's
                flight = self._runlist.asked
                assert flight is not None
                self._runlist.drop(flight)
                self._after(flight, partial(self._told.fail, flight, 0, error))

    def _issue(self, flight: Flight, layer: int, work: Work) -> None:
        """Enqueue a layer and mark its end, whatever happens in between."""
        issue_ns = self._hub.now_ns()
        self._told.begin(flight, layer)
        begun = self._stamps.begin() if flight.traced else None
        error: BaseException | None = None
        try:
            with self._hub.calls.using(self.raw):
                work()
        except BaseException as raised:  # noqa: BLE001 - told to the flight
            error = raised
        try:
            event = self._mark(timing=begun is not None)
        except Exception as raised:  # noqa: BLE001 - told to the flight
            self._unmarked(flight, layer, work, error, raised)
            return
        if error is not None and self._hub.is_fatal(error, event.query):
            self._hub.kept.append(work)
            self._hub.lose(error)
            return
        nbytes = work.nbytes
        self._issued = [self._issued[0] + 1, self._issued[1] + nbytes]
        self._last[id(flight)] = event
        if error is None:
            flight.issued(layer, event, issue_ns)
        else:
            self._runlist.drop(flight)
        ticket = _Ticket(flight, layer, work, event, begun, issue_ns, error, nbytes)
        self._waiter.add(event, partial(self._land, ticket))

    def _unmarked(
        self,
        flight: Flight,
        layer: int,
        work: Work,
        error: BaseException | None,
        raised: BaseException,
    ) -> None:
        """Fail a flight after a layer whose end could not be marked, when the stream has come to it."""
        if self._hub.drained(self.raw, error, raised):
            self._runlist.drop(flight)
            self._after(flight, partial(self._told.fail, flight, layer, error or raised))
        else:
            self._hub.kept.append(work)
            self._hub.lose(error or raised)

    def _mark(self, *, timing: bool) -> CudaEvent:
        return self._hub.record(self.raw, self._waiter, timing=timing)

    def _reap(self, picked: Flight | None) -> None:
        """End the flights that left the runlist, once what they enqueued has passed."""
        for flight in self._runlist.reap() if self._runlist.left else ():
            # 1 its last layer is still to be enqueued, 2 it is over.
            if flight is picked:
                self._runlist.left.append(flight)
            else:
                self._after(flight, partial(self._told.end, flight))
                self._last.pop(id(flight), None)

    def _after(self, flight: Flight, callback: Callable[[], None]) -> None:
        """Call back when all that this flight has enqueued has passed."""
        event = self._last.get(id(flight))
        if event is None:
            callback()
        else:
            self._waiter.add(event, callback)

    def _give_up(self) -> None:
        """Fail and end every flight: the device is lost."""
        self._runlist.flights.clear()
        self._runlist.reap()
        self._last.clear()
        self._gates.clear()
        for flight in self._told.flights():
            self._told.end(flight)

    def _abandon(self) -> None:
        """End what is left when the stream is closed, as if it were stopped."""
        while not self._inbox.empty():
            flight = self._inbox.get()
            if flight is not None:
                self._told.take(flight)
                self._runlist.add(flight)
        for flight in self._runlist.flights[:]:
            self._runlist.drop(flight)
        self._reap(None)

    # ---- either thread ------------------------------------------------------------------------------

    def _land(self, ticket: _Ticket) -> None:
        """Tell a flight that a layer has passed. On the waiting thread."""
        flight, layer = ticket.flight, ticket.layer
        if self._hub.lost is not None:
            self._hub.kept.append(ticket.work)
        if ticket.error is not None:
            self._told.fail(flight, layer, ticket.error)
        elif self._hub.lost is None:
            stamps = self._stamps.of(ticket.begun, ticket.event, ticket.issue_ns)
            self._told.land(flight, layer, stamps)
        self._passed = [self._passed[0] + 1, self._passed[1] + ticket.nbytes]
        if self._full:
            self.kick()
