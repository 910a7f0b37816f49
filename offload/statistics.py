"""What `scheduler.statistics()` returns: frozen numbers, each with its meaning."""

from __future__ import annotations

import attrs

from offload.counters import DirectionCounters


@attrs.frozen
class DirectionStatistics:
    """One direction since the scheduler opened.

    Attributes:
        submitted: Requests admitted.
        settled: Requests settled: done, failed or cancelled.
        cancelled: Requests that somebody cancelled.
        failed: Requests that failed, whether or not anybody awaited them.
        ops: Copies asked for, one per page, component and layer, before neighbours were joined.
        transfers: Copies made.
        nbytes: Bytes that landed, counted when they did.
        busy_s: Seconds in which at least one copy of this direction ran.
    """

    submitted: int
    settled: int
    cancelled: int
    failed: int
    ops: int
    transfers: int
    nbytes: int
    busy_s: float

    @classmethod
    def of(cls, counters: DirectionCounters) -> DirectionStatistics:
        """Return the numbers as they are now."""
        return cls(
            submitted=counters.submitted,
            settled=counters.settled,
            cancelled=counters.cancelled,
            failed=sum(counters.failures.values()),
            ops=counters.ops,
            transfers=counters.transfers,
            nbytes=counters.transfer_bytes,
            busy_s=counters.busy_ns / 1e9,
        )


@attrs.frozen
class Statistics:
    """A scheduler at one moment.

    Attributes:
        load: Loads since the scheduler opened.
        backup: Backups since the scheduler opened.
        queued_requests: Requests submitted and not issued.
        queued_bytes: Their bytes: what `Limits.max_queued_bytes` bounds.
        inflight_requests: Requests issued whose bytes have not landed or drained. A layer of a streaming
            backup counts as one.
        inflight_bytes: Their bytes: what `Limits.max_inflight_bytes` bounds.
        parked: Calls of `load` and `backup` that wait for room.
        batches: Batches issued since the scheduler opened.
    """

    load: DirectionStatistics
    backup: DirectionStatistics
    queued_requests: int
    queued_bytes: int
    inflight_requests: int
    inflight_bytes: int
    parked: int
    batches: int
