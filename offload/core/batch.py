"""Which queued requests go together, and which go first.

A `Piece` is what the machine orders: a whole request, or one layer of a streaming backup. Pieces of one
direction, one route and the same layers that follow nobody share a queue and become one batch; a piece
that follows an earlier request is a batch of its own, because its mates must not wait for that one.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from heapq import heappop, heappush

import attrs

from offload.core.kinds import Direction
from offload.core.request import Request
from offload.errors import RequestError, told


class State(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    ISSUED = "issued"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = (State.QUEUED, State.ISSUED)
"""States of a request that may still complete."""


@attrs.frozen
class Limits:
    """Bounds that turn load into back-pressure. None is unbounded.

    Above `max_queued_bytes`, `load` and `backup` wait, and their `_nowait` twins raise. Above `max_inflight_*`,
    what was submitted waits in the queue. `max_batch_*` bound what is merged.

    Attributes:
        max_queued_bytes: Bytes of requests that were submitted and not yet issued.
        max_inflight_bytes: Bytes of batches that were issued and have not landed.
        max_inflight_requests: Requests that were issued and have not landed.
        max_batch_bytes: Bytes merged into one batch. At 50 GB/s 256 MiB are 5 ms of a link: long enough to fill
            it while the loop is busy elsewhere, short enough that the next batch is planned on fresh priorities.
        max_batch_ops: Pages merged into one batch: planning 65,536 costs about 1 ms of the stream's own thread.
        max_batch_requests: Requests merged into one batch: issuing 1,024, or settling them, keeps the event loop
            for some 5 ms.
    """

    max_queued_bytes: int | None = None
    max_inflight_bytes: int | None = None
    max_inflight_requests: int | None = None
    max_batch_bytes: int | None = 256 << 20
    max_batch_ops: int | None = 65_536
    max_batch_requests: int | None = 1024

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Limits):
            value: object = getattr(self, field.name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise RequestError(
                    f"Limits.{field.name} is {value!r}; it must be an integer from 1 up, or None",
                    value=value,
                )


ALONE = "alone"
"""What pieces have in common that share a batch with nobody: one heap, for a look at the head asks every heap."""

SWEEP = 256
"""Pieces that were dropped from a queue, below which a sweep is not worth it."""

_NOBODY: frozenset[Piece] = frozenset()


@attrs.define(eq=False)
class Piece:
    """Layers `first` to `last` of a request, with whom it follows and who follows it."""

    id: int
    """Its name in the hazard tables; the request's own id unless it is one layer of a streaming backup."""

    request: Request
    first: int
    last: int
    blockers: int
    parent: Piece | None = None
    """The streaming backup that this is a layer of."""

    state: State = State.QUEUED
    batch: Batch | None = None
    alone: bool = False
    """Never merged: its last batch failed, and this run shows whose fault it was."""

    waiting: bool = True
    """Not in a queue: something it follows, or a blocker, holds it back."""

    finished: bool = False
    """Its claims are released."""

    touched: bool = False
    """Some byte of it may have moved. Known when a batch of it has ended."""

    error: BaseException | None = None
    follows: set[Piece] | frozenset[Piece] = _NOBODY
    """Whom it must follow and who has not finished. A set of its own only when there is somebody."""

    relies: tuple[int, ...] = ()
    """Those among them who were to write what it reads, and were under way when it was submitted."""

    followers: list[Piece] | None = None
    stream: StreamState | None = None

    @property
    def owner(self) -> Piece:
        """The piece that stands for the whole request."""
        return self.parent or self

    @property
    def unissued(self) -> bool:
        """Whether anything of it is still to be issued: the request itself, or a layer of it."""
        if self.stream is None:
            return self.state is State.QUEUED
        unwritten = len(self.stream.written) < self.last
        return unwritten or any(piece.batch is None for piece in self.stream.pieces)

    @property
    def landed(self) -> int:
        """Layers `[first, landed)` have landed."""
        if self.stream is not None:
            return self.stream.prefix
        return self.first if self.batch is None else self.batch.landed

    @property
    def whole(self) -> bool:
        """Whether all its layers have landed."""
        return self.landed >= self.last

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.request.direction} {self.request.id}"

    def end(self) -> str:
        """Return its name and how it ended, for those whom that concerns."""
        how = "was cancelled" if self.error is None else f"failed ({told(self.error)})"
        landed = self.landed if self.stream is None else len(self.stream.landed)
        return f"{self.name}, which {how} when {landed} of {self.last} layers had landed"

    def __repr__(self) -> str:
        layers = f"{self.landed}/{self.last}"
        return f"<request {self.request.id} {self.request.direction} {layers} layers, {self.state}>"


@attrs.define(eq=False)
class StreamState:
    """What a streaming backup knows about its layers."""

    written: set[int] = attrs.field(factory=set)
    landed: set[int] = attrs.field(factory=set)
    pieces: set[Piece] = attrs.field(factory=set)
    """Layers that were written and have not finished."""

    prefix: int = 0

    def land(self, layer: int) -> None:
        """Note that a layer has landed."""
        self.landed.add(layer)
        while self.prefix in self.landed:
            self.prefix += 1


@attrs.define(eq=False)
class Batch:
    """Pieces that are copied together, layer by layer."""

    id: int
    direction: Direction
    route: Hashable
    pieces: list[Piece]
    first: int
    last: int
    limit: int
    """Layers below it may be copied: those above wait for an earlier request that the pieces follow."""

    nbytes: int
    due: float
    landed: int
    failed: bool = False
    closed: bool = False
    """All bytes have landed, or drained: it no longer counts as in flight."""


@attrs.define(eq=False)
class Queue:
    """The pieces of one direction that may be issued now.

    Heaps hold (due, id) and no piece, as garbage collections look at every tuple that refers to an
    object: a hundred thousand of them would cost 15 ms.
    """

    heaps: dict[Hashable, list[tuple[float, int]]] = attrs.field(factory=dict)
    """(due, id) by what may share a batch. Empty when nothing is queued."""

    _pieces: dict[int, Piece] = attrs.field(factory=dict)
    """Those in heaps that are still wanted, by id."""

    _dropped: int = 0
    """Places in heaps that are nobody's: of those that are not, and of those that have a better one."""

    def push(self, piece: Piece) -> None:
        """Add a piece; it keeps its place by `due` and then by submission."""
        piece.waiting = False
        alone = piece.alone or piece.follows
        key = ALONE if alone else (piece.request.route, piece.first, piece.last)
        heap = self.heaps.get(key)
        if heap is None:
            heap = self.heaps[key] = []
        heappush(heap, (piece.request.due, piece.id))
        self._pieces[piece.id] = piece

    def hasten(self, piece: Piece) -> None:
        """Give a piece that has become more urgent its new place, if it is here. The old one goes later."""
        if piece.id in self._pieces:
            self.push(piece)
            self._spare_place()

    def drop(self, piece: Piece) -> None:
        """Forget a piece that nobody wants any more, if it is here. Its place goes later, with others."""
        if self._pieces.pop(piece.id, None) is not None:
            self._spare_place()

    def _spare_place(self) -> None:
        self._dropped += 1
        if self._dropped > SWEEP and 8 * self._dropped > len(self._pieces):
            self._sweep()

    def _at(self, due: float, number: int) -> Piece | None:
        """Return the piece whose place in a heap this is. It never becomes less urgent: so it has no other like it."""
        piece = self._pieces.get(number)
        return piece if piece is not None and piece.request.due == due else None

    def _sweep(self) -> None:
        """Take out the places that are nobody's: few enough stay that no look at a head takes long."""
        heaps = self.heaps
        for key, heap in list(heaps.items()):
            heap[:] = [place for place in heap if self._at(*place) is not None]
            heap.sort()  # a heap as well, and nearly in order: quicker than heapify
            if not heap:
                del heaps[key]
        self._dropped = 0

    def head(self) -> Piece | None:
        """Return the most urgent piece."""
        key = self._most_urgent() if self.heaps else None
        return None if key is None else self._pieces[self.heaps[key][0][1]]

    def take(self, nbytes: int, num_pages: int, requests: int | None) -> list[Piece]:
        """Pop the most urgent piece and those that may share its batch.

        Args:
            nbytes, num_pages, requests: Budgets. One piece goes even if it is over them; None is unbounded.
        """
        taken: list[Piece] = []
        key, pieces = self._most_urgent(), self._pieces
        if key == ALONE:
            requests = 1
        heap = [] if key is None else self.heaps[key]
        while heap:
            due, number = heap[0]
            piece = pieces.get(number)
            if piece is None or piece.request.due != due:
                self._dropped -= 1
            else:
                request = piece.request
                nbytes -= request.nbytes if piece.parent is None else share(piece)
                num_pages -= request.num_pages
                if taken and (nbytes < 0 or num_pages < 0 or len(taken) == requests):
                    return taken
                taken.append(piece)
                del pieces[number]
            heappop(heap)
        self.heaps.pop(key, None)
        return taken

    def _most_urgent(self) -> Hashable:
        """Return the key of the heap with the most urgent piece; None when nothing is queued."""
        best: tuple[float, int] | None = None
        found: Hashable = None
        for key, heap in list(self.heaps.items()):
            while heap and self._at(*heap[0]) is None:
                heappop(heap)
                self._dropped -= 1
            if not heap:
                del self.heaps[key]
            elif best is None or heap[0] < best:
                best, found = heap[0], key
        return found


def share(piece: Piece) -> int:
    """Return the bytes that count against budgets: the piece's layers' share of its request."""
    request = piece.request
    if piece.parent is None:
        return request.nbytes
    return request.nbytes // piece.parent.last
