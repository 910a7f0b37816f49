"""A real scheduler on the threads driver, recorded: what it did is what the trace says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from offload.trace.check import check
from offload.trace.read import load as read
from offload.trace.read import timeline
from offload.trace.report import Report

LAYERS = 5
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
)
PAGE_BYTES = 4 * 2 * 8 * 4 * 2 * LAYERS
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
RID: ContextVar[str | None] = ContextVar("rid", default=None)


def pools() -> tuple[offload.DevicePool, offload.HostPool]:
    """A device pool and a host pool beside it."""
    device = offload.DevicePool.allocate(SPEC, num_pages=16, device="cpu")
    return device, offload.HostPool.like(device, num_pages=32, layout="page_first")


@contextmanager
def rid(name: str | None) -> Iterator[None]:
    """Set the caller's request name for a while."""
    token = RID.set(name)
    yield
    RID.reset(token)


def label() -> dict[str, str] | None:
    """Return the caller's request name as a label."""
    name = RID.get()
    return None if name is None else {"rid": name}


def by_category(path: Path, category: str) -> list[dict[str, Any]]:
    """Return a file's slices of one category."""
    events = read(path)["traceEvents"]
    return [e for e in events if e.get("cat") == f"offload.{category}" and e["ph"] in "Xb"]


async def serve(tracer: offload.Tracer) -> None:
    """Back pages up, then load three requests in one batch under a forward pass."""
    device, host = pools()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
    async with offload.open_scheduler(device, host, tracer=tracer) as scheduler:
        await (await scheduler.backup(device_pages=range(6), host_pages=range(6)))
        loads = []
        for number, name in enumerate(("req-7", "req-8", None)):
            with rid(name):
                pages = [2 * number, 2 * number + 1]
                loads.append(
                    await scheduler.load(host_pages=pages, device_pages=[8 + p for p in pages])
                )
        RID.set("other")
        with offload.layerwise.attach(model, load=loads):
            await anyio.to_thread.run_sync(model, torch.ones(1, 8))
        for load in loads:
            await load


@BACKENDS
def test_trace_tells_what_happened(backend: str, tmp_path: Path) -> None:
    """Slices, bytes, arrows and spans of a run are those of its requests; nothing that a reader drops."""
    tracer = offload.Tracer(labels=label)
    anyio.run(serve, tracer, backend=backend)
    path = tracer.export(tmp_path / "run.json.gz")
    assert check(path) == []
    loads, backups = by_category(path, "load"), by_category(path, "backup")
    assert Counter(e["args"]["layer"] for e in loads) == dict.fromkeys(range(LAYERS), 1)
    assert sum(e["args"]["nbytes"] for e in loads) == 6 * PAGE_BYTES
    assert sum(e["args"]["nbytes"] for e in backups) == 6 * PAGE_BYTES
    spans = [e for e in by_category(path, "request") if e["name"] == "request"]
    assert [e["args"]["outcome"] for e in spans] == ["done"] * 4
    flows = Counter((e["name"], e["ph"]) for e in read(path)["traceEvents"] if e["ph"] in "stf")
    assert flows == {
        **{("load", phase): LAYERS for phase in "stf"},
        **{("backup", phase): LAYERS for phase in "sf"},
    }


@BACKENDS
def test_labels_are_the_submitters(backend: str, tmp_path: Path) -> None:
    """Every layer of the merged batch shows both names of its submitters, whatever the context says later."""
    tracer = offload.Tracer(labels=label)
    anyio.run(serve, tracer, backend=backend)
    path = tracer.export(tmp_path / "run.json")
    assert {e["args"]["tags"] for e in by_category(path, "load")} == {"rid=req-7; rid=req-8"}
    assert not any("tags" in e["args"] for e in by_category(path, "backup"))


@BACKENDS
def test_report_counts_the_forward(backend: str, tmp_path: Path) -> None:
    """One step of five layers, each wait counted once as ready or stalled; the file says the same."""
    tracer = offload.Tracer()
    anyio.run(serve, tracer, backend=backend)
    report = tracer.report()
    assert (report.steps, report.requests, report.load.copies) == (1, 4, LAYERS)
    assert report.waits + report.ready_waits == 3 * LAYERS
    assert 0 <= report.stall_ratio <= 1
    assert report.ops >= report.transfers > 0
    assert Report.of(timeline(tracer.export(tmp_path / "run.json"))) == report


@BACKENDS
def test_fences_that_nobody_measures_are_no_stall_of_nothing(backend: str, tmp_path: Path) -> None:
    """The simulator orders streams and has no stopwatch: the report counts such waits, and so does its file."""
    tracer = offload.Tracer()

    async def body() -> None:
        sim = SimDriver(seed=0)
        async with offload.open_scheduler(*pools(), driver=sim, tracer=tracer) as scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            async with anyio.create_task_group() as group:
                group.start_soon(load.issued, 0)
                await sim.advance(1e-6)
            load.fence(0)
            await sim.run_until_idle()
            load.fence(1)
            counts = scheduler.counters.load
            assert (counts.waits_fenced, counts.waits_ready, counts.waits.count) == (1, 1, 0)

    anyio.run(body, backend=backend)
    report = tracer.report()
    assert (report.unmeasured_waits, report.ready_waits, report.waits) == (1, 1, 0)
    assert Report.of(timeline(tracer.export(tmp_path / "run.json"))) == report


@BACKENDS
def test_window_bounds_what_is_recorded(backend: str) -> None:
    """Only what happens in a window is recorded, though the scheduler was open before."""
    tracer = offload.Tracer(active=False)

    async def body() -> None:
        sim = SimDriver(seed=0)
        async with offload.open_scheduler(*pools(), driver=sim, tracer=tracer) as scheduler:
            await scheduler.backup(device_pages=[0], host_pages=[0])
            await sim.run_until_idle()
            assert tracer.timeline().records == 0
            with tracer.window():
                await scheduler.backup(device_pages=[1], host_pages=[1])
                await sim.run_until_idle()
            await scheduler.backup(device_pages=[2], host_pages=[2])
            await sim.run_until_idle()

    anyio.run(body, backend=backend)
    assert [request.outcome for request in tracer.timeline().requests] == ["done"]


def _cancel(scheduler: offload.BlockingScheduler) -> None:
    with scheduler.hold():
        scheduler.load(host_pages=[0], device_pages=[0]).cancel()


def _stream(scheduler: offload.BlockingScheduler) -> None:
    backup = scheduler.backup(device_pages=[0], host_pages=[0], streaming=True)
    for layer in range(LAYERS):
        backup.layer_written(layer)
    backup.result(timeout=5)


@pytest.mark.parametrize(
    ("act", "outcome"), [(_cancel, "cancelled"), (_stream, "done")], ids=["cancel", "streaming"]
)
def test_outcomes(
    act: Callable[[offload.BlockingScheduler], None], outcome: str, tmp_path: Path
) -> None:
    """A cancelled request says so; a streaming backup is one request over several batches."""
    tracer = offload.Tracer()
    with offload.start_scheduler(*pools(), tracer=tracer) as scheduler:
        act(scheduler)
    path = tracer.export(tmp_path / "run.json")
    spans = [e["args"]["outcome"] for e in by_category(path, "request") if e["name"] == "request"]
    assert spans == [outcome]
    assert check(path) == []


def test_open_request_is_in_an_export(tmp_path: Path) -> None:
    """An export while a streaming backup waits for its forward shows it unfinished."""
    tracer = offload.Tracer()
    with offload.start_scheduler(*pools(), tracer=tracer) as scheduler:
        backup = scheduler.backup(device_pages=[0], host_pages=[0], streaming=True)
        path = tracer.export(tmp_path / "run.json")
        backup.cancel()
    spans = [e["args"] for e in by_category(path, "request") if e["name"] == "request"]
    assert [span.get("unfinished") for span in spans] == [True]


def recorded(path: Path, phase: str, name: str) -> list[dict[str, Any]]:
    """Return the args of a file's events of one phase and name, in order."""
    return [
        e["args"] for e in read(path)["traceEvents"] if (e["ph"], e.get("name")) == (phase, name)
    ]


def test_what_went_otherwise_is_marked(tmp_path: Path) -> None:
    """A cancel, a copy that raised and the request that it failed are instants that say whose they are."""
    tracer, hooks = offload.Tracer(), Hooks()
    driver = ThreadsDriver(hooks=hooks)
    with offload.start_scheduler(*pools(), driver=driver, tracer=tracer) as scheduler:
        with scheduler.hold():
            cancelled = scheduler.load(host_pages=[0], device_pages=[0])
            cancelled.cancel()
        hooks.fail(OSError("planted"), nth=1)
        failed = scheduler.load(host_pages=[1], device_pages=[1])
        with pytest.raises(offload.TransferFailed):
            failed.result(timeout=5)
        scheduler.load(host_pages=[2], device_pages=[2]).result(timeout=5)
        tracer.mark("evict", pages=3)
    path = tracer.export(tmp_path / "run.json")
    assert recorded(path, "i", "cancel") == [{"request": cancelled.id}]
    assert recorded(path, "i", "error") == [
        {"batch": 1, "layer": 0, "error": "OSError"},
        {"request": failed.id, "error": "OSError"},
    ]
    assert recorded(path, "i", "evict") == [{"pages": 3}]
    assert check(path) == []


def test_use_of_the_host_pool_is_a_counter(tmp_path: Path) -> None:
    """Its used bytes are recorded when they have changed, and once at the beginning of each window."""
    tracer = offload.Tracer(active=False)
    device, host = pools()
    page = host.nbytes // host.num_pages
    used: list[list[int]] = []
    with offload.start_scheduler(device, host, tracer=tracer) as scheduler:
        kept = host.pages.alloc(2)
        for more in (0, 3):
            host.pages.alloc(more)
            with tracer.window():
                for _ in range(3):
                    scheduler.backup(device_pages=[0], host_pages=kept[:1]).result(timeout=5)
            path = tracer.export(tmp_path / "run.json")
            used.append([args["used"] for args in recorded(path, "C", "host pool")])
    assert used == [[2 * page], [2 * page, 5 * page]]


def test_counters_of_a_run_end_at_zero(tmp_path: Path) -> None:
    """Bytes in flight and queued requests of a real run rise and come back to nothing."""
    tracer = offload.Tracer()
    anyio.run(serve, tracer)
    path = tracer.export(tmp_path / "run.json")
    for name in ("bytes in flight", "queue"):
        values = recorded(path, "C", name)
        assert any(any(one.values()) for one in values)
        assert not any(values[-1].values())
        assert all(value >= 0 for one in values for value in one.values())


@BACKENDS
def test_a_real_copy_has_its_real_length(backend: str, tmp_path: Path) -> None:
    """A copy of 20 ms is 20,000 us long in the file, between its request's submit and the end of the wait for it."""
    tracer, hooks = offload.Tracer(), Hooks()
    hooks.delay(0.02, layer=0)

    async def body() -> None:
        driver = ThreadsDriver(hooks=hooks)
        async with offload.open_scheduler(*pools(), driver=driver, tracer=tracer) as scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            await load.layer(0)
            await load

    anyio.run(body, backend=backend)
    path = tracer.export(tmp_path / "run.json")
    copy, wait = by_category(path, "load")[0], by_category(path, "await")[0]
    submit = next(e for e in by_category(path, "request") if e["name"] == "request")
    assert 20_000 <= copy["dur"] + 0.001 <= 200_000
    native = tracer.timeline().copies[0]
    assert round(1000 * copy["dur"]) + 1 == native.end - native.start
    ended = next(e for e in read(path)["traceEvents"] if e["ph"] == "e" and e["cat"] == wait["cat"])
    assert submit["ts"] <= copy["ts"] <= copy["ts"] + copy["dur"] <= ended["ts"]


@BACKENDS
def test_a_second_is_a_million_microseconds(backend: str, tmp_path: Path) -> None:
    """Two loads a virtual second apart are that far apart in the file, whatever clock the driver has."""
    tracer = offload.Tracer()

    async def body() -> None:
        sim = SimDriver()
        async with offload.open_scheduler(*pools(), driver=sim, tracer=tracer) as scheduler:
            for page in range(2):
                await scheduler.load(host_pages=[page], device_pages=[page])
                await sim.advance(1.0)

    anyio.run(body, backend=backend)
    starts = [e["ts"] for e in by_category(tracer.export(tmp_path / "run.json"), "load")]
    assert starts[LAYERS] - starts[0] == pytest.approx(1_000_000, abs=1)


def test_one_tracer_for_one_scheduler_after_the_other(tmp_path: Path) -> None:
    """Both number their requests from 1, and yet each copy shows its own requests, and each wait its own copy."""
    tracer = offload.Tracer(labels=label)
    for name in ("first", "second"):
        with offload.start_scheduler(*pools(), tracer=tracer) as scheduler, rid(name):
            load = scheduler.load(host_pages=[0], device_pages=[0])
            assert load.id == 1
            load.result(timeout=5)
            with scheduler.hold():
                cancelled = scheduler.load(host_pages=[1], device_pages=[1])
                cancelled.cancel()
    path = tracer.export(tmp_path / "run.json")
    assert [e["args"]["tags"] for e in by_category(path, "load")] == [
        *["rid=first"] * LAYERS,
        *["rid=second"] * LAYERS,
    ]
    spans = [e["args"]["request"] for e in by_category(path, "request") if e["name"] == "request"]
    marked = [args["request"] for args in recorded(path, "i", "cancel")]
    assert spans == [1_000_000_001, 1_000_000_002, 1, 2]
    assert marked == [1_000_000_002, 2]
    assert check(path) == []
