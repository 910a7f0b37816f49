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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, cast

import anyio
import attrs
import numpy as np

from offload.core.batch import Batch, Limits, Piece, State
from offload.core.events import (
    Cancel,
    Command,
    Ended,
    Event,
    Extend,
    Failed,
    Flush,
    Issue,
    Landed,
    Settle,
    SettleLayer,
    Stop,
    Unblock,
    Unlock,
    Watch,
    Written,
)
from offload.core.hazards import HazardTable
from offload.core.machine import Machine
from offload.core.pages import PagesLike
from offload.core.request import Pages
from offload.counters import Counters
from offload.driver.base import Driver
from offload.errors import RequestError, SchedulerClosedError
from offload.flight import Bell, Flight
from offload.group import PagePair, PoolGroup
from offload.holding import HoldBlock, refuse_held, refuse_held_pages
from offload.logs import SLOW_NS, RateLimited, logger
from offload.loop import Home, Nowhere
from offload.parking import Line
from offload.ride import Ride
from offload.route import Route
from offload.statistics import DirectionStatistics, Statistics
from offload.submit import Desk
from offload.timer import Timer
from offload.trace import ASYNC_LANE, OpenRequest, Tracer
from offload.trace.forward import ForwardTrace
from offload.trace.pools import PoolUse

Places: TypeAlias = Sequence[tuple[HazardTable, Pages]]
"""Pages of several pools, with the tables that know who uses them."""

_LET_GO = 4096
"""Held requests let go in one turn, and so in one batch: about 30 ms of the loop."""


@attrs.define(eq=False, repr=False)
class Shell:
    """One scheduler's state on its loop. `Scheduler` and `ThreadFace` are the faces of it."""

    group: PoolGroup
    driver: Driver
    limits: Limits
    tracer: Tracer | None
    desk: Desk

    counters: Counters = attrs.field(factory=Counters)
    bell: Bell = attrs.field(factory=Bell)
    verdicts: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the outcome of a request is decided; for a few reads, never longer."""

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
    line: Line = attrs.field(init=False)
    home: Home = attrs.field(factory=Nowhere)
    timer: Timer = attrs.field(init=False)
    rides: dict[int, Ride] = attrs.field(factory=dict)
    """Those whose pages are still claimed."""

    _flights: dict[int, Flight] = attrs.field(factory=dict)
    _arrivals: deque[Flight] = attrs.field(factory=deque)
    _inbox: deque[Callable[[], None]] = attrs.field(factory=deque)
    _turn_due: bool = False
    _failures: RateLimited = attrs.field(factory=RateLimited)
    _slow: RateLimited = attrs.field(factory=RateLimited)
    _changed: list[anyio.Event] = attrs.field(factory=list)
    _pool_use: PoolUse = attrs.field(init=False)
    _burial: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        tables = tuple(
            (member.host.pages.table, member.device.pages.table) for member in self.group.members
        )
        self.machine = Machine(self.group.num_layers, tables, self.limits)
        self._pool_use = PoolUse([member.host for member in self.group.members])
        self.line = Line(self.machine.budget, self.limits.max_queued_bytes)

    def open(self) -> None:
        """Settle on the loop that runs now.

        Raises:
            RequestError: A pool belongs to a scheduler that is open; or this one was opened before.
        """
        if not isinstance(self.home, Nowhere):
            raise RequestError("a scheduler can be entered once. Call open_scheduler again.")
        self.take_pools(self)
        self.home = Home()
        self.timer = Timer(self.driver, self.home)
        if self.tracer is not None:
            self.tracer.clock = self.driver.now_ns
            self.tracer.opened(str(self.group.anchor.device.device), self._in_flight)
        logger.info("open: %r on %s, %s", self.group, self.driver.name, self.limits)

    def close(self) -> None:
        """Let go of everything, so that nothing keeps the pools but who holds them."""
        self.timer.close()
        self.driver.close()
        self.take_pools(None)
        if self.tracer is not None:
            self.tracer.opened(str(self.group.anchor.device.device), list)

    def take_pools(self, owner: object | None) -> None:
        """Make the pools' tables ours, or nobody's.

        Raises:
            RequestError: One belongs to a scheduler that is open.
        """
        pools = [pool for member in self.group.members for pool in (member.device, member.host)]
        for pool in pools:
            before = pool.pages.table.owner
            if owner is not None and isinstance(before, Shell) and before.dead:
                before.bury()
            if owner is not None and pool.pages.table.owner is not None:
                raise RequestError(
                    f"{pool!r} belongs to a scheduler that is open. Close that one first, or give "
                    "each scheduler pools of its own."
                )
        for pool in pools:
            pool.pages.table.owner = owner

    # What every face asks -----------------------------------------------------------------------

    def hold(self) -> AbstractContextManager[None]:
        """Keep back what the calling thread submits until the block ends; then it is one batch."""
        return HoldBlock(self.desk, self.let_go)

    def refuse_held(self, ride: Ride) -> None:
        """Raise if the caller waits for what he keeps back himself. Any thread."""
        hold = self.desk.holding()
        if hold is not None:
            refuse_held(hold, self.machine, ride)

    def refuse_held_pages(self, places: Places) -> None:
        """Raise if the caller waits for pages that are used by what he keeps back himself. Any thread."""
        hold = self.desk.holding()
        if hold is not None:
            refuse_held_pages(hold, self.machine, lambda piece: self._uses(piece, places))

    def _uses(self, piece: Piece, places: Places) -> bool:
        """Return whether a request has claimed any of these pages."""
        for member, *sides in piece.request.parts:
            for table, pages in zip(self.machine.tables[member], sides, strict=True):
                if any(other is table and np.isin(wanted, pages).any() for other, wanted in places):
                    return True
        return False

    @property
    def stuck(self) -> BaseException | None:
        """What ended the device or broke us, so that pages are never unlocked any more; else None."""
        return self.lost or self.fault

    @property
    def dead(self) -> bool:
        """Whether the loop has ended under us: nothing will settle any more. Read by waiting threads."""
        if not self._dead:
            self._dead = self.home.closed
        return self._dead

    @property
    def over(self) -> bool:
        """Whether nothing will happen any more, and waiting threads must not wait for it."""
        return self.dead or self.stuck is not None

    @property
    def working(self) -> bool:
        """Whether anything is still to be decided or to land."""
        return self.stuck is None and self.machine.pending()

    def refuse_closed(self) -> None:
        """Raise if it is closed, or closing."""
        if self.closing:
            raise SchedulerClosedError from self.lost

    def expire(self, ride: Ride) -> None:
        """Fail a request whose deadline has passed."""
        error = TimeoutError("its deadline passed before it had settled")
        if ride.decide(State.FAILED, error):
            self._abandon(ride, error)

    def _abandon(self, ride: Ride, error: BaseException | None) -> None:
        """End a request for its caller; the copies go on where others ride on them."""
        if ride.settled:
            return
        if ride.wanted_by_others():
            self._count(ride, State.CANCELLED if error is None else State.FAILED, error)
        else:
            self.handle(Cancel(ride.request.id, error))
        self.ask_for_turn()

    def call_at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` when the clock of deadlines passes `when`."""
        self.timer.call_at(when, act)

    # Acts of a transfer, from any thread ----------------------------------------------------------

    def cancel(self, ride: Ride) -> None:
        """Cancel a request; see `Transfer.cancel`."""
        self.home.check_process("cancel")
        here = self.home.here
        if here:
            self.take_inbox()
        if not ride.decide(State.CANCELLED):
            return
        if here:
            self._abandon(ride, None)
        else:
            self.bell.ring()
            self.post(lambda: self._abandon(ride, None))

    def layer_written(self, ride: Ride, layer: int) -> None:
        """See `Transfer.layer_written`."""
        self.home.check_process("say that a layer is written")
        marks = self.desk.marks("compute")
        ride.write(layer)

        def written() -> None:
            piece = self.machine.new_id()
            self.handle(Written(ride.request.id, layer, piece, len(marks)))
            for mark in marks:
                mark.watch(lambda: self.post(lambda: self.handle(Unblock(piece))))

        self.post(written)

    def let_go(self, pieces: list[int]) -> None:
        """Unblock held pieces. Any thread; in order after what that thread has posted."""
        held, pieces[:] = pieces[:], []

        def go() -> None:
            for piece in held[:_LET_GO]:
                self.handle(Unblock(piece))
            del held[:_LET_GO]
            if held:
                self.home.post(lambda: self.post(go))

        if held:
            self.post(go)

    def let_go_of_all(self) -> None:
        """Unblock everything that is held: nobody's block may keep a scheduler from closing."""
        for ride in list(self.rides.values()):
            if ride.hold is not None and ride.hold.pieces:
                self.let_go(ride.hold.pieces)

    def check_may_block(self, what: str) -> None:
        """Raise if blocking this thread would stop the loop that has to end the wait."""
        self.home.check_process(what)
        if self.home.here and not self.dead:
            raise RequestError(
                f"this is the scheduler's own loop thread, and to {what} here would stop the loop. "
                "Await instead (issued, layer, or the transfer itself), or wait in a worker thread."
            )

    def note_wait(
        self, ride: Ride, layer: int, start_ns: int, forward: ForwardTrace | None = None
    ) -> None:
        """Count a wait for a layer; `start_ns` is 0 when it did not have to wait. Any thread."""
        counters, tracer = self.counters.of(ride.direction), self.tracer
        if not start_ns:
            counters.ready()
            if tracer is not None and tracer.active:
                tracer.ready()
            return
        end = self.driver.now_ns()
        counters.waited(end - start_ns)
        if forward is not None:
            forward.waited(ride.request.id, layer, start_ns)
        elif tracer is not None and tracer.active:
            tracer.wait(ride.request.id, ride.direction, layer, start_ns, end, ASYNC_LANE)

    def now(self) -> float:
        """Return the time in seconds on the clock of deadlines."""
        return self.driver.now()

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        budget = self.machine.budget
        return Statistics(
            load=DirectionStatistics.of(self.counters.load),
            backup=DirectionStatistics.of(self.counters.backup),
            queued_requests=budget.queued_requests,
            queued_bytes=budget.queued_bytes,
            inflight_requests=budget.inflight_requests,
            inflight_bytes=budget.inflight_bytes,
            parked=len(self.line),
            batches=self.batches,
        )

    def busy(self, places: Places) -> bool:
        """Return whether some pages are claimed, without what other threads have posted. Any thread."""
        return any(table.busy(pages) for table, pages in places)

    def places(
        self,
        device_pages: PagesLike,
        host_pages: PagesLike,
        members: Mapping[str, PagePair] | None,
    ) -> Places:
        """Return checked copies of page ids, by table. Any thread."""
        return self.group.places(device_pages, host_pages, members)

    # Turns ----------------------------------------------------------------------------------------

    def post(self, act: Callable[[], None]) -> bool:
        """Do `act` on the loop's thread, in order with other posts. Any thread."""
        self._inbox.append(act)
        return self.ask_for_turn()

    def _report(self, flight: Flight) -> None:
        """Take note that a flight has news. Any thread; the flag is read before the news is."""
        if not flight.reported:
            flight.reported = True
            self._arrivals.append(flight)
            self.ask_for_turn()
        if flight.over and self.dead:
            self.bury()

    def bury(self) -> None:
        """After the loop's end, let go of the pools as soon as nothing moves any more. Any thread."""
        still = [flight for flight in self._flights.values() if not flight.over]
        for flight in still:
            if flight.limit < flight.batch.last:  # nobody will let it go on
                flight.stopped = True
                self.driver.stream(flight.batch.direction).kick()
        if not still:
            with self._burial:
                self.machine.forget()
                if any(table.owner is self for pair in self.machine.tables for table in pair):
                    self.take_pools(None)

    def ask_for_turn(self) -> bool:
        if not self._turn_due:
            self._turn_due = True
            if not self.home.post(self._turn):
                self._dead = True
                self.bell.ring()
                return False
        return True

    def _turn(self) -> None:
        self._turn_due = False
        tracer = self.tracer
        start = self.driver.now_ns() if tracer is not None and tracer.active else 0
        try:
            if self.driver.lost is not None and self.lost is None:
                self.lost = self.driver.lost
                self._give_up(self.lost)
            self.take_inbox()
            while self._arrivals:
                self._absorb(self._arrivals.popleft())
            self.handle(Flush())
            if self.machine.flushable():
                self.ask_for_turn()
            self.line.wake()
        except BaseException as error:  # noqa: BLE001 - raised where the scheduler is left
            self._break(error)
        if tracer is not None and start:
            end = self.driver.now_ns()
            tracer.tick(start, end)
            self._pool_use.sample(tracer, end)

    def take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _absorb(self, flight: Flight) -> None:
        """Tell the machine what a flight has published since the last time."""
        flight.reported = False
        over, error, landed = flight.over, flight.error, flight.landed_layers
        batch = flight.batch
        if flight.issue_watched:
            for ride in flight.rides:
                ride.wake(flight.issued_layers)
        if landed > batch.landed:
            self.handle(Landed(batch.id, landed))
        if error is not None and not batch.failed:
            self._note("error", error, batch=batch.id, layer=flight.error_layer)
            self.handle(Failed(batch.id, error, flight.spoiled()))
        if over and batch.id in self._flights:
            del self._flights[batch.id]
            self.handle(Ended(batch.id, flight.untouched))
            flight.rides.clear()  # they refer to it too
            self._notify()

    def handle(self, event: Event) -> None:
        if self.stuck is None:
            self.obey(self.machine.handle(event))

    def obey(self, commands: Sequence[Command]) -> None:
        """Do what the machine wants done."""
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case SettleLayer(batch):
                flight = self._flights[batch.id]
                for ride in flight.rides:
                    if ride.watched:
                        ride.wake(batch.landed)
            case Issue(batch):
                self._issue(batch)
            case Settle(piece, state):
                self._settle(piece, state)
            case Unlock(piece):
                self._unlock(piece)
            case Extend(batch):
                self._flights[batch.id].limit = batch.limit
                self.driver.stream(batch.direction).kick()
            case Watch(batch):
                flight = self._flights[batch.id]
                flight.watched = flight.by_layer = True
                self._report(flight)
            case Stop(batch):
                self._flights[batch.id].stopped = True
                self.driver.stream(batch.direction).kick()

    def _issue(self, batch: Batch) -> None:
        stream = self.driver.stream(batch.direction)
        counters = self.counters.of(batch.direction)
        flight = Flight(
            batch,
            cast("Route", batch.route),
            self.bell,
            self._report,
            counters,
            self.tracer,
            batch.direction,
            self.driver.now_ns,
        )
        self.batches += 1
        self._flights[batch.id] = flight
        flight.watched = flight.by_layer = any(piece.followers for piece in batch.pieces)
        now = self.driver.now_ns()
        for piece in batch.pieces:
            ride = self.rides.get(piece.request.id)
            if ride is not None:
                ride.fly(flight, piece)
        stream.carry(flight)
        for ride in flight.rides:  # counted while the stream plans already
            if not ride.issued_ns:
                ride.issued_ns = now
                counters.issue(ride.request.nbytes, now - ride.submitted_ns)

    def _settle(self, piece: Piece, state: State) -> None:
        ride = self.rides[piece.request.id]
        if not ride.issued_ns:
            self.counters.of(ride.direction).withdraw()
        for each in (ride, *ride.riders()):
            if not each.settled:
                self._count(each, state, piece.error)

    def _count(self, ride: Ride, state: State, error: BaseException | None) -> None:
        """Settle a request, and count, log and trace how it ended."""
        state = ride.settle(state, error)
        error, counters = ride.error, self.counters.of(ride.direction)
        failed = error if state is State.FAILED else None
        counters.settle(failed=failed, cancelled=state is State.CANCELLED)
        if ride.alarm is not None:
            self.timer.cancel(ride.alarm)
            ride.alarm = None
        self.bell.ring()
        now, tracer = self.driver.now_ns(), self.tracer
        if state is State.FAILED:
            self._failures.warning("%r failed: %r", ride, error)
        elif ride.issued_ns and now - ride.issued_ns > SLOW_NS:
            self._slow.warning("%r took %.1f s", ride, (now - ride.issued_ns) / 1e9)
        if tracer is not None and tracer.active:
            request = ride.request
            tracer.request(
                request.id, request.direction, ride.submitted_ns, ride.issued_ns,
                now, request.nbytes, request.num_pages, state, ride.tags,
            )  # fmt: skip
            if state is not State.DONE:
                what = "cancel" if state is State.CANCELLED else "error"
                self._note(what, error, request=request.id)

    def _note(self, what: str, error: BaseException | None, **args: int) -> None:
        """Mark in the trace that something went otherwise."""
        if self.tracer is not None:
            why = {} if error is None else {"error": type(error).__name__}
            self.tracer.mark(what, **args, **why)

    def _unlock(self, piece: Piece) -> None:
        ride = self.rides.pop(piece.request.id)
        counters = self.counters.of(ride.direction)
        if ride.issued_ns:
            counters.drain(ride.request.nbytes)
        ride.release()
        self.bell.ring()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, []
        for event in changed:
            event.set()

    async def change(self) -> None:
        """Wait until pages were unlocked, a batch ended, or the scheduler broke."""
        event = anyio.Event()
        self._changed.append(event)
        await event.wait()

    def _break(self, error: BaseException) -> None:
        """Our own fault: it is raised to whoever leaves the scheduler."""
        self.fault = self.fault or error
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Settle everything as failed and refuse everything; no page is unlocked any more."""
        self.closing = True
        self.line.refuse()
        for ride in list(self.rides.values()):
            for each in (ride, *ride.riders()):
                if not each.settled:
                    self._count(each, State.FAILED, error)
        self.bell.ring()
        self._notify()

    def _in_flight(self) -> list[OpenRequest]:
        """Return the requests that have not settled, for a trace that is exported now. Any thread."""
        return [
            OpenRequest(
                t.request.id,
                t.direction,
                t.submitted_ns,
                t.issued_ns,
                t.request.nbytes,
                t.request.num_pages,
                t.tags,
            )
            for t in list(self.rides.values())
            if t.verdict() is None
        ]
