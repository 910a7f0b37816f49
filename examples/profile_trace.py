"""Copies and compute on one timeline: our lanes merged into a torch.profiler trace, and a stall report.

Open the file that it names at https://ui.perfetto.dev: an arrow joins each layer's copy to the layer of the
forward that used it. This engine has no event loop, so it uses the blocking face.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import offload

torch.set_num_threads(1)  # one core computes, the other copies
LAYERS, PAGES = 8, range(16)
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=64, num_kv_heads=8, head_dim=64, dtype=torch.float32
)


def main() -> None:
    """Load under a profiled forward, then write both into one file."""
    device = offload.DevicePool.allocate(SPEC, num_pages=len(PAGES), device="cpu")
    host = offload.HostPool.like(device, num_pages=len(PAGES), layout="page_first_direct")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(LAYERS)))
    x = torch.randn(2048, 512)
    tracer = offload.Tracer(active=False)
    folder = Path(tempfile.mkdtemp(prefix="offload-"))

    with offload.start_scheduler(device, host, tracer=tracer) as scheduler:
        scheduler.backup(device_pages=PAGES, host_pages=PAGES).result(timeout=5)
        model(x)  # warm: first calls are not what we want to see
        with torch.profiler.profile() as profiler, tracer.window():
            load = scheduler.load(host_pages=PAGES, device_pages=PAGES)
            with offload.layerwise.attach(model, load=load), torch.no_grad():
                model(x)
            load.result(timeout=5)

    profiler.export_chrome_trace(str(folder / "torch.json"))
    path = tracer.export(folder / "run.trace.json.gz", overlay=folder / "torch.json")
    print(tracer.report())
    print("trace:", path)


main()
