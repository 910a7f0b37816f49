"""Plain counts of what one scheduler did since it opened: what `statistics()` and metrics are read from.

No locks, no clock, no library on the hot path: an integer goes up. Who may raise what, so that no count is
lost without a lock:

    requests    loop's thread            submitted, issued, settled
    copies      the stream's own thread  moved
    waits       any thread               ready, fenced, waited (they count atomically)

Units are bytes and nanoseconds; readers convert. The names are those of the metrics in `metrics.py`.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import attrs

QUEUE_BOUNDS_NS: Final = (*(k * 10**d for d in range(4, 9) for k in (1, 3)), 1_000_000_000)
"""10 us (a request issued in the same turn) to 1 s (somebody's deadline), about three per decade."""

SIZE_BOUNDS: Final = tuple(64 << 10 << 2 * i for i in range(7))
"""64 KiB (one page of one layer) to 256 MiB (a long prompt), in powers of four."""

WAIT_BOUNDS_NS: Final = QUEUE_BOUNDS_NS
"""The same steps: below 10 us a wait cannot be told from the hook itself."""


class Tally:
    """A count that threads raise without a lock: `next(tally.count)` is atomic. Reading it costs a count."""

    __slots__ = ("_lock", "_reads", "count")

    def __init__(self) -> None:
        self.count = itertools.count()
        self._reads = 0
        self._lock = threading.Lock()

    def read(self) -> int:
        """Return how often `count` was raised by others."""
        with self._lock:
            self._reads += 1
            return next(self.count) - (self._reads - 1)


@attrs.define(eq=False)
class Histogram:
    """How many values fell at or below each bound; the last bucket takes the rest."""

    bounds: Sequence[int]
    buckets: list[int] = attrs.field(init=False)
    total: int = attrs.field(default=0, init=False)
    """Sum of all values."""

    def __attrs_post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def observe(self, value: int) -> None:
        """Count one value."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.buckets)


@attrs.define(eq=False)
class DirectionCounters:
    """The counts of one direction, `load` or `backup`."""

    submitted: int = attrs.field(default=0, init=False)
    """Requests admitted."""
    settled: int = attrs.field(default=0, init=False)
    """Requests settled, however."""
    cancelled: int = attrs.field(default=0, init=False)
    """Requests that somebody cancelled."""
    failures: dict[str, int] = attrs.field(factory=dict, init=False)
    """Requests that failed, by reason: the class name of the cause."""
    queue_depth: int = attrs.field(default=0, init=False)
    """Requests admitted and not yet issued or settled, now."""
    inflight_bytes: int = attrs.field(default=0, init=False)
    """Bytes of requests issued and not yet landed or drained, now."""
    ops: int = attrs.field(default=0, init=False)
    """Copies asked for, before merging and coalescing."""
    transfers: int = attrs.field(default=0, init=False)
    """Copies made."""
    transfer_bytes: int = attrs.field(default=0, init=False)
    """Bytes that landed."""
    busy_ns: int = attrs.field(default=0, init=False)
    """Time in which at least one copy ran: the union of their intervals, not the sum."""
    queue: Histogram = attrs.field(factory=lambda: Histogram(QUEUE_BOUNDS_NS), init=False)
    """From submit to issue, nanoseconds."""
    sizes: Histogram = attrs.field(factory=lambda: Histogram(SIZE_BOUNDS), init=False)
    """Bytes per request."""
    waits: Histogram = attrs.field(factory=lambda: Histogram(WAIT_BOUNDS_NS), init=False)
    """Waits for a layer that suspended, nanoseconds."""
    _ready: Tally = attrs.field(factory=Tally, init=False)
    _fenced: Tally = attrs.field(factory=Tally, init=False)
    _busy_until: int = attrs.field(default=0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def admit(self) -> None:
        """Count a request that was admitted."""
        self.submitted += 1
        self.queue_depth += 1

    def issue(self, nbytes: int, queued_ns: int) -> None:
        """Count a request that left the queue with its batch."""
        self.queue_depth -= 1
        self.inflight_bytes += nbytes
        self.queue.observe(queued_ns)
        self.sizes.observe(nbytes)

    def withdraw(self) -> None:
        """Count a queued request that will never be issued."""
        self.queue_depth -= 1

    def drain(self, nbytes: int) -> None:
        """Count the end of an issued request's traffic: landed, or drained after a failure or a cancel."""
        self.inflight_bytes -= nbytes

    def settle(self, *, failed: BaseException | None = None, cancelled: bool = False) -> None:
        """Count a settled request."""
        self.settled += 1
        if cancelled:
            self.cancelled += 1
        elif failed is not None:
            reason = type(failed).__name__
            self.failures[reason] = self.failures.get(reason, 0) + 1

    def moved(self, start_ns: int, end_ns: int, nbytes: int, ops: int, transfers: int) -> None:
        """Count one landed layer of a batch. Copies of a direction are told in the order of their end."""
        self.transfer_bytes += nbytes
        self.ops += ops
        self.transfers += transfers
        if end_ns > self._busy_until:
            self.busy_ns += end_ns - max(start_ns, self._busy_until)
            self._busy_until = end_ns

    def ready(self) -> None:
        """Count a wait that found its layer landed."""
        next(self._ready.count)

    def fenced(self) -> None:
        """Count a wait that was given to a compute stream: the host went on, and did not see it end."""
        next(self._fenced.count)

    def waited(self, ns: int) -> None:
        """Count a wait that suspended for `ns`."""
        with self._lock:
            self.waits.observe(ns)

    @property
    def waits_ready(self) -> int:
        """Waits that found their layer landed."""
        return self._ready.read()

    @property
    def waits_fenced(self) -> int:
        """Waits that were given to a compute stream."""
        return self._fenced.read()


@attrs.define(eq=False)
class Counters:
    """Everything that one scheduler counts."""

    load: DirectionCounters = attrs.field(factory=DirectionCounters, init=False)
    backup: DirectionCounters = attrs.field(factory=DirectionCounters, init=False)
    forward_ns: int = attrs.field(default=0, init=False)
    """Time from the first layer to the last one of forward passes that `layerwise.attach` saw."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def forwarded(self, ns: int) -> None:
        """Count a forward pass. Any thread."""
        with self._lock:
            self.forward_ns += ns

    def of(self, direction: str) -> DirectionCounters:
        """Return the counts of `"load"` or `"backup"`."""
        return self.load if direction == "load" else self.backup
