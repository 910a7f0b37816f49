"""The recording half of a tracer: what schedulers, flights and hooks call while things happen.

Every site is one check, then one call with positional integers that the caller already has
(`time.perf_counter_ns`; a request, a batch and a layer are small integers, a direction is `"load"` or `"backup"`):

    if tracer is not None and tracer.active:
        tracer.copy(...)

| call | when | thread |
|---|---|---|
| `tags()` | at submit, in the caller's frame; keep what it returns for `request` | submitter |
| `plan(batch, direction, stream, start, end, requests)` | once per batch, when it has been planned, before its first copy | any |
| `copy(batch, direction, stream, layer, issue, issued, start, end, nbytes, ops, transfers)` | once per layer of a batch, when it has landed | any |
| `request(request, direction, submitted, issued, settled, nbytes, pages, outcome, tags)` | once per request, when it has settled | any |
| `wait(request, direction, layer, start, end, lane)` | once per wait for a layer that suspended | any |
| `ready()` | once per wait for a layer that did not suspend | any |
| `unmeasured()` | once per wait that was given to a compute stream and not measured | any |
| `layer(layer, start, end, lane, requests)` and `step(start, end, lane)` | by the hooks of a forward (`forward.py`) | any |
| `tick(start, end)` | once per turn of the scheduler | loop |
| `instant(name, ns, args)`, `counter(name, ns, values)` | cancels, errors; the used bytes of the host pools | any |
| `mark(name, **args)` | whatever the caller wants to see, such as `mark("evict", chat=3)` | any |
| `take(ended)`, `opened(device, in_flight)`, `closed()` | by the scheduler that records here, one at a time | loop |

`issue` and `issued` bracket the enqueueing of a layer on its stream; pass 0 for both when it was not stamped.
*Ops* are the copies that were asked for, before anything was merged; *transfers* the copies that were made.
`lane` is the number of a concurrent forward, from `take_lane()`; `ASYNC_LANE` (-1) for a task that awaited.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from offload.arguments import expect, integer, positive, refusal
from offload.core.stopwatch import Stopwatch
from offload.counters import Tally
from offload.errors import GeometryError, RequestError
from offload.trace import records as r
from offload.trace.clock import Anchor
from offload.trace.records import ASYNC_LANE, OpenRequest, Record, Scalar, Tags

DEFAULT_CAPACITY = 65_536
"""13 MB of tuples, and an export of well under a second: about 40 s of a busy 32-layer engine."""

EARLIER = 10**9
"""How far the numbers of an earlier scheduler's requests and batches are moved: more than anyone makes."""


@attrs.define(eq=False)
class Recorder:
    """A ring of records. Its methods are for the sites that record, not for who reads."""

    capacity: int = DEFAULT_CAPACITY
    rank: int = 0
    labels: Callable[[], Tags | None] | None = attrs.field(default=None, kw_only=True)
    """Called in the frame of each submit; what it returns is shown with the request and with its copies."""
    active: bool = attrs.field(default=True, kw_only=True)
    """Whether anything is recorded now. Sites check it; set it through `start`, `stop` and `window`."""
    anchor: Anchor = attrs.field(factory=Anchor.take, kw_only=True)
    """The time origin of an export."""
    clock: Callable[[], int] = attrs.field(default=time.perf_counter_ns, init=False)
    """Nanoseconds, as the driver of the scheduler that records here counts them."""
    stopwatch: Stopwatch | None = attrs.field(default=None, init=False, repr=False)
    """Measures the compute streams of that driver, where it has some and can."""
    period: int = attrs.field(default=0, init=False)
    """Goes up when a recording begins anew: what is recorded on change alone is then recorded again."""
    device: str = attrs.field(default="", init=False)
    """The device of the scheduler that records here, such as `cuda:0`."""
    _in_flight: Callable[[], Sequence[OpenRequest]] | None = attrs.field(default=None, init=False)
    _ended: Callable[[], bool] | None = attrs.field(default=None, init=False, repr=False)
    _ring: deque[Record] = attrs.field(init=False, repr=False)
    _seen: Tally = attrs.field(init=False, repr=False)
    _ready: Tally = attrs.field(init=False, repr=False)
    _unmeasured: Tally = attrs.field(init=False, repr=False)
    _steps: Iterator[int] = attrs.field(init=False, repr=False)
    _lanes: list[bool] = attrs.field(factory=list, init=False, repr=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        positive("Tracer", capacity=self.capacity)
        if integer("Tracer", "rank", self.rank) < 0:
            raise GeometryError("Tracer", expected={"rank": "at least 0"}, got={"rank": self.rank})
        if self.labels is not None and not callable(self.labels):
            raise refusal("Tracer", "labels", self.labels, "a function, or None")
        expect("Tracer", "active", self.active, bool, "True or False")
        expect("Tracer", "anchor", self.anchor, Anchor, "what Anchor.take() returned")
        self._forget()

    def _forget(self) -> None:
        self._ring = deque(maxlen=self.capacity)
        self._seen, self._ready, self._unmeasured = Tally(), Tally(), Tally()
        self._steps = itertools.count()
        self.period += 1

    def take(self, ended: Callable[[], bool]) -> None:
        """Become the tracer of a scheduler that opens, until `closed`.

        Args:
            ended: Whether that scheduler's loop has ended under it, so that it will never close.

        Raises:
            RequestError: It is another's.
        """
        with self._lock:
            if self._ended is not None and not self._ended():
                raise RequestError(
                    "this Tracer records a scheduler that is open. Close that one first, or give each "
                    "its own: Tracer(rank=1) for the second; `offload merge` puts their traces on one "
                    "clock."
                )
            self._ended = ended

    def opened(self, device: str, in_flight: Callable[[], Sequence[OpenRequest]]) -> None:
        """Learn whose recording this is, and whom an export asks for requests that have not settled.

        Each scheduler numbers its requests and batches from 1. What an earlier one has recorded gets other
        numbers now, so that its copies are not taken for those of the new one.
        """
        self.device = device
        self._in_flight = in_flight
        earlier = [r.renumbered(record, EARLIER) for record in list(self._ring)]
        self._ring.clear()
        self._ring.extend(earlier)

    def closed(self) -> None:
        """Learn that the scheduler that recorded here has no requests any more."""
        self._in_flight = self._ended = self.stopwatch = None

    def tags(self) -> Tags | None:
        """Return the caller's labels as they are now. What `labels` raises is raised to the submitter."""
        return None if self.labels is None else self.labels()

    def plan(
        self,
        batch: int,
        direction: str,
        stream: str,
        start: int,
        end: int,
        requests: tuple[int, ...],
    ) -> None:
        """Record that a batch was planned, and which requests it carries."""
        self._ring.append((r.PLAN, start, end, batch, direction, stream, requests))
        next(self._seen.count)

    def copy(
        self,
        batch: int,
        direction: str,
        stream: str,
        layer: int,
        issue: int,
        issued: int,
        start: int,
        end: int,
        nbytes: int,
        ops: int = 1,
        transfers: int = 1,
    ) -> None:
        """Record one layer of a batch that has landed."""
        self._ring.append(
            (
                r.COPY,
                start,
                end,
                issue,
                issued,
                batch,
                direction,
                stream,
                layer,
                nbytes,
                ops,
                transfers,
            )
        )
        next(self._seen.count)

    def request(
        self,
        request: int,
        direction: str,
        submitted: int,
        issued: int,
        settled: int,
        nbytes: int,
        pages: int,
        outcome: str,
        tags: Tags | None = None,
    ) -> None:
        """Record a settled request. `issued` is 0 when it never was; `outcome` is its final state."""
        self._ring.append(
            (
                r.REQUEST,
                submitted,
                settled,
                issued,
                request,
                direction,
                nbytes,
                pages,
                outcome,
                tags,
            )
        )
        next(self._seen.count)

    def wait(
        self, request: int, direction: str, layer: int, start: int, end: int, lane: int = ASYNC_LANE
    ) -> None:
        """Record a wait that suspended: a thread's on `lane`, or a task's."""
        self._ring.append((r.WAIT, start, end, request, direction, layer, lane))
        next(self._seen.count)

    def ready(self) -> None:
        """Count a wait that found its layer landed."""
        next(self._ready.count)

    def unmeasured(self) -> None:
        """Count a wait of a compute stream whose length nobody knows."""
        next(self._unmeasured.count)

    def step(self, start: int, end: int, lane: int = 0) -> None:
        """Record one forward pass."""
        self._ring.append((r.STEP, start, end, lane, next(self._steps)))
        next(self._seen.count)

    def layer(
        self, layer: int, start: int, end: int, lane: int = 0, requests: tuple[int, ...] = ()
    ) -> None:
        """Record the compute of one layer, and the loads whose pages it read."""
        self._ring.append((r.LAYER, start, end, layer, lane, requests))
        next(self._seen.count)

    def tick(self, start: int, end: int) -> None:
        """Record one turn of the scheduler."""
        self._ring.append((r.TICK, start, end))
        next(self._seen.count)

    def instant(self, name: str, ns: int, args: Mapping[str, Scalar] | None = None) -> None:
        """Record something that has no length: `cancel`, `error`."""
        self._ring.append((r.INSTANT, ns, ns, name, args))
        next(self._seen.count)

    def counter(self, name: str, ns: int, values: Mapping[str, int]) -> None:
        """Record values that hold from now on, such as `"host pool", {"used": 3 << 30}` in bytes."""
        self._ring.append((r.COUNTER, ns, ns, name, values))
        next(self._seen.count)

    def take_lane(self) -> int:
        """Return the lowest lane that no concurrent forward uses; give it back with `free_lane`."""
        with self._lock:
            if False in self._lanes:
                lane = self._lanes.index(False)
                self._lanes[lane] = True
            else:
                lane = len(self._lanes)
                self._lanes.append(True)
            return lane

    def free_lane(self, lane: int) -> None:
        """Give a lane back."""
        with self._lock:
            assert self._lanes[lane], f"lane {lane} is not taken"
            self._lanes[lane] = False
