"""How much is queued, how much is in flight, and whether more may be issued."""

from __future__ import annotations

import attrs

from offload.core.batch import Batch, Limits, Piece, share
from offload.core.request import Request

UNBOUNDED = 1 << 62
"""More bytes, and more pages, than anybody has."""


@attrs.define(eq=False)
class Budget:
    """Counts what was submitted and what was issued, against the limits."""

    limits: Limits

    queued_bytes: int = 0
    queued_requests: int = 0
    inflight_bytes: int = 0
    inflight_requests: int = 0

    bounded: bool = attrs.field(init=False)
    """Whether there is a bound on what is in flight. A batch that waits for another would then hold what that
    one needs: so a piece is issued only when nobody is ahead of it."""

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self.bounded = (
            limits.max_inflight_bytes is not None or limits.max_inflight_requests is not None
        )

    def queue(self, request: Request) -> None:
        """Count a request that was submitted."""
        self.queued_bytes += request.nbytes
        self.queued_requests += 1

    def dequeue(self, owner: Piece) -> None:
        """Count a request that left the queue, once: what goes on alone was counted before."""
        if not owner.alone:
            self.queued_bytes -= owner.request.nbytes
            self.queued_requests -= 1

    def has_room(self, head: Piece) -> bool:
        """Return whether a piece may be issued now; with nothing in the air, any may."""
        most, nbytes = self.limits.max_inflight_bytes, self.inflight_bytes + share(head)
        if most is not None and self.inflight_bytes and nbytes > most:
            return False
        most = self.limits.max_inflight_requests
        return most is None or self.inflight_requests < most

    def of_batch(self) -> tuple[int, int, int | None]:
        """Return the bytes, pages and requests of one batch: its own budget, and what may still be in flight."""
        limits = self.limits
        nbytes, pages = limits.max_batch_bytes or UNBOUNDED, limits.max_batch_ops or UNBOUNDED
        if limits.max_inflight_bytes is not None:
            nbytes = min(nbytes, max(1, limits.max_inflight_bytes - self.inflight_bytes))
        most = limits.max_batch_requests
        if limits.max_inflight_requests is not None:
            room = limits.max_inflight_requests - self.inflight_requests
            most = room if most is None else min(most, room)
        return nbytes, pages, most

    def issue(self, batch: Batch) -> None:
        """Count a batch that was issued."""
        self.inflight_bytes += batch.nbytes
        self.inflight_requests += len(batch.pieces)

    def close(self, batch: Batch) -> None:
        """Count a batch that has landed, or drained."""
        batch.closed = True
        self.inflight_bytes -= batch.nbytes
        self.inflight_requests -= len(batch.pieces)
