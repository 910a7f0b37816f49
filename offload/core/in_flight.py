"""From the queues to the streams: which batch is issued next, and which are in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from offload.core.batch import Batch, Piece, Queue, share
from offload.core.budget import Budget
from offload.core.kinds import Direction
from offload.core.request import PATIENCE
from offload.errors import InvalidTransitionError

MAX_FLIGHTS = 16
"""Batches of one direction in flight before the next one waits in the queue, where it can still be merged
and reordered. More urgent ones are issued regardless: streams overtake at every layer."""


@attrs.define(eq=False)
class InFlight:
    """One queue per direction, and the batches that were issued and have not ended."""

    budget: Budget

    _last: int = 0
    loads: Queue = attrs.field(factory=Queue)
    backups: Queue = attrs.field(factory=Queue)
    _batches: dict[int, Batch] = attrs.field(factory=dict)

    def __bool__(self) -> bool:
        return bool(self._batches)

    def push(self, piece: Piece) -> None:
        """Queue a piece that may be issued."""
        queue = self.loads if piece.request.direction is Direction.LOAD else self.backups
        queue.push(piece)

    def hasten(self, piece: Piece) -> None:
        """Let a queued piece go as early as its request has come to be due."""
        queue = self.loads if piece.request.direction is Direction.LOAD else self.backups
        queue.hasten(piece)

    def drop(self, piece: Piece) -> None:
        """Forget a queued piece that nobody wants any more."""
        queue = self.loads if piece.request.direction is Direction.LOAD else self.backups
        queue.drop(piece)

    def batch(self, number: int) -> Batch:
        """Return a batch that is in flight.

        Raises:
            InvalidTransitionError: It is not.
        """
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidTransitionError(event=f"batch {number}", state="not in the air")
        return batch

    def end(self, number: int) -> Batch:
        """Forget a batch that will touch nothing any more."""
        batch = self._batches.pop(number, None)
        return self.batch(number) if batch is None else batch

    @property
    def waiting(self) -> bool:
        """Whether anything is queued, be there room for it or not."""
        return bool(self.loads.heaps or self.backups.heaps)

    def flushable(self) -> bool:
        """Return whether there is a batch to issue."""
        return self.waiting and (
            self._room(Direction.LOAD) is not None or self._room(Direction.BACKUP) is not None
        )

    def flush(self, limit: Callable[[Piece], int]) -> Iterator[Batch]:
        """Yield what is issued now, at most one batch per direction; each is to be noted before the next.

        Args:
            limit: Up to which layer a piece may go.
        """
        load, backup = self._room(Direction.LOAD), self._room(Direction.BACKUP)
        if load is None or backup is None:
            if load is not None or backup is not None:
                yield self._issue(Direction.BACKUP if load is None else Direction.LOAD, limit)
            return
        # Loads first, but a backup that is due a patience earlier goes before them.
        late = backup.request.due + PATIENCE < load.request.due
        first, second = (backup, load) if late else (load, backup)
        yield self._issue(first.request.direction, limit)
        if self._room(second.request.direction) is not None:
            yield self._issue(second.request.direction, limit)

    def _room(self, direction: Direction) -> Piece | None:
        """Return the most urgent piece of a direction if it may be issued now."""
        queue = self.loads if direction is Direction.LOAD else self.backups
        head = queue.head() if queue.heaps else None
        if head is None or (self.budget.bounded and not self.budget.has_room(head)):
            return None
        if len(self._batches) >= MAX_FLIGHTS and self._crowded(direction, head.request.due):
            return None
        return head

    def _crowded(self, direction: Direction, due: float) -> bool:
        """Return whether enough is in flight that may go on to its end, some of it at least as urgent as `due`."""
        free = [
            batch.due
            for batch in self._batches.values()
            if batch.direction is direction and not batch.closed and batch.limit == batch.last
        ]
        return len(free) >= MAX_FLIGHTS and min(free) <= due

    def _issue(self, direction: Direction, limit: Callable[[Piece], int]) -> Batch:
        queue = self.loads if direction is Direction.LOAD else self.backups
        pieces = queue.take(*self.budget.of_batch())
        self._last += 1
        head = pieces[0]
        batch = Batch(
            self._last,
            direction,
            head.request.route,
            pieces,
            head.first,
            head.last,
            limit=limit(head),
            nbytes=sum(map(share, pieces)),
            due=head.request.due,
            landed=head.first,
        )
        self._batches[batch.id] = batch
        self.budget.issue(batch)
        return batch
