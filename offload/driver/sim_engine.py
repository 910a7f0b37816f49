"""One simulated queue: operations in order, fences between them, and tickets for what has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

from offload.driver.base import Event
from offload.driver.sim_clock import Clock
from offload.driver.sim_races import Knowledge, Races, merge
from offload.driver.tickets import Ticket, Watchers


@attrs.define(eq=False)
class SimOp:
    """One thing that takes time on an engine."""

    seconds: float
    begin: Callable[[], None]
    """Called when it reaches the head of the queue and all fences before it are open."""

    end: Callable[[], None]
    """Called when its time is over, before its position counts as passed."""

    after: Callable[[], None]
    """Called when its position has passed."""

    hold: Callable[[Callable[[], None]], None] | None = None
    """Called first with a function that lets it begin; None lets it begin at once."""

    knows: Knowledge = attrs.Factory(dict)
    """What the thread that enqueued it knew."""


class SimTicket(Ticket):
    """A point of a simulated stream. A thread that waits for it makes virtual time pass."""

    __slots__ = ()
    stream: Engine

    def query(self) -> bool:
        """Return whether everything up to here has passed; who hears yes, knows it (race detector)."""
        passed = super().query()
        if passed:
            self.stream.tell(self.position)
        return passed

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when passed; the host knows it from then on (race detector)."""

        def told() -> None:
            self.stream.tell(self.position)
            callback()

        super().watch(told)

    def wait(self, timeout: float | None = None) -> bool:
        """Step the simulator until passed; return whether it has. `timeout` in virtual seconds.

        When nothing is left to happen and there is no timeout, only another thread can change that, and
        this one blocks until it has.
        """
        clock = self.stream.clock
        until = None if timeout is None else clock.now + timeout
        while not self.query():
            if clock.step(until):
                continue
            if until is not None:
                clock.pass_to(until)
                return self.query()
            clock.wait_until(self.query)
        return True


class Engine:
    """A queue of operations and fences, one at a time, in order."""

    def __init__(self, name: str, clock: Clock, races: Races | None) -> None:
        self.name = name
        self.clock = clock
        self.races = races
        self.landed = 0
        self.issued = 0
        self.knows: Knowledge = {}
        self._histories: list[Knowledge] = [{}]  # what position i knew when it had passed
        self._queue: deque[SimOp | Event] = deque()
        self._busy = False
        self._watchers = Watchers(self)

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.landed}/{self.issued} passed>"

    @property
    def pending(self) -> int:
        """How many operations are enqueued and have not passed."""
        return self.issued - self.landed

    def enqueue(self, op: SimOp) -> Event:
        """Put an operation at the end; return its event."""
        self.issued += 1
        event = SimTicket(self, self.issued)
        self._queue.append(op)
        self.clock.after(0.0, self._advance)
        return event

    def wait(self, event: Event) -> None:
        """Order what is enqueued from now on after `event`; the host goes on."""
        self._queue.append(event)
        self.clock.after(0.0, self._advance)

    def record(self) -> Event:
        """Mark this point."""
        return SimTicket(self, self.issued)

    def watch(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once `position` has passed; return a function that takes it back."""
        return self._watchers.add(position, callback)

    def tell(self, position: int) -> None:
        """Let the calling host thread know what `position` knew."""
        if self.races is not None:
            merge(self.races.seen, self.knowledge(position))

    def knowledge(self, position: int) -> Knowledge:
        """Return what `position` knew when it passed."""
        return self._histories[position] if self.races is not None else {}

    def _advance(self) -> None:
        """Go on with the head of the queue, if it may."""
        while self._queue and not self._busy:
            head = self._queue[0]
            if isinstance(head, SimOp):
                self._queue.popleft()
                self._start(head)
            elif not _passed(head):
                _watch(head, lambda: self.clock.after(0.0, self._advance))
                return
            else:
                self._queue.popleft()
                if isinstance(head, SimTicket):
                    merge(self.knows, head.stream.knowledge(head.position))

    def _start(self, op: SimOp) -> None:
        self._busy = True
        if op.hold is None:
            self._begin(op)
        else:
            op.hold(lambda: self.clock.after(0.0, lambda: self._begin(op)))

    def _begin(self, op: SimOp) -> None:
        merge(self.knows, op.knows)
        op.begin()
        self.clock.after(op.seconds, lambda: self._finish(op))

    def _finish(self, op: SimOp) -> None:
        op.end()
        if self.races is not None:
            self._histories.append(dict(self.knows))
        self.landed += 1
        self._busy = False
        op.after()
        self._watchers.notify()
        self._advance()


def _passed(event: Event) -> bool:
    """Ask an event for an engine's sake: no host thread learns from it."""
    return Ticket.query(event) if isinstance(event, SimTicket) else event.query()


def _watch(event: Event, callback: Callable[[], object]) -> None:
    """Watch an event for an engine's sake: no host thread learns from it."""
    if isinstance(event, SimTicket):
        Ticket.watch(event, callback)
    else:
        event.watch(callback)
