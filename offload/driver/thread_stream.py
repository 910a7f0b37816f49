"""A worker thread that carries flights, and the calling thread as a stream; `threads.py` has the theory."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast

from offload.core.runlist import Runlist
from offload.driver.base import Event, Flight, Work
from offload.driver.helper import helper_thread
from offload.driver.hooks import Hooks, Order
from offload.driver.tickets import Ticket, Watchers
from offload.errors import RequestError

_CATCH_UP = 0.001
"""Seconds by which a throttled copy may begin before its turn: sleeps overshoot by 0.05-0.1 ms each, and
without it 32 layers are 3 ms late."""


class ThreadStream:
    """One worker thread and the flights it carries."""

    def __init__(
        self,
        name: str,
        rate: float | None,
        hooks: Hooks | None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        self.name = name
        self.landed = 0
        """Position of the last layer that has passed."""
        self.issued = 0
        """Position of the last layer that has been issued."""
        self._pid = os.getpid()
        self._rate = rate
        self._hooks = hooks
        self._cpus = cpus
        self._runlist: Runlist[Flight] = Runlist()
        self._watchers = Watchers(self)
        self._inbox: SimpleQueue[Flight | None] = SimpleQueue()
        self._fences: deque[Event] = deque()
        self._closing = threading.Event()
        self._due = 0.0
        self._thread = helper_thread(self._run, f"offload-{name}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ThreadStream {self.name} {self.landed}/{self.issued} layers landed>"

    def carry(self, flight: Flight) -> None:
        """Take a flight. Any thread; returns at once."""
        if os.getpid() != self._pid:
            raise RequestError(
                f"cannot submit: this process is a fork of {self._pid}, and the copy threads live "
                "there. Open a scheduler in the child."
            )
        if self._closing.is_set():
            raise RequestError(f"cannot submit: stream {self.name!r} is closed. Open a scheduler.")
        self._inbox.put(flight)

    def kick(self) -> None:
        """Look again. Any thread, after a fork and after close too: nothing happens then."""
        if os.getpid() == self._pid:
            self._inbox.put(None)

    def wait(self, event: Event) -> None:
        """Order every layer that has not begun after `event`; the host goes on."""
        if not event.query():
            self._fences.append(event)
            event.watch(self.kick)

    def record(self) -> Event:
        """Mark this point: every layer that has begun."""
        return Ticket(self, self.issued)

    def watch(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` when `position` has passed; return a function that takes it back."""
        return self._watchers.add(position, callback)

    def stop(self) -> None:
        """Ask the worker to end after the layer it copies. Any thread."""
        if os.getpid() == self._pid:
            self._closing.set()
            self._inbox.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the worker; not in a fork, and not on the worker itself."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # ---- on the worker ----------------------------------------------------------------------------

    def _run(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)  # 0 is this thread, not the process
        while not self._closing.is_set():
            if not (self._runlist.busy and self._turn()):
                self._admit(self._inbox.get())
                self._due = time.perf_counter()
        self._abandon()

    def _turn(self) -> bool:
        """Do all that one layer boundary asks for; return whether a layer was copied.

        A function of its own, so that a worker that sleeps keeps no flight alive.
        """
        if not self._inbox.empty():
            self._take()
        picked = None if self._fences and self._fenced() else self._pick()
        if picked is not None:
            self._copy(picked[0], picked[1], cast("Work", picked[2]))
        for flight in self._runlist.reap() if self._runlist.left else ():
            flight.ended()
        return picked is not None

    def _take(self) -> None:
        """Empty the inbox."""
        while not self._inbox.empty():
            self._admit(self._inbox.get())

    def _admit(self, flight: Flight | None) -> None:
        """Prepare a flight and let it join the others; None was a kick."""
        if flight is None:
            return
        try:
            if not flight.stopped:
                flight.prepare()
        except BaseException as error:  # noqa: BLE001 - it is the flight's, not the worker's
            self._runlist.left.append(flight)
            flight.failed(0, error)
        else:
            self._runlist.add(flight)

    def _fenced(self) -> bool:
        """Return whether an event holds this stream up; then only what is stopped leaves."""
        while self._fences and self._fences[0].query():
            self._fences.popleft()
        if self._fences:
            self._runlist.sweep()
        return bool(self._fences)

    def _pick(self) -> tuple[Flight, int, object] | None:
        """Ask the runlist; a flight whose own `next_layer` raises fails alone."""
        while True:
            try:
                return self._runlist.pick()
            except BaseException as error:  # noqa: BLE001 - it is the flight's, not the worker's
                flight = self._runlist.asked
                assert flight is not None
                self._runlist.drop(flight)
                flight.failed(0, error)

    def _copy(self, flight: Flight, layer: int, work: Work) -> None:
        """Issue a layer, copy it, and tell the flight how it went."""
        order = self._hooks.begin(self.name, flight, layer) if self._hooks else None
        self.issued = position = self.issued + 1
        flight.issued(layer, Ticket(self, position))
        start_ns = time.perf_counter_ns()
        error = self._move(work, order)
        end_ns = time.perf_counter_ns()
        if order is not None and self._hooks is not None:
            self._hooks.end(order.op, error)
        if error is None:
            self.landed = position
            flight.landed(layer, start_ns, end_ns)
        else:
            self._runlist.drop(flight)
            flight.failed(layer, error)
            self.landed = position
        self._watchers.notify()

    def _move(self, work: Work, order: Order | None) -> BaseException | None:
        """Do the copy at the link's pace; return what it raised."""
        try:
            if order is not None:
                self._obey(order)
            begun = time.perf_counter() if self._rate else 0.0
            work()
            if order is not None and order.error is not None:
                return order.error  # torn: the bytes moved, and it failed all the same
            if self._rate:
                self._due = max(self._due, begun - _CATCH_UP) + work.nbytes / self._rate
                self._sleep_until(self._due)
        except BaseException as error:  # noqa: BLE001 - it is the flight's, not the worker's
            return error
        return None

    def _obey(self, order: Order) -> None:
        """Do what the hooks want before a copy."""
        for gate in order.gates:
            gate.arrive()
            gate.wait()
        if order.delay:
            self._sleep_until(time.perf_counter() + order.delay)
        if order.error is not None and not order.torn:
            raise order.error

    def _sleep_until(self, when: float) -> None:
        """Sleep without the GIL, until then or until close."""
        left = when - time.perf_counter()
        if left > 0:
            self._closing.wait(left)

    def _abandon(self) -> None:
        """End what is left when the stream is stopped: nothing of it will touch memory again."""
        while not self._inbox.empty():
            flight = self._inbox.get()
            if flight is not None:
                self._runlist.add(flight)
        for flight in (*self._runlist.reap(), *self._runlist.flights):
            flight.ended()


class CallerStream:
    """Compute on this driver: the calling thread, where everything before now has happened."""

    name = "compute"
    landed = 0

    def carry(self, flight: Flight) -> None:
        """Refuse: the calling thread carries nothing."""
        raise RequestError(
            "the compute stream carries no flights; use stream('load') or ('backup')"
        )

    def kick(self) -> None:
        """Do nothing: nothing waits here."""

    def wait(self, event: Event) -> None:
        """Block the calling thread until `event` has passed: what it does next comes after."""
        event.wait()

    def record(self) -> Event:
        """Mark this point, which has passed."""
        return Ticket(self, 0)

    def watch(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` at once."""
        callback()
        return lambda: None
