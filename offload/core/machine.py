"""The scheduler's brain: events in, commands out. Pure; everything that decides lives here.

Theory of operation
-------------------
`Machine.handle(event)` changes the state and returns what must be done about it, in order. It never
waits, never copies and reads no clock; the shell (`offload.scheduler`) carries the commands out and
feeds back what happened. The entire mutable state is: the live pieces (with whom each follows), one
queue per direction, the batches in the air, and four counters.

A request is one `Piece` that covers all layers. A streaming backup is a piece that owns its host pages
and never moves, plus one piece per layer that was written, which owns the device pages and does move.

Order. Every piece claims its pages in the hazard tables when it is submitted and is told whom it must
follow. Three rules keep pages whole:

1. A piece is issued only for layers that everybody whom it follows has landed already (`Batch.limit`),
   so nothing waits on a stream and nobody disjoint is held up. One layer of a streaming backup waits
   until those whom it follows have finished altogether.
2. Claims are released when the last byte has landed or drained, never before those whom the piece
   follows have released theirs. A request that is cancelled while it still follows somebody settles at
   once and stays in the tables as a ghost until then: those behind it must not run ahead.
3. A streaming backup that was not written yet waits for the forward; so a load that waits for it must
   never be in the way of that forward: such a load is refused at submit (`endless_wait`).

Failure. A batch of one piece that fails, fails that piece. A batch of several that fails is taken
apart when it has drained, and each piece goes on alone from the layer that failed: copies can be
repeated, and the one at fault fails again, alone. Not one that compute was fenced on: compute goes on when
the event has passed, whatever became of the copy, so repeating it would come too late and be a race.

Transitions of a request are the table `TRANSITIONS`; anything else is our bug and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from offload.core.batch import Batch, Limits, Piece, Queue, State, StreamState, share
from offload.core.hazards import HazardTable
from offload.core.kinds import Direction
from offload.core.request import PATIENCE, Pages, Request
from offload.errors import InvalidTransitionError, RequestError

UNBOUNDED = 1 << 62
"""More bytes, and more pages, than anybody has."""

MAX_FLIGHTS = 16
"""Batches of one direction in the air before the next one waits in the queue, where it can still be merged
and reordered. More urgent ones are issued regardless: streams overtake at every layer."""


@attrs.frozen
class Unblock:
    """One thing that held a piece back from outside has happened."""

    piece: int


@attrs.frozen
class Written:
    """The forward has written one layer of a streaming backup."""

    request: int
    layer: int
    piece: int
    """A fresh id for the piece that this layer becomes."""

    blockers: int = 0


@attrs.frozen
class Cancel:
    """Nobody wants the request any more; with an `error`, it failed instead (its deadline passed)."""

    request: int
    error: BaseException | None = None


@attrs.frozen
class Flush:
    """Issue what may be issued, at most one batch per direction."""


@attrs.frozen
class Landed:
    """Layers below `layers` of a batch have landed. Cumulative."""

    batch: int
    layers: int


@attrs.frozen
class Failed:
    """The copy of a batch raised at `layer`; its stream issues no more of it."""

    batch: int
    error: BaseException

    spoiled: frozenset[int] = frozenset()
    """Requests that cannot be mended by copying again: compute was ordered after a copy that has not landed,
    and goes on without it."""


@attrs.frozen
class Ended:
    """Nothing of the batch will touch memory again."""

    batch: int


Event: TypeAlias = Request | Unblock | Written | Cancel | Flush | Landed | Failed | Ended


@attrs.frozen
class Issue:
    """Put a batch on the stream of its direction."""

    batch: Batch


@attrs.frozen
class Extend:
    """The batch may go on: its `limit` has grown."""

    batch: Batch


@attrs.frozen
class Stop:
    """Nobody wants the rest of the batch."""

    batch: Batch


@attrs.frozen
class Watch:
    """Somebody follows the batch: from now on the machine wants to hear of each of its layers."""

    batch: Batch


@attrs.frozen
class SettleLayer:
    """Layers below `batch.landed` have landed for every piece of the batch."""

    batch: Batch


@attrs.frozen
class Settle:
    """The request is over for its callers: done, failed or cancelled, as `piece.state` or `state` says."""

    piece: Piece
    state: State


@attrs.frozen
class Unlock:
    """The pages of the request are free of traffic."""

    piece: Piece


Command: TypeAlias = Issue | Extend | Stop | Watch | SettleLayer | Settle | Unlock

_OPEN = (State.QUEUED, State.ISSUED)

TRANSITIONS: dict[tuple[State, str], State] = {
    (State.QUEUED, "issue"): State.ISSUED,
    (State.QUEUED, "cancel"): State.CANCELLED,
    (State.QUEUED, "fail"): State.FAILED,
    (State.ISSUED, "issue"): State.ISSUED,  # the next layer of a streaming backup
    (State.ISSUED, "split"): State.QUEUED,  # its batch failed; it goes on alone
    (State.ISSUED, "land"): State.DONE,
    (State.ISSUED, "cancel"): State.DRAINING,
    (State.ISSUED, "fail"): State.DRAINING,
    (State.DRAINING, "drain cancelled"): State.CANCELLED,
    (State.DRAINING, "drain failed"): State.FAILED,
}


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

    queued_bytes: int = 0
    queued_requests: int = 0
    inflight_bytes: int = 0
    inflight_requests: int = 0

    _last_id: int = 0
    _last_batch: int = 0
    _pieces: dict[int, Piece] = attrs.field(factory=dict)
    _queues: dict[Direction, Queue] = attrs.field(
        factory=lambda: {direction: Queue() for direction in Direction}
    )
    _batches: dict[int, Batch] = attrs.field(factory=dict)
    _streaming: dict[int, Piece] = attrs.field(factory=dict)
    _commands: list[Command] = attrs.field(factory=list)
    _bounded: bool = False
    """With a bound on what is in flight, a batch that waits for another would hold what that one needs:
    so a piece is then issued only when nobody is ahead of it."""

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self._bounded = (
            limits.max_inflight_bytes is not None or limits.max_inflight_requests is not None
        )

    def new_id(self) -> int:
        """Return the next id for a request or a streaming layer."""
        self._last_id += 1
        return self._last_id

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what must be done, in order.

        Raises:
            RequestError: A request that could only wait for ever, or a layer that was written twice;
                nothing changed.
            InvalidTransitionError: Our bug.
        """
        match event:
            case Request():
                self._submit(event)
            case Landed():
                self._landed(event)
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
        commands, self._commands = self._commands, []
        return commands

    def find(self, request: int) -> Piece | None:
        """Return a request that has not released its pages yet."""
        return self._pieces.get(request)

    def live(self) -> list[Piece]:
        """Return the requests that have not settled."""
        return [p for p in self._pieces.values() if p.parent is None and p.state in _OPEN]

    def forget(self) -> None:
        """Release the claims of everything. For the end: nothing moves, and no event comes any more."""
        while self._pieces:
            self._release(self._pieces.popitem()[1])

    def pending(self) -> bool:
        """Return whether any page is still claimed, or a batch still in the air."""
        return bool(self._pieces or self._batches)

    def undisturbed(self, request: Request) -> bool:
        """Return whether a load still runs, and nobody has claimed its pages for writing since."""
        piece = self._pieces.get(request.id)
        if piece is None or piece.state not in _OPEN:
            return False
        for part in request.parts:
            host, device = self.tables[part.member]
            if host.written_since(request.id, part.host_pages):
                return False
            if not device.last_writer_is(request.id, part.device_pages):
                return False
        return True

    def flushable(self) -> bool:
        """Return whether `Flush` would issue something."""
        return any(self._room(direction) for direction in Direction)

    # Submit -----------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        if self._streaming and request.direction is Direction.LOAD:
            self._refuse_endless_wait(request)
        load = request.direction is Direction.LOAD
        piece = Piece(request.id, request, 0, self.num_layers, request.blockers)
        follow: list[int] = []
        for part in request.parts:
            host, device = self.tables[part.member]
            follow += self._claim(piece, host, part.host_pages, write=not load)
            if not request.streaming:
                follow += self._claim(piece, device, part.device_pages, write=load)
        self._pieces[request.id] = piece
        self._follow(piece, follow)
        self.queued_bytes += request.nbytes
        self.queued_requests += 1
        if request.streaming:
            piece.stream = StreamState()
            self._streaming[request.id] = piece
        elif not piece.blockers and not piece.follows:
            self._queues[request.direction].push(piece)
        else:
            self._advance(piece)

    @staticmethod
    def _claim(piece: Piece, table: HazardTable, pages: Pages, *, write: bool) -> Sequence[int]:
        return table.claim(piece.id, pages, write=write)

    def _follow(self, piece: Piece, ids: Sequence[int]) -> None:
        for other in ids:
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

    def _refuse_endless_wait(self, request: Request) -> None:
        """Raise when the load waits for a forward that itself waits for the load."""
        ids: set[int] = set()
        for part in request.parts:
            host, device = self.tables[part.member]
            ids.update(host.peek(part.host_pages, write=False))
            ids.update(device.peek(part.device_pages, write=True))
        for stream in self._awaited({self._pieces[i] for i in ids}):
            for mine in request.parts:
                for theirs in stream.request.parts:
                    if mine.member == theirs.member:
                        _refuse_shared(mine.device_pages, theirs.device_pages, stream)

    def _awaited(self, pieces: set[Piece]) -> list[Piece]:
        """Return the streaming backups, not fully written, that `pieces` wait for, or are."""
        found, seen = [], set(pieces)
        stack = list(pieces)
        while stack:
            piece = stack.pop()
            ahead = set(piece.follows)
            if piece.stream is not None:
                ahead |= piece.stream.pieces
                if piece.state in _OPEN and len(piece.stream.written) < piece.last:
                    found.append(piece)
                    ahead |= self._in_the_way_of(piece)
            stack += ahead - seen
            seen |= ahead
        return found

    def _in_the_way_of(self, stream: Piece) -> set[Piece]:
        """Return the loads that layers of a streaming backup will follow if they are written now."""
        ids: set[int] = set()
        for part in stream.request.parts:
            ids.update(self.tables[part.member][1].peek(part.device_pages, write=False))
        return {self._pieces[i] for i in ids}

    # Layers of a streaming backup --------------------------------------------------------------

    def _written(self, event: Written) -> None:
        owner = self._pieces.get(event.request)
        if owner is None or owner.state not in _OPEN:
            return  # cancelled or failed meanwhile: the forward need not know
        stream = owner.stream
        if stream is None:
            raise RequestError(f"request {event.request} is not a streaming backup")
        if event.layer in stream.written:
            raise RequestError(f"layer {event.layer} of request {event.request} was written before")
        stream.written.add(event.layer)
        layer = event.layer
        piece = Piece(event.piece, owner.request, layer, layer + 1, event.blockers, parent=owner)
        follow = [ahead.id for ahead in owner.follows]
        for part in owner.request.parts:
            device = self.tables[part.member][1]
            follow += self._claim(piece, device, part.device_pages, write=False)
        self._pieces[piece.id] = piece
        stream.pieces.add(piece)
        self._follow(piece, follow)
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
        if piece.parent is not None or self._bounded:
            return piece.first
        return max(piece.first, min(ahead.landed for ahead in piece.follows))

    def _advance(self, piece: Piece) -> None:
        """Let a piece go as far as it may now."""
        if piece.owner.state not in _OPEN and piece.batch is None:
            if not piece.finished and not piece.follows:
                self._retire(piece)
            return
        if piece.blockers or piece.stream is not None:
            return
        if piece.batch is not None:
            self._extend(piece)
        elif piece.waiting and self._limit(piece) > piece.first:
            self._queues[piece.request.direction].push(piece)

    def _extend(self, piece: Piece) -> None:
        batch = piece.batch
        if batch is not None and batch.limit < batch.last and not batch.failed:
            limit = self._limit(piece)
            if limit > batch.limit:
                batch.limit = limit
                self._commands.append(Extend(batch))

    def _wake_followers(self, piece: Piece) -> None:
        for follower in piece.followers or ():
            self._advance(follower)

    # Issue ---------------------------------------------------------------------------------------

    def _room(self, direction: Direction) -> Piece | None:
        """Return the most urgent piece of a direction if it may be issued now."""
        head = self._queues[direction].head()
        if head is None:
            return None
        most, nbytes = self.limits.max_inflight_bytes, self.inflight_bytes + share(head)
        if most is not None and self.inflight_bytes and nbytes > most:
            return None
        most = self.limits.max_inflight_requests
        if most is not None and self.inflight_requests >= most:
            return None
        if len(self._batches) >= MAX_FLIGHTS and self._crowded(direction, head.request.due):
            return None
        return head

    def _crowded(self, direction: Direction, due: float) -> bool:
        """Return whether enough is in the air, all of it some of it at least as urgent as `due`."""
        free = [
            batch.due
            for batch in self._batches.values()
            if batch.direction is direction and not batch.closed and batch.limit == batch.last
        ]
        return len(free) >= MAX_FLIGHTS and min(free) <= due

    def _flush(self) -> None:
        load, backup = self._room(Direction.LOAD), self._room(Direction.BACKUP)
        if load is None or backup is None:
            if load is not None or backup is not None:
                self._issue(Direction.BACKUP if load is None else Direction.LOAD)
            return
        # Loads first, but a backup that is due a patience earlier goes before them.
        late = backup.request.due + PATIENCE < load.request.due
        first, second = (backup, load) if late else (load, backup)
        self._issue(first.request.direction)
        if self._room(second.request.direction) is not None:
            self._issue(second.request.direction)

    def _issue(self, direction: Direction) -> None:
        requests = self.limits.max_inflight_requests
        room = None if requests is None else requests - self.inflight_requests
        limits = self.limits
        pieces = self._queues[direction].take(
            self._batch_bytes(), limits.max_batch_ops or UNBOUNDED, room
        )
        self._last_batch += 1
        head = pieces[0]
        batch = Batch(
            id=self._last_batch,
            direction=direction,
            route=head.request.route,
            pieces=pieces,
            first=head.first,
            last=head.last,
            limit=self._limit(head),
            nbytes=sum(map(share, pieces)),
            due=head.request.due,
            landed=head.first,
        )
        self._batches[batch.id] = batch
        self.inflight_bytes += batch.nbytes
        self.inflight_requests += len(pieces)
        for piece in pieces:
            piece.batch = batch
            if piece.owner.state is State.QUEUED:
                self._move(piece.owner, "issue")
                self._dequeue(piece.owner)
            piece.state = State.ISSUED
        self._commands.append(Issue(batch))

    def _batch_bytes(self) -> int:
        """Return the bytes of one batch: its own budget, and what may still be in flight."""
        limits = self.limits
        budget = limits.max_batch_bytes or UNBOUNDED
        if limits.max_inflight_bytes is None:
            return budget
        return min(budget, max(1, limits.max_inflight_bytes - self.inflight_bytes))

    def _dequeue(self, owner: Piece) -> None:
        if not owner.alone:
            self.queued_bytes -= owner.request.nbytes
            self.queued_requests -= 1

    # Landing, failing, ending -------------------------------------------------------------------

    def _landed(self, event: Landed) -> None:
        batch = self._batch(event.batch)
        if event.layers <= batch.landed:
            return
        batch.landed = event.layers
        self._commands.append(SettleLayer(batch))
        done = batch.landed >= batch.last
        for piece in batch.pieces:
            if done:
                self._finish(piece)
            elif piece.followers:
                self._wake_followers(piece)
        if done:
            self._close(batch)

    def _failed(self, event: Failed) -> None:
        batch = self._batch(event.batch)
        batch.failed = True
        for piece in batch.pieces:
            lost = len(batch.pieces) == 1 or piece.request.id in event.spoiled
            if lost and piece.owner.state in _OPEN:
                self._abandon(piece.owner, "fail", event.error)

    def _ended(self, event: Ended) -> None:
        batch = self._batches.pop(event.batch)
        if batch.closed:
            return
        self._close(batch)
        for piece in batch.pieces:
            if piece.owner.state not in _OPEN:
                self._retire(piece)
            elif batch.failed:
                self._again(piece, batch.landed)
            else:
                story = (repr(piece), repr(batch))
                raise InvalidTransitionError(event="end", state=piece.state, story=story)

    def _again(self, piece: Piece, layer: int) -> None:
        """Queue one piece of a failed batch by itself, from the layer that failed."""
        if piece.parent is None:
            self._move(piece, "split")
        piece.first, piece.batch, piece.alone = layer, None, True
        piece.state, piece.waiting = State.QUEUED, True
        self._advance(piece)

    def _close(self, batch: Batch) -> None:
        batch.closed = True
        self.inflight_bytes -= batch.nbytes
        self.inflight_requests -= len(batch.pieces)

    def _batch(self, number: int) -> Batch:
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidTransitionError(event=f"batch {number}", state="not in the air")
        return batch

    def _finish(self, piece: Piece) -> None:
        """The last byte of a piece has landed."""
        owner = piece.owner
        if owner.stream is not None:
            owner.stream.land(piece.first)
            if len(owner.stream.landed) < owner.last:
                self._retire(piece)
                self._wake_followers(owner)
                return
        if owner.state is State.ISSUED:
            self._move(owner, "land")
            self._commands.append(Settle(owner, State.DONE))
        self._retire(piece)

    def _cancel(self, event: Cancel) -> None:
        owner = self._pieces.get(event.request)
        if owner is not None and owner.state in _OPEN:
            self._abandon(owner, "cancel" if event.error is None else "fail", event.error)

    def _abandon(self, owner: Piece, word: str, error: BaseException | None) -> None:
        """Settle a request that will not be completed; what is in the air drains."""
        was = owner.state
        if was is State.QUEUED:
            self._dequeue(owner)
        owner.error = error
        self._move(owner, word)
        outcome = State.CANCELLED if word == "cancel" else State.FAILED
        self._commands.append(Settle(owner, outcome))
        if owner.stream is None:
            self._drop(owner)
            return
        for piece in list(owner.stream.pieces):
            self._drop(piece)
        self._retire(owner)

    def _drop(self, piece: Piece) -> None:
        """Let go of a piece that nobody wants: at once if it is queued, else when it has drained."""
        batch = piece.batch
        if batch is None:
            self._retire(piece)
        elif not batch.failed and not any(p.owner.state in _OPEN for p in batch.pieces):
            self._commands.append(Stop(batch))

    def _retire(self, piece: Piece) -> None:
        """Release the claims of a piece that moves no more bytes, once nobody is ahead of it."""
        if piece.finished or (piece.stream is not None and piece.stream.pieces):
            return
        if piece.follows:
            piece.batch = None
            return
        piece.finished, piece.batch = True, None
        del self._pieces[piece.id]
        self._release(piece)
        owner = piece.owner
        if owner is piece and owner.state is State.DRAINING:
            self._move(owner, "drain cancelled" if owner.error is None else "drain failed")
        for follower in piece.followers or ():
            if isinstance(follower.follows, set):
                follower.follows.discard(piece)
            self._advance(follower)
        piece.followers = None
        if owner is not piece:
            self._retire_layer(owner, piece)
        else:
            self._streaming.pop(piece.id, None)
            self._commands.append(Unlock(piece))

    def _release(self, piece: Piece) -> None:
        """Take back what the piece claimed: a layer its device pages, a streaming owner its host pages."""
        request, number = piece.request, piece.id
        load = request.direction is Direction.LOAD
        for part in request.parts:
            host, device = self.tables[part.member]
            if piece.parent is None:
                host.release(number, part.host_pages, write=not load)
            if piece.stream is None:
                device.release(number, part.device_pages, write=load)

    def _retire_layer(self, owner: Piece, piece: Piece) -> None:
        stream = owner.stream
        assert stream is not None
        stream.pieces.discard(piece)
        if owner.state in _OPEN or stream.pieces:
            return
        self._retire(owner)

    def _move(self, owner: Piece, word: str) -> None:
        state = TRANSITIONS.get((owner.state, word))
        if state is None:
            raise InvalidTransitionError(event=word, state=owner.state, story=(repr(owner),))
        owner.state = state


def _refuse_shared(mine: Pages, theirs: Pages, stream: Piece) -> None:
    shared = set(mine.tolist()) & set(theirs.tolist())
    if shared:
        raise RequestError(
            f"load writes device page {min(shared)}, and waits for the streaming backup "
            f"{stream.request.id}, which has yet to read that page: neither could go first. Load into "
            "other pages, or submit it after the forward's last layer_written."
        )
