"""The async shell: it carries out what the machine decides, and tells the machine what happened.

Everything here runs on the event loop's thread, in short callbacks, except where a method says otherwise.
Three streams of news meet in `_turn`:

* submits, which hand their request to the machine at once and ask for a turn;
* flights that made progress (`report`, called by the drivers' threads);
* posts from other threads (`post`): submits of `from_thread`, cancels, marks that have landed.

A turn takes all news, then flushes: one batch per direction, and another turn when there is more, so that
a long queue never holds the loop. There is no task that could die; a fault inside a turn settles every
transfer as failed, closes the scheduler and is raised where it is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import anyio
import attrs

from offload.asked import closed_error
from offload.commands import carry_out, settle
from offload.core.batch import Limits, State
from offload.core.events import (
    Ended,
    Event,
    Failed,
    Flush,
    Landed,
)
from offload.core.hazards import HazardTable
from offload.core.machine import Machine
from offload.core.request import Pages
from offload.counters import Counters
from offload.driver.base import Driver, TimesCompute
from offload.entry import Entry
from offload.errors import RequestError
from offload.flight import Flight, WaitingThreads
from offload.group import PoolGroup
from offload.holding import Holds
from offload.ledger import Ledger, open_requests
from offload.logs import logger
from offload.loop import LoopHandle, NoLoop
from offload.ownership import PoolOwnership
from offload.parking import ParkingLot
from offload.route import Router
from offload.timer import Timer
from offload.trace import Tracer
from offload.trace.pools import PoolUse
from offload.vacancy import ANYBODY, Vacancies

_FLUSH = Flush()

_PER_TURN = 1024
"""Requests of flights with news that one turn takes note of, and no flight more: settling so many takes 10 ms."""


Places: TypeAlias = Sequence[tuple[HazardTable, Pages]]
"""Pages of several pools, with the tables that know who uses them."""


@attrs.define(eq=False, repr=False)
class Shell:
    """One scheduler's state on its loop. `Scheduler` and `ThreadFace` are the faces of it."""

    group: PoolGroup
    router: Router
    driver: Driver
    limits: Limits
    tracer: Tracer | None

    holds: Holds = attrs.field(factory=Holds)
    counters: Counters = attrs.field(factory=Counters)
    waiting_threads: WaitingThreads = attrs.field(factory=WaitingThreads)
    verdicts: AbstractContextManager[object] = attrs.field(factory=threading.RLock)
    """Held while the outcome of a request is decided; for a few reads, never longer."""

    deciding: bool = False
    """Whether the loop's thread is in the middle of an event. Who sees it there has interrupted it."""

    closing: bool = False
    _dead: bool = False

    fault: BaseException | None = None
    """Our own, to be raised where the scheduler is left."""

    private: bool = False
    """Whether nothing but this scheduler runs on its loop, so that a thread may wait for a turn."""

    lost: BaseException | None = None
    """What ended the device: nothing more is decided, and its pages stay claimed for ever."""

    batches: int = 0
    """Batches issued."""

    machine: Machine = attrs.field(init=False)
    ledger: Ledger = attrs.field(init=False)
    parking: ParkingLot = attrs.field(init=False)
    ownership: PoolOwnership = attrs.field(init=False)
    loop: LoopHandle = attrs.field(factory=NoLoop)
    timer: Timer = attrs.field(init=False)
    entries: dict[int, Entry] = attrs.field(factory=dict)
    """Those whose pages are still claimed."""

    flights: dict[int, Flight] = attrs.field(factory=dict)
    _arrivals: deque[Flight] = attrs.field(factory=deque)
    failing: deque[Entry] = attrs.field(factory=deque)
    """What has still to fail because we broke, or the device is lost."""

    _inbox: deque[Callable[[], None]] = attrs.field(factory=deque)
    _orders: deque[Callable[[], None]] = attrs.field(factory=deque)
    """Those that whatever is submitted must come after: layers that were written."""

    _turn_due: bool = False
    changed: list[anyio.Event] = attrs.field(factory=list)
    vacancies: Vacancies = attrs.field(factory=Vacancies)

    def __attrs_post_init__(self) -> None:
        tables = tuple(
            (member.host.pages.table, member.device.pages.table) for member in self.group.members
        )
        self.machine = Machine(self.group.num_layers, tables, self.limits)
        pools = PoolUse([member.host for member in self.group.members])
        self.ledger = Ledger(self.tracer, self.driver.now_ns, pools)
        self.parking = ParkingLot(self.machine.budget, self.limits.max_queued_bytes)
        self.ownership = PoolOwnership(self.group, self.machine, self.driver, self.flights)

    def open(self) -> None:
        """Settle on the loop that runs now.

        Raises:
            RequestError: A pool or the tracer belongs to a scheduler that is open; or this was opened before, or
                its driver was closed.
        """
        if not isinstance(self.loop, NoLoop):
            raise RequestError("a scheduler can be entered once. Call open_scheduler again.")
        if self.driver.closed:
            raise RequestError(
                f"{self.driver!r} is closed. A driver given as driver= is the scheduler's, which closes it "
                "when it is left: make one for each scheduler."
            )
        loop = LoopHandle()
        if self.tracer is not None:
            self.tracer.take(lambda: loop.closed)
        try:
            self.ownership.take(loop)
            self._start(loop)
        except BaseException:  # what was refused above is another's, and stays so
            self.loop = NoLoop()
            self.ownership.give_back()
            if self.tracer is not None:
                self.tracer.closed()
            raise

    def _start(self, loop: LoopHandle) -> None:
        self.machine.open()
        self.loop = loop
        self.timer = Timer(self.driver, self.loop, self._do)
        if self.tracer is not None:
            self.tracer.clock = self.driver.now_ns
            if isinstance(self.driver, TimesCompute):
                self.tracer.stopwatch = self.driver.stopwatch
            device, entries = str(self.group.anchor.device.device), self.entries
            self.tracer.opened(device, lambda: open_requests(list(entries.values())))
        logger.info("open: %r on %s, %s", self.group, self.driver.name, self.limits)

    def close(self) -> None:
        """Let go of everything, so that nothing keeps the pools but who holds them."""
        self.timer.close()
        try:
            self.driver.close()
        finally:
            if self.fault is not None and all(flight.over for flight in self.flights.values()):
                self.machine.forget(
                    self.ownership
                )  # what it had decided is void, and nothing moves
            self.ownership.give_back()
            if self.tracer is not None:
                self.tracer.closed()

    # What every face asks -----------------------------------------------------------------------

    @property
    def stuck(self) -> BaseException | None:
        """What ended the device or broke us, so that pages are never unlocked any more; else None."""
        return self.lost or self.fault

    @property
    def dead(self) -> bool:
        """Whether the loop has ended under us: nothing will settle any more. Read by waiting threads."""
        if not self._dead:
            self._dead = self.loop.closed
        return self._dead

    @property
    def over(self) -> bool:
        """Whether nothing will happen any more, and waiting threads must not wait for it."""
        return self.dead or self.stuck is not None

    @property
    def working(self) -> bool:
        """Whether anything is still to be decided or to land."""
        return self.stuck is None and self.machine.pending()

    def stop_intake(self) -> None:
        """Refuse what comes from now on, and who waits for room."""
        self.closing = True
        self.parking.refuse()

    def refuse_closed(self) -> None:
        """Raise if it is closed, or closing."""
        if self.closing:
            raise closed_error(self) from self.stuck

    # Turns ----------------------------------------------------------------------------------------

    def post(self, act: Callable[[], None]) -> bool:
        """Do `act` on the loop's thread, in order with other posts. Any thread."""
        self._inbox.append(act)
        return self.ask_for_turn()

    def post_order(self, act: Callable[[], None]) -> bool:
        """Do the same before whatever is submitted from now on, and before other posts. Any thread."""
        self._orders.append(act)
        return self.ask_for_turn()

    def catch_up(self) -> None:
        """Do what has its place in the order already, posted with `post_order`: few, and quick."""
        while self._orders and not self.deciding:
            self._do(self._orders.popleft())

    def report(self, flight: Flight) -> None:
        """Take note that a flight has news. Any thread; the flag is read before the news is."""
        if flight.reported:
            flight.heard = False  # by a turn that was asked for, and may never come
        else:
            flight.reported = True
            self._arrivals.append(flight)
            flight.heard = not self._turn_due and self._ask(self.loop.post_threadsafe)
        if flight.over and not flight.heard and self.dead:
            self.ownership.release_after_loop()

    def ask_for_turn(self) -> bool:
        """Have the news taken soon; return whether there is a loop to do it. Any thread."""
        return self._turn_due or self._ask(self.loop.post)

    def ask_here(self) -> None:
        """Do the same from the loop's own thread."""
        if not self._turn_due:
            self._ask(self.loop.soon)

    def _ask(self, post: Callable[[Callable[[], object]], bool]) -> bool:
        self._turn_due = True
        try:
            posted = post(self._turn)
        except BaseException:  # a signal's, and nobody else would ask again
            self._turn_due = False
            raise
        if not posted:
            self._turn_due = False  # who asks next is told so too
            self._dead = True
            self.waiting_threads.wake_all()
        return posted

    def _turn(self) -> None:
        self._turn_due = False
        try:
            start = 0 if self.tracer is None else self.ledger.begin_turn()
            try:
                self._take_news()
            finally:
                if start:
                    self.ledger.end_turn(start)
        except BaseException as error:
            self._break(error)  # raised where the scheduler is left
            if isinstance(error, (KeyboardInterrupt, SystemExit)):  # and these end the program now
                raise

    def _take_news(self) -> None:
        if self.driver.lost is not None and self.lost is None:
            self.lost = self.driver.lost
            self._give_up(self.lost)
        if self.failing and self.stuck is not None:
            self.fail_some(self.stuck)
        more = bool(self._inbox or self._orders) and not self.take_inbox(_PER_TURN)
        pieces = 0
        while self._arrivals and pieces < _PER_TURN:
            flight = self._arrivals.popleft()
            self._absorb(flight)
            pieces += len(flight.batch.pieces)
        if self.machine.waiting() and self.stuck is None:
            self.handle(_FLUSH)
            more = more or (self.machine.waiting() and self.machine.flushable())
        if self.vacancies:
            more = self.vacancies.wake(_PER_TURN) or more
        if more or self._arrivals:
            self.ask_here()
        if self.parking.parked:
            self.parking.wake()

    def take_inbox(self, most: int | None = None) -> bool:
        """Do what was posted, or the first so many; return whether nothing of it is left.

        A fault in it is ours, not of the caller who happens to come by.
        """
        if self._orders:
            self.catch_up()
        done = 0
        while self._inbox and not self.deciding and done != most:
            done += 1
            self._do(self._inbox.popleft())
        return not (self._inbox or self._orders)

    def _do(self, act: Callable[[], None]) -> None:
        """Do something that no caller waits for."""
        try:
            act()
        except BaseException as error:
            self._break(error)  # raised where the scheduler is left
            if not isinstance(error, Exception):  # a signal's, and that is the caller's as well
                raise

    def _absorb(self, flight: Flight) -> None:
        """Tell the machine what a flight has published since the last time."""
        flight.reported = False
        over, error, landed = flight.over, flight.error, flight.landed_layers
        batch = flight.batch
        if flight.issue_watched:
            for entry in flight.entries:
                entry.wake(flight.issued_layers)
        if landed > batch.landed and (error is not None or not over):
            self.handle(Landed(batch.id, landed))
        if error is not None and not batch.failed:
            self.ledger.mark("error", error, batch=batch.id, layer=flight.error_layer)
            self.handle(Failed(batch.id, error, flight.spoiled()))
        if over and batch.id in self.flights:
            if flight.uncounted is not None:
                self.ledger.uncounted(flight.uncounted)
            self.handle(Ended(batch.id, landed, flight.untouched))
            del self.flights[batch.id]
            flight.entries.clear()  # they refer to it too
            if self.vacancies:
                self.vacancies.vacate(ANYBODY)
            if self.changed:
                self.notify()

    def submit(self, entry: Entry) -> None:
        """Tell the machine of a request; it may settle at once.

        Raises:
            RequestError: It could only wait for ever; or we were interrupted in a decision. Nothing was queued.
        """
        if self.deciding:
            raise RequestError(
                "a request was submitted from a finalizer or a signal handler that interrupted the "
                "scheduler. Post it to the loop instead."
            )
        self.deciding = True
        try:
            commands = self.machine.handle(entry.request)
            self.entries[entry.request.id] = entry
            entry.counters.admit()
            for command in commands:
                carry_out(self, command)
        except BaseException as error:
            self._undecided(error)
            raise
        finally:
            self.deciding = False

    def handle(self, event: Event) -> None:
        """Tell the machine of an event, and do what it wants done. Interrupted in a decision: soon."""
        if self.lost is not None or self.fault is not None:
            return
        if self.deciding:
            self.post(lambda: self.handle(event))
            return
        self.deciding = True
        try:
            for command in self.machine.handle(event):
                carry_out(self, command)
        except BaseException as error:
            self._undecided(error)
            raise
        finally:
            self.deciding = False

    def _undecided(self, error: BaseException) -> None:
        """Break, unless the event was refused: a signal, or a fault of ours, has left half a decision."""
        if not isinstance(error, RequestError):
            self._break(error)

    def notify(self) -> None:
        """Let those look again who wait for a change."""
        if self.changed:
            changed, self.changed = self.changed, []
            for event in changed:
                event.set()

    async def change(self) -> None:
        """Wait until pages were unlocked, a batch ended, or the scheduler broke."""
        event = anyio.Event()
        self.changed.append(event)
        try:
            await event.wait()
        finally:
            if event in self.changed:
                self.changed.remove(event)

    def _break(self, error: BaseException) -> None:
        """Our own fault: it is raised to whoever leaves the scheduler."""
        self.fault = self.fault or error
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Settle everything as failed, some at a time, and refuse everything; no page is unlocked any more."""
        self.stop_intake()
        self.failing = deque(self.entries.values())
        self.fail_some(error)
        self.waiting_threads.wake_all()
        self.vacancies.wake_all()
        self.notify()

    def fail_some(self, error: BaseException) -> bool:
        """Fail some of what had not settled when we broke; return whether there are more."""
        for _ in range(min(_PER_TURN, len(self.failing))):
            entry = self.failing[0]
            for each in (entry, *(entry.joined or ())):
                settle(self, each, State.FAILED, error)
            entry.wake()  # it may have settled before, and wait for its pages
            self.failing.popleft()
        if self.failing:
            self.ask_for_turn()
        return bool(self.failing)
