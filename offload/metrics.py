"""Prometheus metrics: a collector that reads the scheduler's plain counts when it is scraped.

Nothing here runs between scrapes. Names have no colons, units are base units, labels are few: a
direction, a device, a rank; never a request. No ratios either, for they cannot be summed over processes:

    GB/s          rate(offload_transfer_bytes_total[1m]) / rate(offload_transfer_busy_seconds_total[1m])
    coalescing    rate(offload_ops_total[1m]) / rate(offload_transfers_total[1m])
    stall share   rate(offload_layer_wait_seconds_sum[1m]) / rate(offload_forward_seconds_total[1m])

Needs the extra `prometheus`:

    collector = Collector()
    collector.watch(scheduler, device="cuda:0", host=host)
    prometheus_client.REGISTRY.register(collector)

or, for a process that serves nothing else, `serve(scheduler, device="cuda:0", host=host)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from offload.counters import Counters, DirectionCounters, Histogram
from offload.trace import Tracer
from offload.trace.pools import Pool

DIRECTIONS = ("load", "backup")
WHERE = ("device", "rank")
"""Labels of everything; `direction` comes before them where it applies."""


class Counted(Protocol):
    """A scheduler, by either face."""

    @property
    def counters(self) -> Counters:
        """Its live counts."""


@attrs.frozen
class Source:
    """One watched scheduler."""

    scheduler: Counted
    device: str
    rank: int
    host: Pool | None
    tracer: Tracer | None

    @property
    def labels(self) -> tuple[str, str]:
        """Where it is."""
        return self.device, str(self.rank)


@attrs.define(eq=False)
class Collector:
    """All watched schedulers of a process as one set of metrics. Register it once."""

    _sources: list[Source] = attrs.field(factory=list, init=False)

    def watch(
        self,
        scheduler: Counted,
        *,
        device: str = "",
        rank: int = 0,
        host: Pool | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Add a scheduler, and the host pool and the tracer whose sizes to show beside it."""
        self._sources.append(Source(scheduler, device, rank, host, tracer))

    def collect(self) -> Iterator[Metric]:
        """Read everything now: called by prometheus-client for each scrape."""
        yield from self._counters()
        yield self._failures()
        yield self._waits()
        yield from self._histograms()
        yield from self._gauges()
        yield from self._whole()

    def _directions(self) -> Iterator[tuple[tuple[str, str, str], DirectionCounters]]:
        for source in self._sources:
            for direction in DIRECTIONS:
                yield (direction, *source.labels), source.scheduler.counters.of(direction)

    def _counters(self) -> Iterator[Metric]:
        for name, help_, read in _COUNTERS:
            family = CounterMetricFamily(name, help_, labels=("direction", *WHERE))
            for labels, counts in self._directions():
                family.add_metric(labels, read(counts))
            yield family

    def _failures(self) -> Metric:
        labels = ("direction", *WHERE, "reason")
        family = CounterMetricFamily("offload_failures", "Requests that failed.", labels=labels)
        for where, counts in self._directions():
            for reason, number in sorted(counts.failures.copy().items()):
                family.add_metric((*where, reason), number)
        return family

    def _waits(self) -> Metric:
        family = CounterMetricFamily(
            "offload_layer_waits",
            "Waits for a layer: it had landed (ready), the waiter was held (stalled), or a compute stream "
            "was put behind it while the host went on (fenced).",
            labels=("direction", *WHERE, "outcome"),
        )
        for where, counts in self._directions():
            family.add_metric((*where, "ready"), counts.waits_ready)
            family.add_metric((*where, "stalled"), counts.waits.count)
            family.add_metric((*where, "fenced"), counts.waits_fenced)
        return family

    def _histograms(self) -> Iterator[Metric]:
        for name, help_, read, unit in _HISTOGRAMS:
            family = HistogramMetricFamily(name, help_, labels=("direction", *WHERE))
            for labels, counts in self._directions():
                histogram = read(counts)
                family.add_metric(labels, _cumulative(histogram, unit), histogram.total / unit)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        for name, help_, read in _GAUGES:
            family = GaugeMetricFamily(name, help_, labels=("direction", *WHERE))
            for labels, counts in self._directions():
                family.add_metric(labels, read(counts))
            yield family

    def _whole(self) -> Iterator[Metric]:
        forward = CounterMetricFamily(
            "offload_forward_seconds", "Time inside forward passes with hooks.", labels=WHERE
        )
        dropped = CounterMetricFamily(
            "offload_trace_dropped", "Trace records lost because the ring was full.", labels=WHERE
        )
        pool = GaugeMetricFamily(
            "offload_host_pool_bytes", "Host pool memory by state.", labels=(*WHERE, "state")
        )
        for source in self._sources:
            forward.add_metric(source.labels, source.scheduler.counters.forward_ns / 1e9)
            if source.tracer is not None:
                dropped.add_metric(source.labels, source.tracer.dropped)
            if source.host is not None:
                for state, nbytes in _pool_bytes(source.host).items():
                    pool.add_metric((*source.labels, state), nbytes)
        yield from (forward, dropped, pool)


def serve(
    scheduler: Counted, *, port: int = 0, device: str = "", rank: int = 0, host: Pool | None = None
) -> str:
    """Serve one scheduler's metrics on loopback, on a thread that ends with the process; return the address.

    Args:
        port: 0 takes a free one.
    """
    collector, registry = Collector(), CollectorRegistry()
    collector.watch(scheduler, device=device, rank=rank, host=host)
    registry.register(collector)
    server, _ = start_http_server(port, "127.0.0.1", registry)
    return f"http://127.0.0.1:{server.server_port}/metrics"


def _cumulative(histogram: Histogram, unit: float) -> Sequence[tuple[str, float]]:
    """Return the buckets as Prometheus wants them: each with all below it."""
    total, buckets = 0, []
    bounds = [*(f"{bound / unit:.10g}" for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, list(histogram.buckets), strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def _pool_bytes(pool: Pool) -> Mapping[str, int]:
    pages, page = pool.pages.statistics(), pool.nbytes // max(1, pool.num_pages)
    return {
        "free": pages.num_free * page,
        "used": pages.num_allocated * page,
        "leaving": pages.num_locked * page,
    }


_Read = Callable[[DirectionCounters], float]

_COUNTERS: Sequence[tuple[str, str, _Read]] = (
    ("offload_requests", "Requests admitted.", lambda c: c.submitted),
    ("offload_cancelled", "Requests that somebody cancelled.", lambda c: c.cancelled),
    ("offload_ops", "Copies asked for, before merging and coalescing.", lambda c: c.ops),
    ("offload_transfers", "Copies made.", lambda c: c.transfers),
    ("offload_transfer_bytes", "Bytes that landed.", lambda c: c.transfer_bytes),
    (
        "offload_transfer_busy_seconds",
        "Time in which at least one copy ran: overlapping copies count once.",
        lambda c: c.busy_ns / 1e9,
    ),
)
_GAUGES: Sequence[tuple[str, str, _Read]] = (
    ("offload_inflight_bytes", "Bytes issued and not yet landed.", lambda c: c.inflight_bytes),
    ("offload_queue_depth", "Requests admitted and not yet issued.", lambda c: c.queue_depth),
)
_HISTOGRAMS: Sequence[tuple[str, str, Callable[[DirectionCounters], Histogram], Any]] = (
    ("offload_queue_seconds", "From submit to issue.", lambda c: c.queue, 1e9),
    ("offload_transfer_size_bytes", "Bytes of a request.", lambda c: c.sizes, 1),
    ("offload_layer_wait_seconds", "Waits for a layer that held.", lambda c: c.waits, 1e9),
)
