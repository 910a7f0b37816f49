"""More sessions than device pages: idle ones live in host memory and come back for their next turn.

Six sessions of four pages share twelve device pages. A turn takes pages from whoever was idle longest, loads what
the session had, and adds to it. `--metrics` (extra `prometheus`) serves metrics, and prints a scrape of them.
"""

from __future__ import annotations

import sys
from urllib.request import urlopen

import anyio
import numpy as np
import torch

import offload

SPEC = offload.PoolSpec.mla(
    num_layers=4, page_size=16, latent_dim=64, rope_dim=16, dtype=torch.float32
)
SESSIONS, PAGES, TURNS = 6, 4, 3
Pages = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def forward(pool: offload.DevicePool, pages: Pages, session: int, turn: int) -> None:
    """Stand in for a model: check what earlier turns left in every layer, and add this turn."""
    for layer in range(SPEC.num_layers):
        kv = pool.tensors["kv"][layer].view(pool.num_pages, SPEC.page_size, -1)
        assert not turn or bool((kv[pages] == 100 * session + layer + turn).all())
        kv[pages] = 100 * session + layer + turn + 1.0


async def main() -> None:
    """Serve all sessions, turn by turn."""
    device = offload.DevicePool.allocate(SPEC, num_pages=12, device="cpu")
    host = offload.HostPool.like(device, num_pages=SESSIONS * PAGES, layout="page_first")
    home = [host.pages.alloc(PAGES) for _ in range(SESSIONS)]
    resident: dict[int, Pages] = {}  # oldest first
    async with offload.open_scheduler(device, host) as scheduler:
        if metrics := "--metrics" in sys.argv:
            from offload.metrics import serve

            address = serve(scheduler, device="cpu", host=host)
        for turn in range(TURNS):
            for session in range(SESSIONS):
                if len(resident) * PAGES == device.num_pages:
                    idle = next(iter(resident))
                    pages = resident.pop(idle)
                    await (await scheduler.backup(device_pages=pages, host_pages=home[idle]))
                    device.pages.free(pages)
                pages = resident[session] = device.pages.alloc(PAGES)
                if turn:
                    await (await scheduler.load(host_pages=home[session], device_pages=pages))
                await anyio.to_thread.run_sync(forward, device, pages, session, turn)
        print(f"{SESSIONS * TURNS} turns on pages for 3 sessions:", scheduler.statistics())
        if metrics:
            print((await anyio.to_thread.run_sync(urlopen, address)).read().decode())


anyio.run(main)
