"""The same promises on a real GPU: every io backend, order with compute, capture, and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload import DevicePool, HostPool, PoolSpec, Tracer, start_scheduler
from offload.core.kinds import Layout
from offload.core.strategy import HOST_ONLY
from offload.core.table import BUILT
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_torch import TorchCuda
from offload.errors import RequestError, UnsupportedPairError

pytestmark = pytest.mark.gpu

PATIENCE = 60.0
SPECS = {
    "mha": PoolSpec.mha(num_layers=3, page_size=16, num_kv_heads=8, head_dim=64, v_head_dim=32),
    "mla": PoolSpec.mla(num_layers=3, page_size=16, latent_dim=656, dtype=torch.uint8),
    "rows": PoolSpec.rows(num_layers=3, page_size=16, row_bytes=16 * 132),
}


def pools(name: str, layout: Layout) -> tuple[DevicePool, HostPool]:
    device = DevicePool.allocate(SPECS[name], num_pages=32, device="cuda")
    for part in device.geometry.components:
        for layer in range(device.num_layers):
            flat, _ = device.flat(part.name, layer)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, device="cuda"))
    return device, HostPool.like(device, num_pages=64, layout=layout)


def pages(pool: DevicePool, wanted: list[int]) -> list[torch.Tensor]:
    """Return copies of pages, over all components and layers, on the host."""
    return [
        pool.view(part.name, layer)[wanted].cpu()
        for part in pool.geometry.components
        for layer in range(pool.num_layers)
    ]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("io_backend", sorted(BUILT - HOST_ONLY))
@pytest.mark.parametrize("name", SPECS)
def test_a_round_trip_restores_every_byte(name: str, io_backend: str, layout: Layout) -> None:
    """Back up, overwrite, load elsewhere: what compute reads behind a fence is what was backed up."""
    device, host = pools(name, layout)
    mine, elsewhere, there = [3, 4, 5, 20, 9], [30, 1, 2, 7, 8], [60, 61, 62, 5, 0]
    before = pages(device, mine)
    try:
        opened = start_scheduler(device, host, io_backend=io_backend)
    except UnsupportedPairError:
        return  # a cell of the table that is a rejection; the table's own tests cover it
    with opened as scheduler:
        backup = scheduler.backup(device_pages=mine, host_pages=there)
        for layer in range(device.num_layers):
            backup.wait_issued(layer, timeout=PATIENCE)
            backup.fence(layer)
            for part in device.geometry.components:
                device.view(part.name, layer)[mine] = 0
        load = scheduler.load(host_pages=there, device_pages=elsewhere)
        for layer in range(device.num_layers):
            load.wait_issued(layer, timeout=PATIENCE)
            load.fence(layer)
        after = pages(device, elsewhere)
        load.result(timeout=PATIENCE)
        backup.result(timeout=PATIENCE)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_backup_waits_for_compute_that_is_queued() -> None:
    """What a slow kernel writes before the submit is what arrives in host memory."""
    device, host = pools("rows", Layout.PAGE_FIRST)
    with start_scheduler(device, host, io_backend="direct") as scheduler:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        for layer in range(device.num_layers):
            device.view("row", layer)[0] = 77
        scheduler.backup(device_pages=[0], host_pages=[0]).result(timeout=PATIENCE)
        assert all((host.view("row", layer)[0] == 77).all() for layer in range(device.num_layers))


def test_submits_on_a_capturing_stream_are_refused_and_the_waiters_live_on() -> None:
    """A capture in global mode does not break the driver's threads."""
    device, host = pools("rows", Layout.PAGE_FIRST)
    with start_scheduler(device, host, io_backend="direct") as scheduler:
        out = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out += 1
            with pytest.raises(RequestError):
                scheduler.load(host_pages=[0], device_pages=[0])
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=PATIENCE)


def test_a_capture_on_another_thread_stays_valid() -> None:
    """Submits, fences and landings on plain threads, and on the loop's, do not spoil a graph in global mode."""
    device, host = pools("rows", Layout.PAGE_FIRST)
    begun, done = threading.Event(), threading.Event()
    out, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            out.add_(1)
            begun.set()
            done.wait(PATIENCE)

    with start_scheduler(device, host) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=PATIENCE)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(1) as pool:
            captured = pool.submit(capture)
            assert begun.wait(PATIENCE)
            try:
                event.record()
                for after in ("compute", event, ()):
                    load = scheduler.load(host_pages=[1], device_pages=[1], after=after)
                    load.fence(0)
                    load.result(timeout=PATIENCE)
            finally:
                done.set()
            captured.result(PATIENCE)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 1).all()


@pytest.mark.parametrize("kind", [torch.cuda.Event, lambda: torch.Event("cuda")])
def test_an_event_that_is_recorded_again_stands_for_its_first_point(
    kind: Callable[[], torch.cuda.Event],
) -> None:
    """The writer is queued when the backup is submitted; the event passes at once on another stream then."""
    device, host = pools("rows", Layout.PAGE_FIRST)
    event, writer = kind(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with start_scheduler(device, host) as scheduler:
        with torch.cuda.stream(writer):
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
            for layer in range(device.num_layers):
                device.view("row", layer)[0] = 77
            event.record(writer)
        backup = scheduler.backup(device_pages=[0], host_pages=[0], after=event)
        event.record(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        backup.result(timeout=PATIENCE)
        assert all((host.view("row", layer)[0] == 77).all() for layer in range(device.num_layers))


def test_a_generic_stream_is_its_point_now() -> None:
    """`torch.Stream` has no handle of CUDA's, and is one of its streams all the same."""
    device, host = pools("rows", Layout.PAGE_FIRST)
    stream = torch.Stream("cuda")
    with start_scheduler(device, host) as scheduler:
        load = scheduler.load(host_pages=[0], device_pages=[0], after=stream)
        load.result(timeout=PATIENCE)
        with pytest.raises(RequestError, match="never recorded"):
            scheduler.load(host_pages=[0], device_pages=[0], after=torch.Event("cuda"))


def test_host_pools_are_pinned() -> None:
    """torch sees registered memory as pinned, so plain copies from it are asynchronous."""
    _, host = pools("mha", Layout.PAGE_FIRST)
    assert host.flat("k", 0)[0].is_pinned()


def test_own_streams_are_apart() -> None:
    """Load, backup and compute have handles of their own."""
    driver = CudaDriver("cuda")
    load, backup = driver.stream("load"), driver.stream("backup")
    handles = {stream.raw.cuda_stream for stream in (load, backup)}  # type: ignore[attr-defined]
    assert len(handles | {torch.cuda.current_stream().cuda_stream}) == 3
    driver.close()


def test_a_copy_lane_shows_the_copy_and_not_what_it_waited_for() -> None:
    """Behind a slow kernel a traced load starts when that is over, and is as long as its bytes take."""
    device, host = pools("mha", Layout.PAGE_FIRST_DIRECT)
    tracer = Tracer()
    with start_scheduler(device, host, io_backend="direct", tracer=tracer) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0], after=()).result(timeout=PATIENCE)
        before = tracer.clock()
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        scheduler.load(host_pages=[1], device_pages=[1]).result(timeout=PATIENCE)
        after = tracer.clock()
    slept = tracer.timeline().copies[-device.num_layers :]
    assert all(before < copy.start <= copy.end <= after + 100_000 for copy in slept)
    assert sum(copy.end - copy.start for copy in slept) < (after - before) / 10
    assert slept[0].start - before > (after - before) / 2


def test_copies_on_the_host_clock_agree_with_it() -> None:
    """A long copy's time by its events is about the time by which the host sees it, on one clock for seconds."""
    spec = PoolSpec.rows(num_layers=2, page_size=1, row_bytes=1 << 20)
    device = DevicePool.allocate(spec, num_pages=256, device="cuda")
    host = HostPool.like(device, num_pages=256, layout=Layout.PAGE_FIRST_DIRECT)
    tracer = Tracer()
    with start_scheduler(device, host, io_backend="direct", tracer=tracer) as scheduler:
        for _ in range(12):
            before = tracer.clock()
            load = scheduler.load(host_pages=range(256), device_pages=range(256), after=())
            load.result(timeout=PATIENCE)
            after = tracer.clock()
            copies = tracer.timeline().copies[-2:]
            assert before <= copies[0].start <= copies[1].start
            assert after - 2_000_000 <= copies[1].end <= after + 100_000
            torch.cuda._sleep(300_000_000)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


def test_nobody_records_no_event_has_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recording every event is made with its timing disabled."""
    made: list[bool] = []
    new_event = TorchCuda.new_event

    def noted(self: TorchCuda, *, timing: bool) -> object:
        made.append(timing)
        return new_event(self, timing=timing)

    monkeypatch.setattr(TorchCuda, "new_event", noted)
    device, host = pools("rows", Layout.PAGE_FIRST)
    with start_scheduler(device, host, io_backend="direct") as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=PATIENCE)
        assert scheduler.statistics().load.busy_s > 0
    assert made
    assert not any(made)
