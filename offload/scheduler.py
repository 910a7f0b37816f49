"""The async shell: it carries out what the machine decides, and tells the machine what happened.

Everything here runs on the event loop's thread, in short callbacks, except where a method says otherwise.
Three streams of news meet in `_turn`:

* submits, which hand their request to the machine at once and ask for a turn;
* flights that made progress (`_report`, called by the drivers' threads);
* posts from other threads (`post`): submits of `from_thread`, cancels, marks that have landed.

A turn takes all news, then flushes: one batch per direction, and another turn when there is more, so that
a long queue never holds the loop. There is no task that could die; a fault inside a turn settles every
transfer as failed, closes the scheduler and is raised where it is left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, cast

import anyio
import attrs
import numpy as np
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from offload.core.batch import Batch, Limits, Piece, State
from offload.core.kinds import Direction
from offload.core.machine import (
    Cancel,
    Command,
    Ended,
    Event,
    Extend,
    Failed,
    Flush,
    Issue,
    Landed,
    Machine,
    Settle,
    SettleLayer,
    Stop,
    Unblock,
    Unlock,
    Written,
)
from offload.core.pages import PagesLike, as_pages
from offload.counters import Counters
from offload.driver.base import Driver
from offload.errors import RequestError, SchedulerClosedError
from offload.flight import Bell, Flight
from offload.group import PagePair, PoolGroup
from offload.holding import HoldBlock
from offload.loop import Home
from offload.parking import Line
from offload.route import Route
from offload.statistics import DirectionStatistics, Statistics
from offload.submit import After, Desk, Submission
from offload.threadface import ThreadFace
from offload.timer import Timer
from offload.trace import ASYNC_LANE, OpenRequest, Tracer
from offload.trace.forward import ForwardTrace
from offload.transfer import Transfer

_CLOSE_CHUNK = 1024
"""Requests cancelled per turn while closing: about 5 ms of the loop."""


@attrs.define(eq=False, repr=False)
class Scheduler:
    """Moves pages between the pools of a group. Made by `open_scheduler`; belongs to one event loop."""

    group: PoolGroup
    driver: Driver
    limits: Limits
    tracer: Tracer | None
    _desk: Desk
    counters: Counters = attrs.field(factory=Counters)
    bell: Bell = attrs.field(factory=Bell)
    dead: bool = False
    """The loop has ended under us; nothing will settle any more. Read by waiting threads."""

    _machine: Machine = attrs.field(init=False)
    _home: Home = attrs.field(init=False)
    _line: Line = attrs.field(init=False)
    _timer: Timer = attrs.field(init=False)
    _transfers: dict[int, Transfer] = attrs.field(factory=dict)
    _flights: dict[int, Flight] = attrs.field(factory=dict)
    _arrivals: deque[Flight] = attrs.field(factory=deque)
    _inbox: deque[Callable[[], None]] = attrs.field(factory=deque)
    _turn_due: bool = False
    _batches: int = 0
    _closing: bool = False
    _drain: bool = False
    _closed: anyio.Event | None = None
    _changed: list[anyio.Event] = attrs.field(factory=list)
    _fault: BaseException | None = None

    # Life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._take_pools(self)
        self._home = Home()
        tables = tuple(
            (member.host.pages.table, member.device.pages.table) for member in self.group.members
        )
        self._machine = Machine(self.group.num_layers, tables, self.limits)
        self._line = Line(self._fits)
        self._timer = Timer(self.driver, self._home)
        if self.tracer is not None:
            self.tracer.opened(str(self.group.anchor.device.device), self._in_flight)
        return self

    def _take_pools(self, owner: Scheduler | None) -> None:
        """Make the pools' tables ours, or nobody's.

        Raises:
            RequestError: One belongs to a scheduler that is open.
        """
        pools = [pool for member in self.group.members for pool in (member.device, member.host)]
        for pool in pools:
            if owner is not None and pool.pages.table.owner is not None:
                raise RequestError(
                    f"{pool!r} belongs to a scheduler that is open. Close that one first, or give "
                    "each scheduler pools of its own."
                )
        for pool in pools:
            pool.pages.table.owner = owner

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
        if self._fault is not None:
            if error is None:
                raise self._fault
            error.add_note(f"The scheduler failed too: {self._fault!r}")

    async def aclose(self, drain: bool = False, deadline: float | None = None) -> None:
        """Stop intake, cancel what is queued, and wait until nothing moves any more.

        Cannot be interrupted by cancellation: memory must not go away under a copy. Any task of the
        loop, any number of times; a later call waits for the first.

        Args:
            drain: Finish what is queued instead of cancelling it.
            deadline: On the scheduler's clock; what is still queued then is cancelled after all.
        """
        with anyio.CancelScope(shield=True):
            if self._closed is not None:
                await self._closed.wait()
                return
            self._closed = anyio.Event()
            drain = drain or self._drain
            self._closing = True
            self._line.refuse()
            if drain and deadline is not None:
                self._timer.call_at(deadline, self._cancel_queued_soon)
            self._ask_for_turn()
            await checkpoint()
            if not drain:
                await self._cancel_queued()
            else:
                self._cancel_unwritten()
            await self._until_quiet()
            self._timer.close()
            self.driver.close()
            self._take_pools(None)
            self._closed.set()

    def begin_close(self, drain: bool) -> None:
        """Refuse what comes from now on; say what `aclose` does about what is queued."""
        self._closing, self._drain = True, drain
        self._line.refuse()

    async def _cancel_queued(self) -> None:
        """Cancel everything that was not issued, a chunk per turn of the loop."""
        for number, piece in enumerate(self._machine.live()):
            if piece.state is State.QUEUED or piece.stream is not None:
                self._handle(Cancel(piece.request.id))
            if number % _CLOSE_CHUNK == _CLOSE_CHUNK - 1:
                await checkpoint()

    def _cancel_queued_soon(self) -> None:
        for piece in self._machine.live():
            if piece.state is State.QUEUED or piece.stream is not None:
                self._handle(Cancel(piece.request.id))

    def _cancel_unwritten(self) -> None:
        """Cancel streaming backups that wait for a forward: nobody will drain them."""
        for piece in self._machine.live():
            if piece.stream is not None and len(piece.stream.written) < piece.last:
                self._handle(Cancel(piece.request.id))

    async def _until_quiet(self) -> None:
        while self._machine.pending() and self._fault is None:
            await self.driver.quiesce()
            if self._machine.pending() and self._fault is None:
                await self._change()

    # Submit ------------------------------------------------------------------------------------------

    async def load(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a load, host to device; return it once admitted. Parks only for back-pressure.

        Row `i` of `host_pages` goes to row `i` of `device_pages`. Cancelled while parked, nothing was
        submitted. Admitted at once, it does not yield: a loop of awaits makes one batch.

        Args:
            priority: Larger goes first. One step outweighs ten seconds of waiting.
            deadline: On the scheduler's clock, `now()`; not settled by then, it fails.
            after: What must have happened before the first byte moves: `"compute"` is what the compute
                streams have queued by now; or an event, a stream, a sequence of them; `()` is nothing.
            join: Ride on a running load of the same page pairs instead of copying again.
            io_backend: Overrides the scheduler's default.
            members: Pages of the group's members that have their own.

        Raises:
            RequestError: Pages, deadline or `after` are wrong. Nothing was queued.
            UnsupportedPairError: The io backend cannot copy these pools.
            SchedulerClosedError: It is closed.
            TimeoutError: The deadline passed while it was parked.
        """
        self._home.check("load")
        submission = self._desk.submission(
            Direction.LOAD, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, join=join,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return await self._submit(submission)

    async def backup(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a backup, device to host; return it once admitted. As `load`, and:

        Args:
            streaming: Copy each layer when `Transfer.layer_written` says that the forward has written it.
        """
        self._home.check("backup")
        submission = self._desk.submission(
            Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return await self._submit(submission)

    def load_nowait(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit as `load` does; raise `anyio.WouldBlock` where that would park."""
        self._home.check("load_nowait")
        submission = self._desk.submission(
            Direction.LOAD, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, join=join,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return self.submit_nowait(submission)

    def backup_nowait(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit as `backup` does; raise `anyio.WouldBlock` where that would park."""
        self._home.check("backup_nowait")
        submission = self._desk.submission(
            Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return self.submit_nowait(submission)

    async def _submit(self, submission: Submission) -> Transfer:
        await checkpoint_if_cancelled()
        self.refuse_closed()
        if self._line.open_for(submission.priority, submission.nbytes):
            return self.admit(submission)
        if submission.hold is not None:
            self.let_go(submission.hold.pieces)
        woken = anyio.Event()
        place = self._line.enter(submission.priority, submission.nbytes, woken)
        if submission.deadline is not None:
            self._timer.call_at(submission.deadline, place.expire)
        try:
            while True:
                await woken.wait()
                self.refuse_closed()
                if place.expired:
                    raise TimeoutError(
                        f"the deadline of a {submission.direction} passed while it waited for room; "
                        "nothing was submitted"
                    )
                if self._line.may_go(place):
                    return self.admit(submission)
                place.event = woken = anyio.Event()
        finally:
            self._line.leave(place)

    def submit_nowait(self, submission: Submission) -> Transfer:
        """Admit a submission, or raise `anyio.WouldBlock` where it would have to wait for room."""
        self.refuse_closed()
        if not self._line.open_for(submission.priority, submission.nbytes):
            raise anyio.WouldBlock
        return self.admit(submission)

    def admit(self, submission: Submission) -> Transfer:
        """Give a submission its place in the order. On the loop's thread."""
        self._take_inbox()
        if submission.join and (rider := self._join(submission)) is not None:
            return rider
        request = submission.request(self._machine.new_id())
        transfer = Transfer(
            self, request, submission.submitted_ns, submission.tags, submission.after
        )
        counters = self.counters.of(request.direction)
        if not request.num_pages:
            counters.admit()
            counters.withdraw()
            transfer.settle(State.DONE, None, None)
            counters.settle()
            transfer.release()
            return transfer
        if request.streaming:
            transfer.stream()
        self._handle(request)
        self._transfers[request.id] = transfer
        counters.admit()
        self._gate(request.id, submission)
        if submission.deadline is not None:
            self._timer.call_at(submission.deadline, lambda: self._expire(request.id))
        self._ask_for_turn()
        return transfer

    def _gate(self, piece: int, submission: Submission) -> None:
        if submission.hold is not None and not submission.streaming:
            submission.hold.pieces.append(piece)
        for mark in submission.marks:
            mark.watch(lambda: self.post(lambda: self._handle(Unblock(piece))))

    def _join(self, submission: Submission) -> Transfer | None:
        """Ride on a running load of the same pairs that nothing has come between."""
        for lead in self._transfers.values():
            if _same_copy(lead, submission) and self._machine.undisturbed(lead.request):
                rider = Transfer(
                    self, lead.request, submission.submitted_ns, submission.tags, submission.after
                )
                lead.take(rider)
                counters = self.counters.of(lead.direction)
                counters.admit()
                counters.withdraw()
                return rider
        return None

    def refuse_closed(self) -> None:
        """Raise if it is closed, or closing."""
        if self._closing:
            raise SchedulerClosedError

    def _fits(self, nbytes: int) -> bool:
        most, queued = self.limits.max_queued_bytes, self._machine.queued_bytes
        return most is None or not queued or queued + nbytes <= most

    def _expire(self, request: int) -> None:
        error = TimeoutError("its deadline passed before it had settled")
        self._handle(Cancel(request, error))
        self._ask_for_turn()

    # Acts of a transfer, from any thread -------------------------------------------------------------

    def cancel(self, transfer: Transfer) -> None:
        """Cancel a transfer; see `Transfer.cancel`."""
        if transfer.done:
            return
        if not self._home.here:
            self.post(lambda: self.cancel(transfer))
            return
        self._take_inbox()
        if transfer.done:
            return
        if transfer.leave():  # others still want the copy
            transfer.settle(State.CANCELLED, None, None)
            self._count(transfer, State.CANCELLED, None)
        else:
            self._handle(Cancel(transfer.request.id))
        self._ask_for_turn()

    def layer_written(self, transfer: Transfer, layer: int) -> None:
        """See `Transfer.layer_written`."""
        marks = self._desk.marks("compute")
        transfer.write(layer)

        def written() -> None:
            piece = self._machine.new_id()
            self._handle(Written(transfer.request.id, layer, piece, len(marks)))
            for mark in marks:
                mark.watch(lambda: self.post(lambda: self._handle(Unblock(piece))))

        self.post(written)

    def hold(self) -> AbstractContextManager[None]:
        """Keep back what this thread submits until the block ends; then it is one batch."""
        return HoldBlock(self._desk, self.let_go)

    def let_go(self, pieces: list[int]) -> None:
        """Unblock held pieces. Any thread; in order after what that thread has posted."""
        held, pieces[:] = pieces[:], []

        def go() -> None:
            for piece in held:
                self._handle(Unblock(piece))

        if held:
            self.post(go)

    def check_may_block(self, what: str) -> None:
        """Raise if blocking this thread would stop the loop that has to end the wait."""
        if self._home.here and not self.dead:
            raise RequestError(
                f"this is the scheduler's own loop thread, and to {what} here would stop the loop. "
                "Await instead (issued, layer, or the transfer itself), or wait in a worker thread."
            )

    def note_wait(
        self, transfer: Transfer, layer: int, start_ns: int, forward: ForwardTrace | None
    ) -> None:
        """Count a wait for a layer; `start_ns` is 0 when it did not have to wait. Any thread."""
        counters, tracer = self.counters.of(transfer.direction), self.tracer
        if not start_ns:
            counters.ready()
            if tracer is not None and tracer.active:
                tracer.ready()
            return
        end = time.perf_counter_ns()
        counters.waited(end - start_ns)
        if forward is not None:
            forward.waited(transfer.request.id, layer, start_ns)
        elif tracer is not None and tracer.active:
            tracer.wait(transfer.request.id, transfer.direction, layer, start_ns, end, ASYNC_LANE)

    # Questions ---------------------------------------------------------------------------------------

    @property
    def from_thread(self) -> ThreadFace:
        """The blocking face, for any thread but the loop's."""
        return ThreadFace(self)

    @property
    def desk(self) -> Desk:
        """Where submissions are made."""
        return self._desk

    @property
    def line(self) -> Line:
        """Where submissions wait for room."""
        return self._line

    def now(self) -> float:
        """Return the time in seconds on the clock of deadlines."""
        return self.driver.now()

    def busy(self, *, device_pages: PagesLike = (), host_pages: PagesLike = ()) -> bool:
        """Return whether any of these pages of the anchor's pools may still be read or written."""
        self._take_inbox()
        return self.claimed(device_pages, host_pages)

    def claimed(self, device_pages: PagesLike, host_pages: PagesLike) -> bool:
        """Return what `busy` does, without what other threads have posted. Any thread."""
        anchor = self.group.anchor
        device = as_pages(device_pages, anchor.device.num_pages, what="device page")
        host = as_pages(host_pages, anchor.host.num_pages, what="host page")
        return anchor.device.pages.table.busy(device) or anchor.host.pages.table.busy(host)

    def call_at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` when the clock of deadlines passes `when`."""
        self._timer.call_at(when, act)

    async def idle(self, *, device_pages: PagesLike = (), host_pages: PagesLike = ()) -> None:
        """Wait until these pages are free of traffic, whatever became of the transfers."""
        await checkpoint()
        while self.busy(device_pages=device_pages, host_pages=host_pages):
            await self._change()

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        machine = self._machine
        return Statistics(
            load=DirectionStatistics.of(self.counters.load),
            backup=DirectionStatistics.of(self.counters.backup),
            queued_requests=machine.queued_requests,
            queued_bytes=machine.queued_bytes,
            inflight_requests=machine.inflight_requests,
            inflight_bytes=machine.inflight_bytes,
            parked=len(self._line),
            batches=self._batches,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._transfers)} transfers"
        return f"<Scheduler {self.group!r} on {self.driver.name}, {state}>"

    # Turns ---------------------------------------------------------------------------------------------

    def post(self, act: Callable[[], None]) -> bool:
        """Do `act` on the loop's thread, in order with other posts. Any thread."""
        self._inbox.append(act)
        return self._ask_for_turn()

    def _report(self, flight: Flight) -> None:
        """Take note that a flight has news. Any thread; the flag is read before the news is."""
        if not flight.reported:
            flight.reported = True
            self._arrivals.append(flight)
            self._ask_for_turn()

    def _ask_for_turn(self) -> bool:
        if not self._turn_due:
            self._turn_due = True
            if not self._home.post(self._turn):
                self.dead = True
                self.bell.ring()
                return False
        return True

    def _turn(self) -> None:
        self._turn_due = False
        tracer = self.tracer
        start = time.perf_counter_ns() if tracer is not None and tracer.active else 0
        try:
            self._take_inbox()
            while self._arrivals:
                self._absorb(self._arrivals.popleft())
            self._handle(Flush())
            if self._machine.flushable():
                self._ask_for_turn()
            self._line.wake()
        except BaseException as error:  # noqa: BLE001 - raised where the scheduler is left
            self._break(error)
        if tracer is not None and start:
            tracer.tick(start, time.perf_counter_ns())

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _absorb(self, flight: Flight) -> None:
        """Tell the machine what a flight has published since the last time."""
        flight.reported = False
        over, error, landed = flight.over, flight.error, flight.landed_layers
        batch = flight.batch
        if flight.watched:
            for transfer in flight.transfers:
                transfer.wake(flight.issued_layers)
        if landed > batch.landed:
            self._handle(Landed(batch.id, landed))
        if error is not None and not batch.failed:
            self._handle(Failed(batch.id, error))
        if over and batch.id in self._flights:
            del self._flights[batch.id]
            self._handle(Ended(batch.id))
            self._notify()  # its pages may have been unlocked before: closing waits for batches too

    def _handle(self, event: Event) -> None:
        for command in self._machine.handle(event):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case SettleLayer(batch):
                flight = self._flights[batch.id]
                for transfer in flight.transfers:
                    if transfer.watched:
                        transfer.wake(batch.landed)
            case Issue(batch):
                self._issue(batch)
            case Settle(piece, state):
                self._settle(piece, state)
            case Unlock(piece):
                self._unlock(piece)
            case Extend(batch):
                self._flights[batch.id].limit = batch.limit
                self.driver.stream(batch.direction).kick()
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
        )
        self._batches += 1
        self._flights[batch.id] = flight
        now = time.perf_counter_ns()
        for piece in batch.pieces:
            transfer = self._transfers.get(piece.request.id)
            if transfer is None:
                continue
            transfer.fly(flight, piece)
            if not transfer.issued_ns:
                transfer.issued_ns = now
                counters.issue(transfer.nbytes, now - transfer.submitted_ns)
        stream.carry(flight)

    def _settle(self, piece: Piece, state: State) -> None:
        transfer = self._transfers[piece.request.id]
        flight = self._flights.get(piece.batch.id) if piece.batch is not None else None
        layer = flight.error_layer if flight is not None and flight.error is not None else None
        if not transfer.issued_ns:
            self.counters.of(transfer.direction).withdraw()
        for each in (transfer, *transfer.riders()):
            if not each.settled:
                each.settle(state, piece.error, layer)
                self._count(each, state, piece.error)

    def _count(self, transfer: Transfer, state: State, error: BaseException | None) -> None:
        counters = self.counters.of(transfer.direction)
        counters.settle(failed=error, cancelled=state is State.CANCELLED)
        self.bell.ring()
        tracer = self.tracer
        if tracer is not None and tracer.active:
            request = transfer.request
            tracer.request(
                request.id, request.direction, transfer.submitted_ns, transfer.issued_ns,
                time.perf_counter_ns(), request.nbytes, request.num_pages, state, transfer.tags,
            )  # fmt: skip

    def _unlock(self, piece: Piece) -> None:
        transfer = self._transfers.pop(piece.request.id)
        counters = self.counters.of(transfer.direction)
        if transfer.issued_ns:
            counters.drain(transfer.nbytes)
        transfer.release()
        self.bell.ring()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, []
        for event in changed:
            event.set()

    async def _change(self) -> None:
        """Wait until pages were unlocked, a batch ended, or the scheduler broke."""
        event = anyio.Event()
        self._changed.append(event)
        await event.wait()

    def _break(self, error: BaseException) -> None:
        """Our own fault: settle everything, refuse everything, and keep the error for whoever leaves."""
        self._fault = self._fault or error
        self._closing = True
        self._line.refuse()
        for transfer in list(self._transfers.values()):
            for each in (transfer, *transfer.riders()):
                each.settle(State.FAILED, error, None)
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
                t.nbytes,
                t.request.num_pages,
                t.tags,
            )
            for t in list(self._transfers.values())
            if not t.done
        ]


def _same_copy(lead: Transfer, submission: Submission) -> bool:
    """Return whether a running load moves just these pages, in the same order with compute."""
    request = lead.request
    if lead.settled or request.direction is not Direction.LOAD or lead.after != submission.after:
        return False
    if request.route is not submission.route or len(request.parts) != len(submission.parts):
        return False
    return all(
        np.array_equal(mine.host_pages, theirs.host_pages)
        and np.array_equal(mine.device_pages, theirs.device_pages)
        for mine, theirs in zip(request.parts, submission.parts, strict=True)
    )
