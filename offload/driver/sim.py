"""A driver on a virtual clock: every order can be forced, and every run repeats.

Theory of operation
-------------------
One clock, and one engine per stream: a queue of operations that take virtual time, and of fences. Nothing
runs by itself. Whoever advances time runs it all, on its own thread: planning, issuing, copying, the
flight's callbacks. Between two happenings every task of the loop runs until it waits, so tasks and copies
interleave as they would, and always in the same way.

* A copy takes `latency + nbytes / bandwidth`. Its destination is poisoned when it begins, and the bytes are
  there when it ends, so who reads too early reads poison. The source is read at the end too: who
  overwrites it too early is found out as well.
* Preparing and issuing take no virtual time, but happen in a step, never in the frame of the caller.
* `ahead` layers may be enqueued on a stream and not landed. With 1, the default, an urgent flight overtakes
  at every layer boundary; more is how a GPU looks, where a forward launches far ahead of the copies.
* Every thread has a compute stream of its own, on which `compute` puts work; `fence` orders it.
* An event's `wait` makes time pass, by itself, without running tasks; its timeout is virtual.

`detect_races=True` keeps vector clocks (`sim_races.py`): `run_until_idle` then raises `RaceError`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence

import anyio

from offload.driver import foreign
from offload.driver.base import Access, Event, Stream
from offload.driver.hooks import Hooks
from offload.driver.loops import poster
from offload.driver.sim_clock import Clock, settle
from offload.driver.sim_engine import Engine
from offload.driver.sim_races import Knowledge, Race, RaceError, Races, Span, merge
from offload.driver.sim_stream import Link, SimCompute, SimStream, Trip
from offload.errors import RequestError

Pages = tuple[object, int, Sequence[int]]
"""Pages that simulated compute touches: `(pool, the pool's own layer, page ids)`."""


class SimDriver:
    """Streams on a virtual clock.

    Args:
        seed: Of the jitter.
        bandwidth: Bytes per second of every stream, or of each by name.
        latency: Seconds that a layer copy takes besides, the same way.
        jitter: Greatest fraction by which a copy takes longer.
        ahead: Layers that a stream may have enqueued and not landed.
        hooks: Called around every layer copy.
        detect_races: Whether accesses are checked against each other.
    """

    name = "sim"
    fences = True
    lost = None
    closed = False
    """Never: there are no threads, and its clock may go on under another scheduler."""

    def __init__(
        self,
        seed: int = 0,
        *,
        bandwidth: float | Mapping[str, float] = 16e9,
        latency: float | Mapping[str, float] = 10e-6,
        jitter: float = 0.0,
        ahead: int = 1,
        hooks: Hooks | None = None,
        detect_races: bool = False,
    ) -> None:
        self.seed = seed
        self.clock = Clock()
        self._bandwidth, self._latency, self._jitter = bandwidth, latency, jitter
        self._ahead = ahead
        self._hooks = hooks
        self._races = Races() if detect_races else None
        self._streams: dict[str, SimStream] = {}
        self._computes: dict[int, SimCompute] = {}
        self._hosts: dict[int, Knowledge] = {}

    def __repr__(self) -> str:
        return f"<SimDriver seed {self.seed}, {self.now() * 1e6:.1f} us>"

    # ---- a driver ---------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, made on first use."""
        if name not in self._streams:
            link = Link(
                _of(self._bandwidth, name),
                _of(self._latency, name),
                self._jitter,
                random.Random(f"{self.seed} {name}"),
            )
            engine = Engine(name, self.clock, self._races)
            self._streams[name] = SimStream(engine, link, self._hooks, self._ahead)
        return self._streams[name]

    def compute_stream(self) -> Stream:
        """Return the calling thread's compute stream."""
        return self._compute()

    def marks(self) -> tuple[Event, ...]:
        """Record the calling thread's compute stream; empty when nothing is pending there."""
        compute = self._compute()
        self._publish()
        if compute.engine.pending:
            return (compute.record(),)
        compute.engine.tell(compute.engine.landed)
        return ()

    def events(self, after: object) -> tuple[Event, ...]:
        """Return events for what a caller passed as `after=`."""
        return foreign.events(after)

    def capturing(self) -> bool:
        """Return False: there are no graphs here."""
        return False

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now

    def now_ns(self) -> int:
        """Return the virtual time in nanoseconds."""
        return round(self.clock.now * 1e9)

    @property
    def alarm(self) -> Callable[[float, Callable[[], None]], Callable[[], None]]:
        """How to be called back when virtual time has passed; this alone makes no time pass."""
        return self._set_alarm

    def _set_alarm(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        post, wanted = poster(), [True]
        self.clock.alarm(self.now() + seconds, lambda: wanted[0] and post(callback))

        def cancel() -> None:
            wanted[0] = False

        return cancel

    async def quiesce(self) -> None:
        """Run until nothing is left to happen."""
        await settle()
        while self.clock.step():
            await settle()

    def close(self) -> None:
        """Do nothing: there are no threads."""

    # ---- time -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let the next thing happen, without running any task; return whether there was one."""
        return self.clock.step()

    async def sleep_until(self, when: float) -> None:
        """Suspend this task until virtual time has passed `when`; this alone makes no time pass."""
        if when > self.now():
            rung = anyio.Event()
            cancel = self._set_alarm(when - self.now(), rung.set)
            try:
                await rung.wait()
            finally:
                cancel()

    async def run_until_idle(self) -> None:
        """Run tasks and copies until all tasks wait and nothing is left to happen.

        Sleeping tasks are woken when time passes them, but only copies and compute make it pass.

        Raises:
            RaceError: Races are detected, and there were some. Each is raised once.
        """
        await settle()
        while self.clock.step():
            await settle()
        self.raise_races()

    async def advance(self, seconds: float) -> None:
        """Run tasks and copies for so long, and end exactly then."""
        until = self.now() + seconds
        await settle()
        while self.clock.step(until):
            await settle()
        self.clock.pass_to(until)

    async def advance_to_layer(self, layers: int) -> None:
        """Run until a flight has landed so many layers: one in the air now, or the next to be.

        Raises:
            RuntimeError: Nothing is left to happen, and no flight has come so far.
        """
        await settle()
        trips = self._trips()
        while not any(trip.landed >= layers for trip in trips):
            if not self.clock.step():
                raise RuntimeError(
                    f"the simulator is idle, and no flight has landed {layers} layers"
                )
            await settle()
            trips += [trip for trip in self._trips() if trip not in trips]

    def _trips(self) -> list[Trip]:
        return [trip for stream in self._streams.values() for trip in stream.trips]

    # ---- compute and races ------------------------------------------------------------------------

    def compute(
        self,
        seconds: float,
        work: Callable[[], None] | None = None,
        *,
        reads: Sequence[Pages] = (),
        writes: Sequence[Pages] = (),
    ) -> Event:
        """Enqueue work on the calling thread's compute stream; return its event.

        Args:
            seconds: How long it takes, in virtual time.
            work: Called when its time is over: what it reads and writes, it does then.
            reads: What it reads, for the race detector, from its beginning.
            writes: What it writes, likewise.
        """
        knows = dict(self._host()) if self._races is not None else {}
        return self._compute().compute(seconds, work, _spans(reads, writes), knows)

    def touch(self, *, reads: Sequence[Pages] = (), writes: Sequence[Pages] = ()) -> None:
        """Say that the calling thread reads or writes pages right now, itself."""
        if self._races is not None:
            host = threading.current_thread().name
            spans = _spans(reads, writes)
            self._races.access(f"thread {host}", "the host", self._host(), spans, self.now())
            self._publish()

    @property
    def races(self) -> tuple[Race, ...]:
        """Races found and not raised yet."""
        return tuple(self._races.found) if self._races is not None else ()

    def raise_races(self) -> None:
        """Raise what was found since the last call, if anything was."""
        if self._races is not None and self._races.found:
            found, self._races.found = self._races.found, []
            raise RaceError(found)

    def _compute(self) -> SimCompute:
        ident = threading.get_ident()
        if ident not in self._computes:
            name = f"compute of {threading.current_thread().name}"
            self._computes[ident] = SimCompute(Engine(name, self.clock, self._races))
        return self._computes[ident]

    def _host(self) -> Knowledge:
        """Return what the calling thread knows: its own doings, and what every host thread was told."""
        host = self._hosts.setdefault(threading.get_ident(), {})
        if self._races is not None:
            merge(host, self._races.seen)
        return host

    def _publish(self) -> None:
        """A thread that submits hands on what it knows."""
        if self._races is not None:
            merge(self._races.seen, self._host())


def _of(value: float | Mapping[str, float], name: str) -> float:
    """Return the value of one stream."""
    if not isinstance(value, Mapping):
        return value
    if name not in value:
        raise RequestError(
            f"the simulator has no figure for stream {name!r}: only for {sorted(value)}"
        )
    return value[name]


def _spans(reads: Sequence[Pages], writes: Sequence[Pages]) -> list[Access]:
    found: list[Access] = [Span(*pages, write=False) for pages in reads]
    return found + [Span(*pages, write=True) for pages in writes]
