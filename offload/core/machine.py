"""The scheduler's brain: events in, commands out. Pure; everything that decides lives here.

Theory of operation
-------------------
`Machine.handle(event)` changes the state and returns what must be done about it, in order. It never
waits, never copies and reads no clock; the shell (`offload.shell`) carries the commands out and
feeds back what happened (`events.py` lists both). The entire mutable state is: the live pieces (with whom
each follows), what they claim (`claims.py`), the queues and the batches in the air (`in_flight.py`), and what
those come to (`budget.py`).

A request is one `Piece` that covers all layers. A streaming backup is a piece that owns its host pages
and never moves, plus one piece per layer that was written, which owns the device pages and does move.

Order. Every piece claims its pages in the hazard tables when it is submitted and is told whom it must
follow. Three rules keep pages whole:

1. A piece is issued only for layers that everybody whom it follows has landed already (`Batch.limit`),
   so nothing waits on a stream and nobody disjoint is held up.
2. Claims are released when the last byte has landed or drained, never before those whom the piece
   follows have released theirs. A request that is cancelled while it still follows somebody settles at
   once and stays in the tables as a ghost until then: those behind it must not run ahead.
3. A streaming backup that was not written yet waits for the forward; so a load that waits for it must
   never be in the way of that forward: such a load is refused at submit (`endless.py`).

Failure. A batch of one piece that fails, fails that piece. A batch of several that fails is taken
apart when it has drained, and each piece goes on alone from the layer that failed: copies can be
repeated, and the one at fault fails again, alone. Not one that compute was fenced on: compute goes on when
the event has passed, whatever became of the copy, so repeating it would come too late and be a race.

Half-written pages. Whoever reads what a request was to write, and was submitted before that one failed or
was cancelled, relied on it, and fails in its turn for the layers that are missing. One exception: a
cancelled request that had not begun has changed nothing, and is as if it had never been submitted. Host
pages of which a backup has written a part stay torn beyond that (`torn.py`): every later load of them fails,
until a backup has written them whole. Device pages do not: compute writes them too, and knows better.

Transitions of a request are a table (`transitions.py`); anything else is a defect of offload and raises. Who
leaves, and who hears of it, may be as many as there are: `chains.py` takes some of them per event.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from offload.core.batch import OPEN, Batch, Limits, Piece, State, StreamState
from offload.core.budget import Budget
from offload.core.chains import TELL_AT_ONCE, Chains
from offload.core.claims import Claims, let_down
from offload.core.endless import refuse_endless_wait
from offload.core.events import (
    Cancel,
    Command,
    Ended,
    Event,
    Extend,
    Failed,
    Flush,
    Hasten,
    Issue,
    Landed,
    Reorder,
    Settle,
    SettleLayer,
    Stop,
    Unblock,
    Unlock,
    Watch,
    Written,
)
from offload.core.hazards import HazardTable
from offload.core.in_flight import InFlight
from offload.core.kinds import Direction
from offload.core.request import Request
from offload.core.transitions import move
from offload.errors import InvalidTransitionError, RequestError


@attrs.define(eq=False)
class Machine:
    """Orders, batches and settles requests over the pools of one group.

    Args:
        num_layers: Layers of the model.
        tables: The hazard tables of each member, as (host, device).
    """

    num_layers: int
    tables: Sequence[tuple[HazardTable, HazardTable]]
    limits: Limits = attrs.field(factory=Limits)

    budget: Budget = attrs.field(init=False)
    in_flight: InFlight = attrs.field(init=False)
    claims: Claims = attrs.field(init=False)

    _last_id: int = 0
    _pieces: dict[int, Piece] = attrs.field(factory=dict)
    _streaming: int = 0
    """Streaming backups among the pieces."""

    _chains: Chains = attrs.field(init=False)
    _commands: list[Command] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.budget = Budget(self.limits)
        self.in_flight = InFlight(self.budget)
        self.claims = Claims(self.tables)
        self._chains = Chains(self._leave, self._hear)

    def open(self) -> None:
        """Number requests after all that ever used these tables: they tell old from young by number."""
        self._last_id = max(self._last_id, self.claims.open())

    def new_id(self) -> int:
        """Return the next id for a request or a streaming layer."""
        self._last_id += 1
        return self._last_id

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what must be done, in order.

        Raises:
            RequestError: A request that could only wait for ever, or a layer that was written twice;
                nothing changed.
            InvalidTransitionError: A defect of offload.
        """
        self._chains.tellable = TELL_AT_ONCE
        match event:
            case Request():
                self._submit(event)
            case Landed():
                self._landed(self.in_flight.batch(event.batch), event.layers)
            case Ended():
                self._ended(event)
            case Flush():
                self._flush()
            case Unblock():
                self._unblock(event)
            case Written():
                self._written(event)
            case Cancel():
                self._cancel(event)
            case Failed():
                self._failed(event)
            case Hasten():
                self._hasten(event)
        commands, self._commands = self._commands, []
        return commands

    def find(self, request: int) -> Piece | None:
        """Return a request that has not released its pages yet."""
        return self._pieces.get(request)

    def names(self) -> list[int]:
        """Return the ids of everything that has not released its pages yet; no look at each, so it is quick."""
        return list(self._pieces)

    def live(self) -> list[Piece]:
        """Return the requests that have not settled."""
        return [p for p in self._pieces.values() if p.parent is None and p.state in OPEN]

    def forget(self, owner: object = None) -> None:
        """Void all claims in tables of this owner. For the end: nothing moves, and no event comes any more."""
        while self._pieces:
            piece = self._pieces.popitem()[1]
            piece.touched |= piece.batch is not None
            if piece.request.direction is Direction.BACKUP:
                self.claims.note_written(piece)
        self.claims.forget(owner)

    def pending(self) -> bool:
        """Return whether any page is still claimed, or a batch still in the air."""
        return bool(self._pieces or self.in_flight)

    def undisturbed(self, request: Request) -> bool:
        """Return whether a load still runs, and nobody has claimed its pages for writing since."""
        piece = self._pieces.get(request.id)
        return piece is not None and piece.state in OPEN and self.claims.undisturbed(request)

    def waiting(self) -> bool:
        """Return whether a `Flush` is worth a try: something is queued, or leaves."""
        chains, queues = self._chains, self.in_flight
        return bool(chains.leaving or chains.telling or queues.loads.heaps or queues.backups.heaps)

    def flushable(self) -> bool:
        """Return whether `Flush` would issue something, or let go of more who leave."""
        return bool(self._chains.leaving or self._chains.telling) or self.in_flight.flushable()

    # Submit -----------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        load = request.direction is Direction.LOAD
        if self.claims.orphans >= 0:
            self.claims.refuse_orphans(request)
        if load and self._streaming:
            refuse_endless_wait(request, self._pieces, self.claims)
        piece = Piece(request.id, request, 0, self.num_layers, request.blockers)
        follow, sources = self.claims.take(piece)
        self._pieces[request.id] = piece
        self.budget.queue(request)
        if follow or sources:
            self._follow(piece, follow, sources)
        if request.streaming:
            piece.stream = StreamState()
            self._streaming += 1
        elif not piece.blockers and not piece.follows:
            self.in_flight.push(piece)
        else:
            self._advance(piece)
        if load:
            self._refuse_torn(piece)

    def _follow(self, piece: Piece, ids: Sequence[int], sources: Sequence[int]) -> None:
        """Put a piece behind others; it relies on those among `sources` that may still complete."""
        for other in (*ids, *sources):
            ahead = self._pieces[other]
            if ahead not in piece.follows:
                if not isinstance(piece.follows, set):
                    piece.follows = set()
                piece.follows.add(ahead)
                if ahead.followers is None:
                    ahead.followers = []
                ahead.followers.append(piece)
                if ahead.batch is not None and not ahead.batch.closed:
                    self._commands.append(Watch(ahead.batch))
        if sources:
            piece.relies = tuple(n for n in sources if self._pieces[n].state in OPEN)

    # Layers of a streaming backup --------------------------------------------------------------

    def _written(self, event: Written) -> None:
        owner = self._pieces.get(event.request)
        if owner is None or owner.state not in OPEN:
            return  # cancelled or failed meanwhile: the forward need not know
        stream = owner.stream
        if stream is None:
            raise RequestError(f"request {event.request} is not a streaming backup")
        if event.layer in stream.written:
            raise RequestError(f"layer {event.layer} of request {event.request} was written before")
        stream.written.add(event.layer)
        layer = event.layer
        piece = Piece(event.piece, owner.request, layer, layer + 1, event.blockers, parent=owner)
        follow, sources = self.claims.take(piece)
        self._pieces[piece.id] = piece
        stream.pieces.add(piece)
        self._follow(piece, [ahead.id for ahead in owner.follows] + follow, sources)
        self._advance(piece)

    # Moving on ---------------------------------------------------------------------------------

    def _unblock(self, event: Unblock) -> None:
        piece = self._pieces.get(event.piece)
        if piece is not None:
            piece.blockers -= 1
            self._advance(piece)

    def _limit(self, piece: Piece) -> int:
        """Return up to which layer `piece` may go: as far as everybody whom it follows has landed."""
        if not piece.follows:
            return piece.last
        if self.budget.bounded:
            return piece.first
        limit = piece.last
        for ahead in piece.follows:  # often many, and then the first is seldom done
            landed = ahead.landed
            if landed <= piece.first:
                return piece.first
            limit = min(limit, landed)
        return limit

    def _advance(self, piece: Piece) -> None:
        """Let a piece go as far as it may now."""
        if (
            piece.owner.state not in OPEN or piece.first == piece.last
        ):  # or it is one layer, and has landed
            if piece.batch is None and not piece.follows:
                self._chains.retire(piece)
            return
        if piece.blockers or piece.stream is not None:
            return
        if piece.batch is not None:
            self._extend(piece)
        elif piece.waiting and self._limit(piece) > piece.first:
            self.in_flight.push(piece)

    def _extend(self, piece: Piece) -> None:
        batch = piece.batch
        if batch is not None and batch.limit < batch.last:
            limit = self._limit(piece)
            if limit > batch.limit:
                batch.limit = limit
                self._commands.append(Extend(batch))

    def _hear(self, follower: Piece, piece: Piece, gone: bool) -> None:
        """Let a follower hear that a piece has come further, or has left."""
        if gone:
            if isinstance(follower.follows, set):
                follower.follows.discard(piece)
            self._let_down(follower, piece)
        self._advance(follower)

    def _hasten(self, event: Hasten) -> None:
        """Let a request go as early as somebody more urgent wants who shares it, wherever it is by now."""
        piece = self._pieces.get(event.request)
        if piece is None or event.due >= piece.request.due:
            return
        piece.request.due = event.due
        batch = piece.batch
        if batch is None:
            self.in_flight.hasten(piece)
        elif event.due < batch.due:
            batch.due = event.due
            self._commands.append(Reorder(batch))

    def _flush(self) -> None:
        self._chains.go_on()
        for batch in self.in_flight.flush(self._limit):
            for piece in batch.pieces:
                owner, piece.batch = piece.parent or piece, batch
                if owner.state is State.QUEUED:
                    move(owner, "issue")
                    self.budget.dequeue(owner)
                piece.state = State.ISSUED
            self._commands.append(Issue(batch))

    # Landing, failing, ending -------------------------------------------------------------------

    def _landed(self, batch: Batch, layers: int) -> None:
        if layers <= batch.landed:
            return
        batch.landed = layers
        self._commands.append(SettleLayer(batch))
        done = batch.landed >= batch.last
        for piece in batch.pieces:
            if done:
                self._finish(piece)
            else:
                self._chains.tell(piece)
        if done:
            self.budget.close(batch)

    def _failed(self, event: Failed) -> None:
        batch = self.in_flight.batch(event.batch)
        batch.failed = True
        for piece in batch.pieces:
            lost = len(batch.pieces) == 1 or piece.request.id in event.spoiled
            if lost and piece.owner.state in OPEN:
                self._abandon(piece.owner, "fail", event.error)

    def _ended(self, event: Ended) -> None:
        batch = self.in_flight.end(event.batch)
        self._landed(batch, event.layers)
        if batch.closed:
            return
        self.budget.close(batch)
        for piece in batch.pieces:
            if not event.untouched:
                piece.owner.touched = True
            if piece.owner.state not in OPEN:
                self._chains.retire(piece)
            elif batch.failed:
                self._again(piece, batch.landed)
            else:
                story = (repr(piece), repr(batch))
                raise InvalidTransitionError(event="end", state=piece.state, story=story)

    def _again(self, piece: Piece, layer: int) -> None:
        """Queue one piece of a failed batch by itself, from the layer that failed."""
        move(piece, "split")
        piece.first, piece.batch, piece.alone = layer, None, True
        piece.waiting = True
        self._advance(piece)

    def _finish(self, piece: Piece) -> None:
        """The last byte of a piece has landed."""
        owner = piece.parent or piece
        if owner.stream is not None:
            owner.touched = True
            owner.stream.land(piece.first)
            if len(owner.stream.landed) < owner.last:
                self._chains.retire(piece)
                self._chains.tell(owner)
                return
        if owner.state is State.ISSUED:
            move(owner, "land")
            self._commands.append(Settle(owner, State.DONE))
        self._chains.retire(piece)

    def _cancel(self, event: Cancel) -> None:
        owner = self._pieces.get(event.request)
        if owner is not None and owner.state in OPEN:
            self._abandon(owner, "cancel" if event.error is None else "fail", event.error)

    def _abandon(self, owner: Piece, word: str, error: BaseException | None) -> None:
        """Settle a request that will not be completed; what is in the air drains."""
        if owner.state is State.QUEUED:
            self.budget.dequeue(owner)
        owner.error = error
        move(owner, word)
        outcome = State.CANCELLED if word == "cancel" else State.FAILED
        self._commands.append(Settle(owner, outcome))
        if owner.stream is None:
            self._drop(owner)
            return
        for piece in list(owner.stream.pieces):
            self._drop(piece)
        self._chains.retire(owner)

    def _drop(self, piece: Piece) -> None:
        """Let go of a piece that nobody wants: at once if it is queued, else when it has drained."""
        batch = piece.batch
        if batch is None:
            self.in_flight.drop(piece)
            self._chains.retire(piece)
        elif not batch.failed and not any(p.owner.state in OPEN for p in batch.pieces):
            self._commands.append(Stop(batch))

    # Leaving ---------------------------------------------------------------------------------------

    def _leave(self, piece: Piece) -> None:
        """Release the claims of a piece, unless somebody is ahead of it."""
        if piece.finished or (piece.stream is not None and piece.stream.pieces):
            return
        if piece.stream is None:
            piece.first = piece.landed
        piece.batch = None
        if piece.follows:
            return
        piece.finished = True
        del self._pieces[piece.id]
        if piece.request.direction is Direction.BACKUP:
            self.claims.note_written(piece)
        self.claims.release(piece)
        owner = piece.parent or piece
        if owner is piece and owner.state is State.DRAINING:
            move(owner, "drain cancelled" if owner.error is None else "drain failed")
        self._chains.tell(piece)
        piece.followers = None
        if owner is not piece:
            self._leave_layer(owner, piece)
        else:
            self._streaming -= piece.stream is not None
            self._commands.append(Unlock(piece))

    def _leave_layer(self, owner: Piece, piece: Piece) -> None:
        stream = owner.stream
        assert stream is not None
        stream.pieces.discard(piece)
        if owner.state not in OPEN and not stream.pieces:
            self._chains.retire(owner)

    # Half-written pages ------------------------------------------------------------------------------

    def _let_down(self, follower: Piece, piece: Piece) -> None:
        """Fail a piece that reads what another was to write, and has left without."""
        if follower.owner.state not in OPEN or piece.state is State.DONE:
            return
        error = let_down(follower, piece)
        if error is not None:
            self._abandon(follower.owner, "fail", error)
        elif follower.request.direction is Direction.LOAD:
            self._refuse_torn(follower)

    def _refuse_torn(self, load: Piece) -> None:
        """Fail a load whose host pages hold part of a backup."""
        error = self.claims.torn(load)
        if error is not None:
            self._abandon(load, "fail", error)
