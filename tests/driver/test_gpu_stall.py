"""What a report says of a forward on a real GPU, beside what CUDA's own events say of it."""

from __future__ import annotations

import pytest
import torch

from offload import DevicePool, HostPool, PoolSpec, Tracer, layerwise, start_scheduler

pytestmark = pytest.mark.gpu

PATIENCE = 60.0
LAYERS = 4
PAGES = 128
SPEC = PoolSpec.rows(num_layers=LAYERS, page_size=1, row_bytes=1 << 20)
"""512 MiB in all: some 10 ms of a PCIe 5 link, and a hundred of a slow one."""

SHORT = 200_000
"""Clock cycles of a layer's compute: 0.1 ms or so, much less than its load."""


class Layer(torch.nn.Module):
    """A layer that computes for a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let the device spin."""
        torch.cuda._sleep(SHORT)  # type: ignore[no-untyped-call]
        return x


def test_the_stall_is_what_events_around_the_forward_say() -> None:
    """Almost all of a forward that is bound by its load is stall, and stall and layers make the forward."""
    device = DevicePool.allocate(SPEC, num_pages=PAGES, device="cuda")
    host = HostPool.like(device, num_pages=PAGES)
    pages = list(range(PAGES))
    tracer = Tracer(active=False)
    layers = [Layer() for _ in range(LAYERS)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with start_scheduler(device, host, tracer=tracer) as scheduler:
        scheduler.load(host_pages=pages, device_pages=pages).result(timeout=PATIENCE)
        with tracer.window():
            load = scheduler.load(host_pages=pages, device_pages=pages, after=())
            start.record()
            with layerwise.attach(layers, load=load):
                torch.nn.Sequential(*layers)(torch.zeros(1))
            end.record()
            load.result(timeout=PATIENCE)
    torch.cuda.synchronize()
    report = tracer.report()
    forward_ns = start.elapsed_time(end) * 1e6
    assert (report.steps, report.unmeasured_waits) == (1, 0)
    assert report.forward_ns == pytest.approx(forward_ns, rel=0.1)
    compute_ns = sum(one.end - one.start for one in tracer.timeline().layers)
    assert report.stall_ns + compute_ns == pytest.approx(report.forward_ns, rel=0.1)
    assert report.stall_ns > 0.5 * report.load.busy_ns
