"""What the scheduler keeps of a request under way: which flights carry it, how far it is, how it ended.

Theory of operation
-------------------
Threads never ask the loop whether something has landed: they read the counts that flights publish. What the
loop adds is the outcome, and any thread may add it that cancels: so it is decided once, by whoever comes
first, in `decide`. Two rules make reading it safe without a lock:

* Who decides says so first (`_deciding`), then reads the counts, then writes the outcome.
* Who reads looks at the counts first, and then whether somebody decides, or has decided.

So a reader that found no outcome has seen nothing that the decision will not see too: what somebody was told
has landed stays landed, whatever becomes of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from offload.core.batch import Piece, State
from offload.core.kinds import Direction
from offload.core.request import Request
from offload.counters import DirectionCounters
from offload.driver.base import Event
from offload.driver.loops import Signal
from offload.errors import RequestError, TransferCancelled, TransferFailed, left_behind
from offload.flight import Flight
from offload.holding import Hold

if TYPE_CHECKING:
    from offload.shell import Shell
    from offload.timer import Alarm

SETTLED = -1
RELEASED = -2
"""What a task may wait for besides a layer: the outcome, or that the pages are free of traffic."""


@attrs.define(eq=False, repr=False)
class Entry:
    """One request under way, or one that shares another's copies."""

    shell: Shell
    request: Request
    counters: DirectionCounters
    submitted_ns: int
    priority: float
    join: bool
    """Whether it may share another's copies."""

    after: object
    """As it was submitted."""

    marks: tuple[Event, ...]
    """What compute had queued at submit, and had not done."""

    hold: Hold | None
    """What keeps it back, until that block ends."""

    tags: Mapping[str, str | int | float | bool | None] | None

    issued_ns: int = 0
    alarm: Alarm | None = None
    """Set for its deadline, until it settles."""

    settled: bool = False
    """Whether the loop has taken note of the outcome, and counted it."""

    released: bool = False
    """Whether its pages are free of traffic."""

    watched: bool = False
    """Whether a task has waited for a layer of it, or another one shares it: the loop then hears of layers."""

    error: BaseException | None = None
    """What it failed from, or why it was cancelled where that is known, once that is decided."""

    _flight: Flight | None = None
    """The flight that carries it; of a streaming backup, the latest."""

    _layers: dict[int, Flight] | None = None
    """Of a streaming backup, the flight of each layer."""

    _written: dict[int, object] | None = None
    """Of a streaming backup, the layers that were written."""

    _deciding: bool = False
    _outcome: State | None = None
    _error_layer: int | None = None
    _unprepared: bool = False
    """Whether it failed while its flight was prepared."""

    _moved: bool = False
    """Whether a flight that was repeated had moved any of it."""

    _kept: frozenset[int] | int = 0
    """Layers that had landed when it failed or was cancelled."""

    _by_layer: bool = False
    """Whether somebody has waited for a single layer of it."""

    _waiters: dict[Signal, int] | None = None
    """What tasks wait for, by what wakes them. Made for the first: most are never waited for while queued."""

    joined: list[Entry] | None = None
    """Those that share this one's copies."""

    _lead: Entry | None = None
    """The one whose copies this one shares."""

    @property
    def direction(self) -> Direction:
        """Load or backup."""
        return self.request.direction

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.shell.group.num_layers

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.request.direction} {self.request.id}"

    @property
    def state(self) -> State:
        """See `Transfer.state`."""
        verdict = self.verdict()
        if verdict is State.FAILED or verdict is State.CANCELLED:
            return verdict if self.released else State.DRAINING
        if verdict is not None:
            return verdict
        return State.QUEUED if (self._lead or self)._flight is None else State.ISSUED

    def __repr__(self) -> str:
        landed = sum(map(self.landed, range(self.num_layers)))
        count = f"{landed}/{self.num_layers} layers"
        return f"<Transfer {self.request.id} {self.direction} {count}, {self.state}>"

    # How far it is: any thread -------------------------------------------------------------------

    def flight_of(self, layer: int) -> Flight | None:
        """Return the flight that carries a layer, if it has one already."""
        lead = self._lead or self
        return lead._flight if lead._layers is None else lead._layers.get(layer)

    def landed(self, layer: int) -> bool:
        """Return whether a layer has landed, or had when the request failed or was cancelled."""
        if layer in self.shell.group.holes:
            return True
        flight = self.flight_of(layer)
        landed = flight is not None and flight.landed_layers > layer  # before the outcome is read
        outcome = self._decided()
        if outcome is None:
            return landed
        if outcome is State.DONE:
            return True
        kept = self._kept
        return layer in kept if isinstance(kept, frozenset) else layer < kept

    def issued(self, layer: int) -> bool:
        """Return whether a layer is on its stream, or beyond."""
        flight = self.flight_of(layer)
        if flight is not None and flight.issued_layers > layer and flight.error is None:
            return True
        return self.landed(layer)

    def verdict(self) -> State | None:
        """Return how it ended, done, failed or cancelled, as soon as any thread saw it; None before."""
        outcome = self._outcome
        if outcome is None and (
            self._flight is not None or self._deciding or self._lead is not None
        ):
            landed, failed = self._all_landed(), self._failure() is not None
            outcome = self._decided()
            if outcome is None and (landed or failed):
                return State.DONE if landed else State.FAILED
        return outcome

    def quiet(self) -> bool:
        """Return whether it failed or was cancelled; or it is done and its pages are free of traffic.

        Threads see the last layer land before the loop gives the pages back. Who is told `done` may
        free them and must find them free; unless the scheduler has broken, and never gives them back.
        """
        verdict = self.verdict()
        if verdict is State.DONE:
            return self.released or self.shell.stuck is not None
        return verdict is not None

    def over(self) -> bool:
        """Return whether it failed or was cancelled, or is settled: then no further layer will land."""
        return self._decided() is not None or self._failure() is not None

    def copying(self) -> bool:
        """Return whether its copies are under way, for whomever, and no end of them has been seen."""
        return not self._all_landed() and self._failure() is None

    def raise_if_over(self) -> None:
        """Raise what who waits for it is told, when it failed or was cancelled."""
        outcome = self._decided()
        if outcome is State.CANCELLED:
            raise TransferCancelled(self.name, cause=self.error, leaves=self._leaves())
        if outcome is State.FAILED:
            raise self.failure(self.error, self._error_layer, unprepared=self._unprepared)
        flight = self._failure() if outcome is None else None
        if flight is not None:
            raise self.failure(flight.error, flight.error_layer, unprepared=flight.unprepared)

    def failure(
        self, cause: BaseException | None, layer: int | None = None, *, unprepared: bool = False
    ) -> TransferFailed:
        """Return the error that says why it failed, and what that leaves in its pages."""
        where = None if unprepared else layer
        return TransferFailed(
            self.name, layer=where, cause=cause, leaves=self._leaves(), unprepared=unprepared
        )

    def _leaves(self) -> str:
        lead = self._lead or self
        flights = (lead._flight,) if lead._layers is None else list(lead._layers.values())
        issued = lead._moved or any(each is not None and not each.vain for each in flights)
        holes = self.shell.group.holes
        landed = sum(self.landed(layer) for layer in range(self.num_layers) if layer not in holes)
        ended = self.shell.driver.lost or self.shell.stuck  # threads may ask before the loop knows
        lost = ended is not None and not self.released
        return left_behind(self.direction, landed=landed if issued else None, lost=lost)

    def _decided(self) -> State | None:
        if self._deciding:
            with self.shell.verdicts:
                pass  # it is decided now
        return self._outcome

    def _all_landed(self) -> bool:
        """Return whether the flights have landed everything, whatever was decided."""
        lead = self._lead or self
        if lead._layers is None:
            return lead._flight is not None and lead._flight.landed_layers >= self.num_layers
        holes = self.shell.group.holes
        return all(
            layer in holes or (layer in lead._layers and lead._layers[layer].landed_layers > layer)
            for layer in range(self.num_layers)
        )

    def _failure(self) -> Flight | None:
        """Return the flight that broke, if it carries this request alone: then nothing can mend it."""
        lead = self._lead or self
        if lead._layers is None:
            return lead._flight if _broken(lead._flight) else None
        return next(filter(_broken, list(lead._layers.values())), None)

    # How it ends: any thread ---------------------------------------------------------------------

    def decide(self, state: State, error: BaseException | None = None) -> bool:
        """Fix the outcome, unless that was done before; return whether this call did, as it was asked.

        It is `state`, unless everything has landed or the copy has failed meanwhile: somebody may have
        seen that already. What has landed by now stays usable.
        """
        asked = state, error
        if self._outcome is not None:
            return False
        with self.shell.verdicts:
            if self._outcome is not None:
                return False
            self._deciding = True
            flight = self._failure()
            if self._all_landed():
                state, error = State.DONE, None
            elif flight is not None:
                state, error = State.FAILED, flight.error
            if flight is not None and flight.error is error:
                self._error_layer, self._unprepared = flight.error_layer, flight.unprepared
            if self._outcome is None:  # else a signal handler came in between
                if state is not State.DONE:
                    self._kept = self._landed_now()
                    self.error = error
                self._outcome = state
            self._deciding = False
        return asked == (state, error)

    def _landed_now(self) -> frozenset[int] | int:
        lead = self._lead or self
        if lead._layers is None:
            return 0 if lead._flight is None else lead._flight.landed_layers
        flights = lead._layers.items()
        return frozenset(layer for layer, flight in list(flights) if flight.landed_layers > layer)

    # What it is to the scheduler: the loop's thread ------------------------------------------------

    def settle(self, state: State, error: BaseException | None) -> State:
        """Take note that it is over; return how it ended."""
        if state is State.DONE and self._outcome is None:
            self._outcome = state  # who decides otherwise at this moment comes to the same
        else:
            self.decide(state, error)
        self.settled = True
        if self._waiters or self.joined:
            self.wake()
        assert self._outcome is not None
        return self._outcome

    def release(self) -> None:
        """Note that its pages are free of traffic."""
        self.released = True
        if self._waiters or self.joined:
            self.wake()
        for joiner in self.joined or ():
            joiner.release()

    def fly(self, flight: Flight, piece: Piece) -> None:
        """Take the flight that carries it, or one layer of it."""
        before = self._flight if self._layers is None else self._layers.get(piece.first)
        if before is not None and not before.vain:
            self._moved = True
        if self._layers is not None:
            self._layers[piece.first] = flight
        self._flight = flight
        if self.watched:
            flight.watched = flight.issue_watched = True
        if self._by_layer:
            flight.by_layer = True
        flight.entries.append(self)

    def enter(self, signal: Signal, what: int) -> None:
        """Let a task wait: it is woken when what it waits for may have come."""
        if self._waiters is None:
            self._waiters = {}
        self._waiters[signal] = what
        if what >= 0:
            self.follow_layers()
            lead = self._lead or self
            lead.watched = True
            for flight in (lead._flight, *(lead._layers or {}).values()):
                if flight is not None:
                    flight.watched = flight.issue_watched = True

    def leave(self, signal: Signal) -> None:
        """Let a task go that no longer waits, or was woken."""
        if self._waiters:
            self._waiters.pop(signal, None)

    def wake(self, layers: int | None = None) -> None:
        """Let tasks look again that wait for a layer below `layers`; None: for anything."""
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for signal, what in waiters.items():
                if layers is None or 0 <= what < layers:
                    signal.set()
                else:
                    self._waiters[signal] = what
        for joiner in self.joined or ():
            joiner.wake(layers)

    def follow_layers(self) -> None:
        """Have its layers enqueued one by one, as far as they are not yet. Any thread."""
        lead = self._lead or self
        lead._by_layer = True
        if lead._flight is not None:
            lead._flight.by_layer = True

    # Sharing copies, and streaming -------------------------------------------------------------------

    def take(self, joiner: Entry) -> None:
        """Let another one share this one's copies."""
        if self.joined is None:
            self.joined = []
        self.joined.append(joiner)
        self.watched = True
        joiner._lead = self
        joiner.hold = self.hold
        joiner.request = self.request

    def wanted_by_others(self) -> bool:
        """Return whether others still want the copies when this one no longer does."""
        lead = self._lead or self
        return any(
            other is not self and not other.settled for other in (lead, *(lead.joined or ()))
        )

    def stream(self) -> None:
        """Make it a streaming backup; no block keeps it back, as layers go when they are written."""
        self._layers, self._written, self.hold = {}, {}, None

    def unwritten(self) -> int | None:
        """Return the first layer of a streaming backup that nobody has written; None when all are."""
        written, holes = self._written or {}, self.shell.group.holes
        layers = range(self.num_layers)
        return next((each for each in layers if each not in written and each not in holes), None)

    def write(self, layer: int) -> None:
        """Note that a layer was written. Any thread.

        Raises:
            RequestError: It was written before, or this is no streaming backup.
        """
        if self._written is None:
            raise RequestError(
                f"{self!r} is not a streaming backup: layer_written belongs to "
                "backup(..., streaming=True)"
            )
        mine = object()
        if self._written.setdefault(layer, mine) is not mine:
            raise RequestError(
                f"layer {layer} of {self!r} was written before; once a layer", value=layer
            )


def _broken(flight: Flight | None) -> bool:
    return flight is not None and flight.error is not None and len(flight.batch.pieces) == 1
