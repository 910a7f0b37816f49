"""A forward on the CUDA driver that has to wait: what the report, the counters and a fence say of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import attrs
import pytest
import torch

import offload
from offload import DevicePool, HostPool, PoolSpec, Tracer, layerwise, start_scheduler
from offload.driver import cuda_stream
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_stream import CudaStream
from offload.testing import FakeCuda
from offload.trace.report import Report

LAYERS = 6
PATIENCE = 20.0
STEP_NS = 1_000_000
KERNEL = 20
"""Steps of a layer's compute."""
BESIDE = 400
"""Steps of a kernel on a stream that nobody waits for: how long the load is held, in the device's time."""

SPEC = PoolSpec.mha(num_layers=LAYERS, page_size=4, num_kv_heads=2, head_dim=8)


@attrs.frozen(eq=False)
class World:
    """A scheduler over a device whose streams run, and can be held."""

    fake: FakeCuda
    driver: CudaDriver
    tracer: Tracer
    scheduler: offload.BlockingScheduler
    compute: object
    launched: threading.Event = attrs.field(factory=threading.Event)
    """Set when a layer has been launched."""

    def load(self) -> offload.Transfer:
        """Submit a load that follows nothing."""
        return self.scheduler.load(host_pages=[5], device_pages=[3], after=())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the load stream for the length of the block."""
        stream = cast("CudaStream", self.driver.stream("load"))
        with self.fake.holding(stream.raw):
            yield

    def pass_time(self, steps: int) -> None:
        """Let so much of the device's time pass, on a stream of its own."""
        out = torch.zeros(1, dtype=torch.uint8)
        with self.fake.using(self.fake.new_stream()):
            for _ in range(steps):
                self.fake.compute(lambda: None, writes=[out])
            mark = self.driver.compute_stream().record()
        assert mark.wait(PATIENCE)


@contextmanager
def world(tracer: Tracer) -> Iterator[World]:
    """Open a scheduler on a device with its own clock, and a stream for the calling thread's compute."""
    device = DevicePool.allocate(SPEC, num_pages=8)
    host = HostPool.like(device, num_pages=8, layout="page_first_direct")
    fake = FakeCuda(seed=1, step_ns=STEP_NS)
    driver = CudaDriver(0, calls=fake, clock=fake.now_ns)
    with fake.running():
        compute = fake.new_stream()
        with (
            start_scheduler(
                device, host, io_backend="direct", driver=driver, tracer=tracer
            ) as scheduler,
            fake.using(compute),
        ):
            yield World(fake, driver, tracer, scheduler, compute)
    fake.check()


class Layer(torch.nn.Module):
    """Compute of a layer: so many steps of the device."""

    def __init__(self, fake: FakeCuda, launched: threading.Event) -> None:
        super().__init__()
        self.fake, self.launched = fake, launched
        self.out = torch.zeros(1, dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(KERNEL):
            self.fake.compute(lambda: None, writes=[self.out])
        self.launched.set()
        return x


def forward(here: World, load: offload.Transfer) -> None:
    """Run a forward over the load, layer by layer."""
    layers = [Layer(here.fake, here.launched) for _ in range(LAYERS)]
    with layerwise.attach(layers, load=load):
        torch.nn.Sequential(*layers)(torch.zeros(1))


def on_stream(tracer: Tracer) -> None:
    """Launch a whole forward behind a load that is issued, held, and goes on after 400 ms of the device."""
    with world(tracer) as here:
        with here.held():
            load = here.load()
            load.wait_issued(LAYERS - 1, timeout=PATIENCE)
            forward(here, load)
            here.pass_time(BESIDE)
        load.result(timeout=PATIENCE)


def on_host(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> World:
    """Run a forward whose host waits for layers to be issued: two at a time, and the load is held 400 ms."""
    monkeypatch.setattr(cuda_stream, "AHEAD_BYTES", 0)
    with world(tracer) as here:
        with here.held():
            load = here.load()
            load.wait_issued(1, timeout=PATIENCE)
            forwarding = threading.Thread(target=lambda: _forward_on(here, load))
            forwarding.start()
            assert here.launched.wait(PATIENCE)
            here.pass_time(BESIDE)
        forwarding.join(PATIENCE)
        assert not forwarding.is_alive()
        load.result(timeout=PATIENCE)
    return here


def _forward_on(here: World, load: offload.Transfer) -> None:
    with here.fake.using(here.compute):  # type: ignore[arg-type]
        forward(here, load)


def check_stall(report: Report) -> None:
    """The first layer stood nearly as long as its load was held; the rest of the forward is compute."""
    held, kernels = BESIDE * STEP_NS, LAYERS * KERNEL * STEP_NS
    assert report.steps == 1
    assert report.unmeasured_waits == 0
    assert 0.9 * held < report.stall_ns < held + kernels
    assert report.layers[0].stall_ns > 0.9 * held
    assert report.forward_ns - report.stall_ns >= kernels
    assert report.load.overlap < 0.9


def test_what_a_compute_stream_waits_is_in_the_report() -> None:
    """The host is through in no time; the report has what the stream stood, layers as they ran, and no more."""
    tracer = Tracer()
    on_stream(tracer)
    check_stall(tracer.report())
    recorded = tracer.timeline()
    assert all(one.end - one.start >= KERNEL * STEP_NS for one in recorded.layers)
    layers = [(one.start, one.end) for one in recorded.layers]
    spans = sorted(layers + [(one.start, one.end) for one in recorded.waits])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert {wait.lane for wait in recorded.waits} == {0}


def test_what_the_host_waits_is_in_the_report_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that waits for the issue launches late: the stream stands meanwhile, and that is the stall."""
    tracer = Tracer()
    here = on_host(tracer, monkeypatch)
    check_stall(tracer.report())
    waits = here.scheduler.counters.load.waits
    assert waits.count >= 1
    assert waits.total > 0.5 * BESIDE * STEP_NS


def test_a_fence_returns_whether_its_host_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines with hooks of their own: a layer that is not issued holds the host, one that is does not."""
    monkeypatch.setattr(cuda_stream, "AHEAD_BYTES", 0)
    with world(Tracer(active=False)) as here:
        told: list[bool] = []
        with here.held():
            load = here.load()
            load.wait_issued(1, timeout=PATIENCE)
            assert layerwise.fence(load, 1) is False

            def fence() -> None:
                with here.fake.using(here.compute):  # type: ignore[arg-type]
                    told.append(layerwise.fence(load, LAYERS - 1, timeout=PATIENCE))

            fencing = threading.Thread(target=fence)
            fencing.start()
            here.pass_time(BESIDE)
        fencing.join(PATIENCE)
        load.result(timeout=PATIENCE)
    assert told == [True]


def test_without_a_recording_a_fence_takes_no_times() -> None:
    """No timing event is made, and a wait that nobody sees end is counted as what it is."""
    with world(Tracer(active=False)) as here:
        with here.held():
            load = here.load()
            load.wait_issued(0, timeout=PATIENCE)
            load.fence(0)
        load.result(timeout=PATIENCE)
        load.fence(0)
        counts = here.scheduler.counters.load
        assert (counts.waits_fenced, counts.waits_ready, counts.waits.count) == (1, 1, 0)
        assert {call.arguments for call in here.fake.named("new_event")} == {(False,)}


def test_a_plain_fence_is_measured_too() -> None:
    """Without hooks there is no forward to hold: what its stream waited stands beside the stall."""
    tracer = Tracer()
    with world(tracer) as here:
        with here.held():
            load = here.load()
            load.wait_issued(0, timeout=PATIENCE)
            load.fence(0)
            here.pass_time(BESIDE)
        load.result(timeout=PATIENCE)
    report = tracer.report()
    assert 0.9 * BESIDE * STEP_NS < report.await_ns < 2 * BESIDE * STEP_NS
    assert report.unmeasured_waits == 0


@pytest.mark.parametrize("name", ["new_event", "record", "elapsed_ms"])
def test_a_time_that_fails_costs_no_fence(name: str) -> None:
    """Whatever call of the stopwatch fails, the forward goes on, and its wait is counted as not measured."""
    tracer = Tracer()
    with world(tracer) as here:
        with here.held():
            load = here.load()
            load.wait_issued(LAYERS - 1, timeout=PATIENCE)
            if name != "elapsed_ms":
                here.fake.fail(2, name=name)
            load.fence(0)
            if name == "elapsed_ms":
                here.fake.fail(2, name=name)
        load.result(timeout=PATIENCE)
    assert tracer.timeline().unmeasured + len(tracer.timeline().waits) == 1


def test_hooks_inside_a_capture_take_no_times() -> None:
    """A model that is captured with its hooks on gets no events into its graph."""
    tracer = Tracer()
    with world(tracer) as here:
        load = here.load()
        load.result(timeout=PATIENCE)
        layers = [torch.nn.Identity() for _ in range(LAYERS)]
        records = len(here.fake.named("record"))
        with here.fake.capture(), layerwise.attach(layers, tracer=tracer):
            torch.nn.Sequential(*layers)(torch.zeros(1))
        assert len(here.fake.named("record")) == records
    assert tracer.timeline().layers == ()
