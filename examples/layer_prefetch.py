"""A load hides behind the forward pass when each layer waits for its own pages only.

The forward runs after the whole load, then during it. The link is held to 1 GB/s: there is something to hide.
"""

from __future__ import annotations

import time

import anyio
import torch

import offload
from offload.testing import ThreadsDriver

torch.set_num_threads(1)  # one core computes, the other copies
LAYERS, PAGES, TOKENS, HEADS, DIM, NEW = 12, 16, 64, 8, 64, 128
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32
)


class Layer(torch.nn.Module):
    """Attention of new tokens over what one layer of the pool holds."""

    def __init__(self, pool: offload.DevicePool, layer: int) -> None:
        super().__init__()
        self.k, self.v = (pool.tensors[name][layer].transpose(0, 1) for name in ("k", "v"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: `x` is [H, NEW, D], the pool's tensors are [P*T, H, D]."""
        return torch.nn.functional.scaled_dot_product_attention(x, self.k, self.v)


async def main() -> None:
    """Back up a prefix, then load it both ways."""
    device = offload.DevicePool.allocate(SPEC, num_pages=PAGES, device="cpu")
    host = offload.HostPool.like(device, num_pages=PAGES, layout="page_first_direct")
    layers = [Layer(device, layer) for layer in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        layer.k.normal_(), layer.v.normal_()
    x, pages = torch.randn(HEADS, NEW, DIM), range(PAGES)
    expected = model(x)
    async with offload.open_scheduler(device, host, driver=ThreadsDriver(1e9)) as scheduler:
        await (await scheduler.backup(device_pages=pages, host_pages=pages))
        for style in ("load, then run", "layer by layer"):
            for layer in layers:  # whoever reads too early gets these
                layer.k.fill_(torch.nan), layer.v.fill_(torch.nan)
            start = time.perf_counter()
            load = await scheduler.load(host_pages=pages, device_pages=pages)
            if style == "load, then run":
                await load
            with offload.layerwise.attach(layers, load=load):
                result = await anyio.to_thread.run_sync(model, x)
            took = 1000 * (time.perf_counter() - start)
            print(f"{style}: {took:.1f} ms, equal: {torch.equal(result, expected)}")


anyio.run(main)
