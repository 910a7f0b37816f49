"""Simulated streams: copy streams that carry flights, and the compute stream of a thread."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import attrs

from offload.core.runlist import Runlist
from offload.driver.base import Access, Event, Flight, Work
from offload.driver.hooks import Gate, Hooks, Order
from offload.driver.sim_engine import Engine, SimOp
from offload.driver.sim_races import Knowledge, merge
from offload.errors import RequestError


@attrs.frozen
class Link:
    """How long a copy takes: `latency + nbytes / bandwidth`, times up to `1 + jitter`."""

    bandwidth: float
    """Bytes per second."""

    latency: float
    """Seconds per layer copy."""

    jitter: float
    """Greatest fraction by which a copy takes longer; drawn evenly from the seed."""

    rng: random.Random

    def seconds(self, nbytes: int) -> float:
        """Return how long this copy takes."""
        exact = self.latency + nbytes / self.bandwidth
        return exact * (1.0 + self.rng.uniform(0.0, self.jitter)) if self.jitter else exact


@attrs.define(eq=False)
class Trip:
    """A flight on a simulated stream."""

    flight: Flight
    knows: Knowledge
    flying: int = 0
    """Layers enqueued that have not passed."""

    landed: int = 0
    broken: bool = False
    ended: bool = False


class SimStream:
    """A stream that copies on the virtual clock. Nothing happens outside a step of the clock."""

    def __init__(self, engine: Engine, link: Link, hooks: Hooks | None, ahead: int) -> None:
        self.name = engine.name
        self.engine = engine
        self.trips: list[Trip] = []
        """Flights taken and not ended, in the order in which they came."""
        self._link = link
        self._hooks = hooks
        self._ahead = ahead
        self._runlist: Runlist[Flight] = Runlist()
        self._inbox: deque[Trip] = deque()
        self._left: list[Trip] = []
        self._looking = False

    def __repr__(self) -> str:
        return f"<SimStream {self.name} {self.engine.landed}/{self.engine.issued} layers landed>"

    def carry(self, flight: Flight) -> None:
        """Take a flight. Any thread; returns at once."""
        trip = Trip(flight, dict(self._seen()))
        self.trips.append(trip)
        self._inbox.append(trip)
        self.kick()

    def kick(self) -> None:
        """Look again, in a step of its own and in no virtual time. Any thread."""
        if not self._looking:
            self._looking = True
            self.engine.clock.after(0.0, self._look)

    def wait(self, event: Event) -> None:
        """Order what is enqueued from now on after `event`; the host goes on."""
        self.engine.wait(event)

    def record(self) -> Event:
        """Mark this point."""
        return self.engine.record()

    # ---- in a step --------------------------------------------------------------------------------

    def _seen(self) -> Knowledge:
        return self.engine.races.seen if self.engine.races is not None else {}

    def _look(self) -> None:
        """Prepare what came, enqueue what may go, end what is over."""
        self._looking = False
        while self._inbox:
            self._prepare(self._inbox.popleft())
        while self.engine.pending < self._ahead and (picked := self._pick()) is not None:
            self._issue(self._trip(picked[0]), picked[1], cast("Work", picked[2]))
        self._runlist.sweep()
        self._left += [self._trip(flight) for flight in self._runlist.reap()]
        for trip in self._left[:]:
            self._end(trip)

    def _prepare(self, trip: Trip) -> None:
        try:
            if not trip.flight.stopped:
                trip.flight.prepare()
        except BaseException as error:  # noqa: BLE001 - it is the flight's, not the simulator's
            self._fail(trip, 0, error)
            self._left.append(trip)
        else:
            self._runlist.add(trip.flight)

    def _pick(self) -> tuple[Flight, int, object] | None:
        while True:
            try:
                return self._runlist.pick()
            except BaseException as error:  # noqa: BLE001 - it is the flight's, not the simulator's
                flight = self._runlist.asked
                assert flight is not None
                self._fail(self._trip(flight), 0, error)

    def _trip(self, flight: Flight) -> Trip:
        return next(trip for trip in self.trips if trip.flight is flight)

    def _issue(self, trip: Trip, layer: int, work: Work) -> None:
        copy = Copy(self, trip, layer, work)
        op = SimOp(
            self._link.seconds(work.nbytes),
            begin=copy.begin,
            end=copy.end,
            after=copy.land,
            hold=copy.hold if self._hooks is not None else None,
            knows=trip.knows | {},
        )
        merge(op.knows, self._seen())
        copy.op = op
        trip.flying += 1
        began_ns = round(self.engine.clock.now * 1e9)
        trip.flight.issued(layer, self.engine.enqueue(op), began_ns)

    def _fail(self, trip: Trip, layer: int, error: BaseException) -> None:
        self._runlist.drop(trip.flight)
        if not trip.broken:
            trip.broken = True
            trip.flight.failed(layer, error)

    def _end(self, trip: Trip) -> None:
        if trip.flying == 0:
            self._left.remove(trip)
            self.trips.remove(trip)
            trip.ended = True
            trip.flight.ended()


@attrs.define(eq=False)
class Copy:
    """One layer of a flight on the engine."""

    stream: SimStream
    trip: Trip
    layer: int
    work: Work
    op: SimOp | None = None
    order: Order | None = None
    error: BaseException | None = None
    began: float = 0.0

    def hold(self, go: Callable[[], None]) -> None:
        """Ask the hooks; go when every gate is open."""
        hooks, op = self.stream._hooks, self.op
        assert hooks is not None
        assert op is not None
        self.order = hooks.begin(self.stream.name, self.trip.flight, self.layer)
        op.seconds += self.order.delay
        _through(list(self.order.gates), go)

    def begin(self) -> None:
        """The copy starts: its destination is poison until it ends."""
        engine = self.stream.engine
        self.began = engine.clock.now
        if engine.races is not None:
            what = f"{self.stream.name} layer {self.layer} of {self.trip.flight!r}"
            engine.races.access(
                engine.name, what, engine.knows, self.work.accesses(), engine.clock.now
            )
        self._try(self.work.poison)

    def end(self) -> None:
        """The bytes land, all at once; or the copy fails, and the flight hears it first."""
        order = self.order
        if order is None or order.error is None or order.torn:
            self._try(self.work)
        if order is not None and order.error is not None:
            self.error = self.error or order.error
        if order is not None and self.stream._hooks is not None:
            self.stream._hooks.end(order.op, self.error)
        if self.error is not None:
            self.stream._fail(self.trip, self.layer, self.error)

    def land(self) -> None:
        """Tell the flight, and look for more."""
        trip, stream = self.trip, self.stream
        trip.flying -= 1
        if self.error is None and not trip.broken:
            trip.landed += 1
            stamps = self.began, stream.engine.clock.now
            trip.flight.landed(self.layer, *(round(stamp * 1e9) for stamp in stamps))
        stream.engine.tell(stream.engine.landed)
        stream.kick()

    def _try(self, do: Callable[[], None]) -> None:
        try:
            if self.error is None:
                do()
        except BaseException as error:  # noqa: BLE001 - it is the flight's, not the simulator's
            self.error = error


def _through(gates: list[Gate], go: Callable[[], None]) -> None:
    """Pass one gate after the other, then go."""
    if not gates:
        go()
        return
    gates[0].arrive()
    gates[0].watch(lambda: _through(gates[1:], go))


class SimCompute:
    """The compute stream of one thread: what a test puts on it takes virtual time."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.engine = engine

    def __repr__(self) -> str:
        return f"<SimCompute {self.name} {self.engine.landed}/{self.engine.issued} ended>"

    def carry(self, flight: Flight) -> None:
        """Refuse: a compute stream carries no flights."""
        raise RequestError(
            "the compute stream carries no flights; use stream('load') or ('backup')"
        )

    def kick(self) -> None:
        """Do nothing: nothing waits here."""

    def wait(self, event: Event) -> None:
        """Order what is enqueued from now on after `event`; the host goes on."""
        self.engine.wait(event)

    def record(self) -> Event:
        """Mark this point."""
        return self.engine.record()

    def compute(
        self,
        seconds: float,
        work: Callable[[], None] | None,
        accesses: Sequence[Access],
        knows: Knowledge,
    ) -> Event:
        """Enqueue work that takes `seconds`; it runs when they are over. Return its event."""
        engine = self.engine

        def begin() -> None:
            if engine.races is not None:
                what = f"compute {engine.landed + 1}"
                engine.races.access(engine.name, what, engine.knows, accesses, engine.clock.now)

        def end() -> None:
            if work is not None:
                work()

        return engine.enqueue(SimOp(seconds, begin, end, _nothing, knows=knows))


def _nothing() -> None:
    """After compute nobody is told: who wants to know asks the event."""
