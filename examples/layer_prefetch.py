"""A load hides behind the forward pass when each layer waits for its own pages only.

The forward runs after the whole load, then during it: the second takes as long as the slower of the two.
"""

from __future__ import annotations

import time

import anyio
import torch

import offload

torch.set_num_threads(1)  # one core computes, the other copies
LAYERS, PAGES, TOKENS, HEADS, DIM, NEW = 12, 16, 64, 8, 64, 128
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32
)


class Layer(torch.nn.Module):
    """Attention of new tokens over what one layer of the pool holds."""

    def __init__(self, pool: offload.DevicePool, layer: int) -> None:
        super().__init__()
        self.kv = [pool.tensors[name][layer] for name in ("k", "v")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: `x` is [H, NEW, D], the pool's tensors are [P*T, H, D]."""
        keys, values = (t.transpose(0, 1) for t in self.kv)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values)


async def main() -> None:
    """Back up a prefix, then load it both ways."""
    device = offload.DevicePool.allocate(SPEC, num_pages=PAGES, device="cpu")
    host = offload.HostPool.like(device, num_pages=PAGES, layout="page_first_direct")
    model = torch.nn.Sequential(*(Layer(device, layer) for layer in range(LAYERS)))
    memory = [tensor for layer in model for tensor in layer.kv]
    for tensor in memory:
        tensor.normal_()
    x, pages = torch.randn(HEADS, NEW, DIM), range(PAGES)
    expected = model(x)
    async with offload.open_scheduler(device, host) as scheduler:
        await (await scheduler.backup(device_pages=pages, host_pages=pages))
        for style in ("load, then run", "layer by layer"):
            for tensor in memory:
                tensor.fill_(torch.nan)  # whoever reads too early gets this
            start = time.perf_counter()
            load = await scheduler.load(host_pages=pages, device_pages=pages)
            if style == "load, then run":
                await load
            with offload.layerwise.attach(model, load=load):
                result = await anyio.to_thread.run_sync(model, x)
            took, same = 1000 * (time.perf_counter() - start), torch.equal(result, expected)
            print(f"{style}: {took:.1f} ms, as if it had never left: {same}")


anyio.run(main)
