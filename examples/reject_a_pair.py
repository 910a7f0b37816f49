"""A pair that cannot be copied is refused before anything moves, and the refusal says what works.

One layer of one page in `page_head` is many short runs, and io backend `direct` copies one run. First ask
without pools, then see the same answer raised at submit.
"""

from __future__ import annotations

import anyio
import torch

import offload

SPEC = offload.PoolSpec.mha(
    num_layers=2, page_size=64, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
)


def ask_without_pools() -> None:
    """`explain` is pure: it answers for a GPU on a machine that has none."""
    verdict = offload.explain(SPEC, layout="page_head", io_backend="direct", direction="load")
    print("supported:", verdict.supported, f"({verdict.runs} runs of {verdict.run_bytes} bytes)")
    print("works with this layout:", ", ".join(verdict.io_backends))
    print("works with this io backend:", ", ".join(verdict.layouts))


async def ask_the_scheduler() -> None:
    """The scheduler offers only what its own pools can run: these are in host memory."""
    device = offload.DevicePool.allocate(SPEC, num_pages=4, device="cpu")
    host = offload.HostPool.like(device, num_pages=8, layout="page_head")
    async with offload.open_scheduler(device, host) as scheduler:
        try:
            await scheduler.load(host_pages=[0], device_pages=[1], io_backend="direct")
        except offload.UnsupportedPairError as error:
            print("\nat submit:", error)
            choice = error.io_backends[0]
        load = await scheduler.load(host_pages=[0], device_pages=[1], io_backend=choice)
        await load
        print(f"\nwith {choice!r}: {load.nbytes} bytes loaded")


ask_without_pools()
anyio.run(ask_the_scheduler)
