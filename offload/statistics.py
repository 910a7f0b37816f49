"""What `scheduler.statistics()` returns: frozen numbers, each with its meaning."""

from __future__ import annotations

import attrs

from offload.counters import DirectionCounters


@attrs.frozen
class DirectionStatistics:
    """One direction since the scheduler opened."""

    submitted: int
    """Requests admitted."""

    settled: int
    """Requests settled: done, failed or cancelled."""

    cancelled: int
    """Requests that somebody cancelled."""

    failed: int
    """Requests that failed, whether or not anybody awaited them."""

    ops: int
    """Copies asked for, one per page, component and layer, before neighbours were joined."""

    transfers: int
    """Copies made."""

    nbytes: int
    """Bytes that landed, counted when they did."""

    busy_s: float
    """Seconds in which at least one copy of this direction ran."""

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
    """A scheduler at one moment."""

    load: DirectionStatistics
    backup: DirectionStatistics

    queued_requests: int
    """Requests submitted and not issued."""

    queued_bytes: int
    """Their bytes: what `Limits.max_queued_bytes` bounds."""

    inflight_requests: int
    """Requests issued whose bytes have not landed or drained. A layer of a streaming backup counts as one."""

    inflight_bytes: int
    """Their bytes: what `Limits.max_inflight_bytes` bounds."""

    parked: int
    """Calls of `load` and `backup` that wait for room."""

    batches: int
    """Batches issued since the scheduler opened."""
