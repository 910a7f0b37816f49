"""What is written down about requests: counted always, logged now and then, traced on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from offload.core.batch import State
from offload.core.stopwatch import Interval, Mark
from offload.entry import Entry
from offload.errors import told
from offload.logs import SLOW_NS, RateLimited
from offload.trace import ASYNC_LANE, OpenRequest, Tracer
from offload.trace.forward import ForwardTrace
from offload.trace.pools import PoolUse


@attrs.define(eq=False)
class Ledger:
    """The counts, the log lines and the trace of one scheduler."""

    tracer: Tracer | None
    clock: Callable[[], int]
    """Nanoseconds, on the driver's clock."""

    _pools: PoolUse
    _failures: RateLimited = attrs.field(factory=RateLimited)
    _slow: RateLimited = attrs.field(factory=RateLimited)

    def issued(self, entries: Iterable[Entry], now: int) -> None:
        """Write down that requests are with a stream; each is counted once."""
        for entry in entries:
            if not entry.issued_ns:
                entry.issued_ns = now
                entry.counters.issue(entry.request.nbytes, now - entry.submitted_ns)

    def settled(self, entry: Entry, state: State) -> None:
        """Write down how a request ended."""
        failed = entry.error if state is State.FAILED else None
        cancelled = state is State.CANCELLED
        entry.counters.settle(failed=failed, cancelled=cancelled)
        now, tracer = self.clock(), self.tracer
        if state is State.FAILED:
            why = None if failed is None else told(failed)
            self._failures.warning("%r failed: %s", entry, why)
        elif entry.issued_ns and now - entry.issued_ns > SLOW_NS:
            self._slow.warning("%r took %.1f s", entry, (now - entry.issued_ns) / 1e9)
        if tracer is not None and tracer.active:
            request = entry.request
            tracer.request(
                request.id, request.direction, entry.submitted_ns, entry.issued_ns,
                now, request.nbytes, request.num_pages, state, entry.tags,
            )  # fmt: skip
            if state is not State.DONE:
                self.mark("cancel" if cancelled else "error", failed, request=request.id)

    def uncounted(self, error: Exception) -> None:
        """Write down that copies landed that their backend could not count."""
        self._failures.warning("copies landed that cannot be counted: %s", told(error))

    def mark(self, what: str, error: BaseException | None, **args: int) -> None:
        """Mark in the trace that something went otherwise."""
        if self.tracer is not None:
            why = {} if error is None else {"error": type(error).__name__}
            self.tracer.mark(what, **args, **why)

    def waited(
        self, entry: Entry, layer: int, start_ns: int, forward: ForwardTrace | None = None
    ) -> None:
        """Count a wait for a layer; `start_ns` is 0 when it did not have to wait. Any thread."""
        counters, tracer = entry.counters, self.tracer
        if not start_ns:
            counters.ready()
            if tracer is not None and tracer.active:
                tracer.ready()
            return
        counters.waited(self.clock() - start_ns)
        self._draw(entry, layer, start_ns, forward)

    def _draw(self, entry: Entry, layer: int, start_ns: int, forward: ForwardTrace | None) -> None:
        """Trace a wait of the host that is over now."""
        tracer = self.tracer
        if forward is not None:
            forward.waited(entry.request.id, layer)
        elif tracer is not None and tracer.active:
            end = self.clock()
            tracer.wait(entry.request.id, entry.direction, layer, start_ns, end, ASYNC_LANE)

    def point(self) -> Mark | None:
        """Mark the calling thread's compute stream, where somebody records and the driver can."""
        tracer = self.tracer
        if tracer is None or not tracer.active or tracer.stopwatch is None:
            return None
        return tracer.stopwatch.mark()

    def fenced(
        self,
        entry: Entry,
        layer: int,
        start_ns: int,
        before: Mark | None,
        forward: ForwardTrace | None = None,
    ) -> None:
        """Count a fence that put a compute stream behind a layer that had not landed. Any thread.

        Args:
            start_ns: When the host began to wait for the layer's issue; 0 when it did not wait.
            before: The stream's point in front of the fence; a forward has its own.
        """
        counters, tracer = entry.counters, self.tracer
        if start_ns:
            counters.waited(self.clock() - start_ns)
        else:
            counters.fenced()
        if tracer is None or not tracer.active:
            return
        if tracer.stopwatch is None:
            tracer.unmeasured()
            if start_ns:
                self._draw(entry, layer, start_ns, forward)
        elif forward is not None:
            forward.waited(entry.request.id, layer)
        else:
            self._measure(tracer, entry, layer, before)

    def _measure(self, tracer: Tracer, entry: Entry, layer: int, before: Mark | None) -> None:
        """Trace what the stream waits between a point of it and this one, once it has passed both."""
        after = self.point()
        if before is None or after is None or tracer.stopwatch is None:
            tracer.unmeasured()
            return
        request, direction = entry.request.id, entry.direction

        def told(times: Interval) -> None:
            if times is None:
                tracer.unmeasured()
            else:
                tracer.wait(request, direction, layer, *times, ASYNC_LANE)

        tracer.stopwatch.between(before, after, told)

    def begin_turn(self) -> int:
        """Return when a turn of the loop began; 0 when nobody wants to know."""
        return self.clock() if self.tracer is not None and self.tracer.active else 0

    def end_turn(self, start: int) -> None:
        """Trace a turn, and how full the host pools are after it."""
        if start and self.tracer is not None:
            end = self.clock()
            self.tracer.tick(start, end)
            self._pools.sample(self.tracer, end)


def open_requests(entries: Iterable[Entry]) -> list[OpenRequest]:
    """Return the requests that have not settled, for a trace that is exported now. Any thread."""
    return [
        OpenRequest(
            entry.request.id,
            entry.direction,
            entry.submitted_ns,
            entry.issued_ns,
            entry.request.nbytes,
            entry.request.num_pages,
            entry.tags,
        )
        for entry in entries
        if entry.verdict() is None
    ]
