"""More sessions than device pages: idle ones live in host memory and come back for their next turn.

Six sessions of four pages share twelve device pages. A turn takes pages, and evicts whoever was idle longest;
it loads what the session had, adds to it, and stays resident until someone else needs the pages.
"""

from __future__ import annotations

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
        if turn:
            assert bool((kv[pages] == 100 * session + layer + turn).all())
        kv[pages] = 100 * session + layer + turn + 1.0


async def main() -> None:
    """Serve all sessions, turn by turn."""
    device = offload.DevicePool.allocate(SPEC, num_pages=12, device="cpu")
    host = offload.HostPool.like(device, num_pages=SESSIONS * PAGES, layout="page_first")
    home = [host.pages.alloc(PAGES) for _ in range(SESSIONS)]
    resident: dict[int, Pages] = {}  # oldest first
    moved = 0
    async with offload.open_scheduler(device, host) as scheduler:
        for turn in range(TURNS):
            for session in range(SESSIONS):
                if len(resident) * PAGES == device.num_pages:
                    idle = next(iter(resident))
                    pages = resident.pop(idle)
                    backup = await scheduler.backup(device_pages=pages, host_pages=home[idle])
                    await backup
                    device.pages.free(pages)
                    moved += backup.nbytes
                pages = resident[session] = device.pages.alloc(PAGES)
                if turn:
                    load = await scheduler.load(host_pages=home[session], device_pages=pages)
                    await load
                    moved += load.nbytes
                await anyio.to_thread.run_sync(forward, device, pages, session, turn)
        print(
            f"{SESSIONS * TURNS} turns of {SESSIONS} sessions on pages for 3: {moved} bytes moved"
        )
        print(scheduler.statistics())


anyio.run(main)
