"""Metrics: what a scrape says, read by Prometheus's own parser."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

import torch
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import offload
from offload.counters import SIZE_BOUNDS, Counters
from offload.metrics import Collector
from offload.trace import Tracer

Sample = tuple[str, frozenset[tuple[str, str]]]


@attrs.define(eq=False)
class Counted:
    """Something with counters, as a scheduler has."""

    counters: Counters = attrs.field(factory=Counters)


def scrape(registry: CollectorRegistry) -> dict[Sample, float]:
    """Return every sample of a scrape, as Prometheus's parser reads it."""
    return samples(generate_latest(registry).decode())


def samples(text: str) -> dict[Sample, float]:
    """Return every sample of an exposition."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(name: str, **labels: str) -> Sample:
    """Return a sample's key, on the default device and rank."""
    return name, frozenset({"device": "cpu", "rank": "0", **labels}.items())


@pytest.fixture
def counted() -> Counted:
    """Counters of nothing."""
    return Counted()


@pytest.fixture
def registry(counted: Counted) -> CollectorRegistry:
    """A registry that watches them."""
    collector, registry = Collector(), CollectorRegistry()
    collector.watch(counted, device="cpu")
    registry.register(collector)
    return registry


def test_units_and_names(counted: Counted, registry: CollectorRegistry) -> None:
    """Counts come out in base units under names without colons."""
    load = counted.counters.load
    load.admit()
    load.issue(1 << 20, 2_000_000)
    load.moved(1_000_000_000, 1_500_000_000, 1 << 20, 8, 2)
    load.drain(1 << 20)
    load.settle()
    load.ready()
    load.waited(3_000_000)
    counted.counters.forwarded(2_000_000_000)
    found = scrape(registry)
    assert found[at("offload_requests_total", direction="load")] == 1
    assert found[at("offload_transfer_bytes_total", direction="load")] == 1 << 20
    assert found[at("offload_transfer_busy_seconds_total", direction="load")] == 0.5
    assert found[at("offload_ops_total", direction="load")] == 8
    assert found[at("offload_transfers_total", direction="load")] == 2
    assert found[at("offload_layer_waits_total", direction="load", outcome="ready")] == 1
    assert found[at("offload_layer_waits_total", direction="load", outcome="stalled")] == 1
    assert found[at("offload_layer_wait_seconds_sum", direction="load")] == 0.003
    assert found[at("offload_queue_seconds_sum", direction="load")] == 0.002
    assert found[at("offload_forward_seconds_total")] == 2.0
    assert found[at("offload_inflight_bytes", direction="load")] == 0
    assert not any(":" in name for name, _ in found)


def test_histogram_is_cumulative(counted: Counted, registry: CollectorRegistry) -> None:
    """A value counts in its own bucket, whose bound it may equal, and in every larger one."""
    for nbytes in (1, SIZE_BOUNDS[0], SIZE_BOUNDS[0] + 1, SIZE_BOUNDS[-1] + 1):
        counted.counters.backup.issue(nbytes, 0)
    found = scrape(registry)
    name = "offload_transfer_size_bytes_bucket"
    bounds = [str(float(bound)) for bound in (*SIZE_BOUNDS[:2], SIZE_BOUNDS[-1])]
    values = {dict(labels)["le"]: v for (n, labels), v in found.items() if n == name and v}
    by_number = {float(bound): value for bound, value in values.items()}
    assert [by_number[float(bound)] for bound in bounds] == [2, 3, 3]
    assert by_number[float("inf")] == 4


def test_overlapping_copies_count_once(counted: Counted, registry: CollectorRegistry) -> None:
    """Busy time is a union: two copies at once never look faster than the link, nor slower."""
    for _ in range(2):
        counted.counters.load.moved(0, 1_000_000_000, 500, 1, 1)
    found = scrape(registry)
    busy = found[at("offload_transfer_busy_seconds_total", direction="load")]
    assert found[at("offload_transfer_bytes_total", direction="load")] / busy == 1000


CHANGES: dict[str, Callable[[Counters], None]] = {
    "failed": lambda c: c.load.settle(failed=OSError("x")),
    "cancelled": lambda c: c.load.settle(cancelled=True),
    "withdrawn": lambda c: c.load.withdraw(),
    "late copy": lambda c: c.load.moved(5, 3, 0, 0, 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_counters_never_fall(
    counted: Counted, registry: CollectorRegistry, change: Callable[[Counters], None]
) -> None:
    """Whatever goes wrong with a transfer, no counter goes down."""
    counted.counters.load.moved(0, 10, 10, 1, 1)
    before = scrape(registry)
    change(counted.counters)
    after = scrape(registry)
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))


def test_two_ranks_share_one_set_of_metrics() -> None:
    """Two schedulers of a process appear under their own labels, in one family each."""
    collector, registry = Collector(), CollectorRegistry()
    for rank in range(2):
        counted = Counted()
        counted.counters.load.moved(0, 1, 100 + rank, 1, 1)
        collector.watch(counted, device=f"cuda:{rank}", rank=rank)
    registry.register(collector)
    text = generate_latest(registry).decode()
    values = [v for (n, _), v in samples(text).items() if n == "offload_transfer_bytes_total"]
    assert sorted(values) == [0, 0, 100, 101]
    assert text.count("# TYPE offload_transfer_bytes_total counter") == 1


@pytest.fixture
def served(registry: CollectorRegistry) -> Iterator[str]:
    """The registry behind a real HTTP server; yields its address."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def test_scrape_with_escaped_names(counted: Counted, served: str) -> None:
    """A scraper that asks for `escaping=underscores` gets the very names that dashboards ask for."""
    counted.counters.load.moved(0, 10, 10, 1, 1)
    kind = "application/openmetrics-text;version=1.0.0;escaping=underscores"
    for accept in ("text/plain", kind):
        request = urllib.request.Request(served, headers={"Accept": accept})
        with urllib.request.urlopen(request) as response:
            assert "offload_transfer_bytes_total{" in response.read().decode()


def test_serving_loop_exposes_metrics() -> None:
    """The serving example, asked for metrics, scrapes itself: bytes both ways, its pool, its failures of none."""
    example = Path(__file__).parents[1] / "examples" / "serving_loop.py"
    done = subprocess.run(
        [sys.executable, example, "--metrics"], capture_output=True, text=True, check=True
    )
    found = samples(done.stdout[done.stdout.index("# HELP") :])
    moved = [found[at("offload_transfer_bytes_total", direction=d)] for d in ("load", "backup")]
    assert min(moved) > 0
    assert found[at("offload_requests_total", direction="load")] == 12
    assert found[at("offload_host_pool_bytes", state="used")] > 0
    assert not any(name == "offload_failures_total" for name, _ in found)


def test_a_real_scheduler() -> None:
    """What a scheduler moved, held and kept shows up, with its host pool and its tracer."""
    spec = offload.PoolSpec.mha(
        num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    device = offload.DevicePool.allocate(spec, num_pages=8, device="cpu")
    host = offload.HostPool.like(device, num_pages=16, layout="page_first")
    tracer = Tracer(capacity=2)
    layers = [torch.nn.Identity() for _ in range(3)]
    with offload.start_scheduler(device, host, tracer=tracer) as scheduler:
        collector, registry = Collector(), CollectorRegistry()
        collector.watch(scheduler, device="cpu", host=host, tracer=tracer)
        registry.register(collector)
        host.pages.alloc(4)
        scheduler.backup(device_pages=[0, 1], host_pages=[0, 1]).result(timeout=5)
        load = scheduler.load(host_pages=[0, 1], device_pages=[2, 3])
        with offload.layerwise.attach(layers, load=load):
            for layer in layers:
                layer(torch.ones(1))
        load.result(timeout=5)
    found: dict[Any, float] = scrape(registry)
    page = host.nbytes // 16
    assert found[at("offload_transfer_bytes_total", direction="load")] == load.nbytes
    assert found[at("offload_transfer_bytes_total", direction="backup")] == load.nbytes
    assert found[at("offload_host_pool_bytes", state="used")] == 4 * page
    assert found[at("offload_host_pool_bytes", state="free")] == 12 * page
    assert found[at("offload_forward_seconds_total")] > 0
    assert found[at("offload_trace_dropped_total")] > 0
    waits = [v for (name, _), v in found.items() if name == "offload_layer_waits_total"]
    assert sum(waits) == 3
    assert threading.active_count() >= 1
