"""Copies and compute on one timeline: our lanes merged into a torch.profiler trace, and a stall report.

Open the file that it prints at https://ui.perfetto.dev: each layer's copy is joined by an arrow to the layer
of the forward that used it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import torch

import offload

torch.set_num_threads(1)
LAYERS = 8
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=64, num_kv_heads=8, head_dim=64, dtype=torch.float32
)


async def main() -> None:
    """Profile a forward whose layers wait for their pages."""
    device = offload.DevicePool.allocate(SPEC, num_pages=16, device="cpu")
    host = offload.HostPool.like(device, num_pages=16, layout="page_first")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(LAYERS)))
    tracer = offload.Tracer()
    folder = Path(tempfile.mkdtemp(prefix="offload-"))
    pages = list(range(16))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.profile() as profiler, torch.no_grad():
            y: torch.Tensor = model(x)
        profiler.export_chrome_trace(str(folder / "torch.json"))
        return y

    async with offload.open_scheduler(device, host, tracer=tracer) as scheduler:
        await (await scheduler.backup(device_pages=pages, host_pages=pages))
        load = await scheduler.load(host_pages=pages, device_pages=pages)
        with offload.layerwise.attach(model, load=load):
            await anyio.to_thread.run_sync(forward, torch.randn(512, 512))
        await load

    path = tracer.export(folder / "run.trace.json.gz", overlay=folder / "torch.json")
    print(tracer.report())
    print("trace:", path)


anyio.run(main)
