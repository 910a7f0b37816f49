"""One request, several pools: window and full attention with pages of their own, and an index beside."""

from __future__ import annotations

import anyio

import offload

LAYERS = 6
FULL, WINDOW = (
    [1, 3, 5],
    [0, 2, 4],
)  # which of the model's layers see everything, and which a window
PAGES, WINDOW_PAGES = 64, 16


def attention(num_layers: int) -> offload.PoolSpec:
    """Return keys and values of some layers."""
    return offload.PoolSpec.mha(num_layers=num_layers, page_size=16, num_kv_heads=8, head_dim=64)


def group() -> offload.PoolGroup:
    """Return the pools that a request moves together. The first is the anchor: it names the pages."""
    full = offload.DevicePool.allocate(attention(len(FULL)), num_pages=PAGES)
    window = offload.DevicePool.allocate(attention(len(WINDOW)), num_pages=WINDOW_PAGES)
    rows = offload.PoolSpec.rows(num_layers=len(FULL), page_size=16, row_bytes=16 * 132)
    index = offload.DevicePool.allocate(rows, num_pages=PAGES)
    backed = offload.Pair.backed  # each with a new host pool behind it
    return offload.PoolGroup(
        full=backed(full, 4 * PAGES, "page_first", layers=FULL),
        index=backed(index, 4 * PAGES, "page_first", layers=FULL),  # the anchor's pages
        window=backed(window, 4 * WINDOW_PAGES, "page_first", layers=WINDOW, pages="own"),
    )


async def main() -> None:
    """Move a sequence of 40 pages, of which the window still needs 8, to the host and back."""
    pools = group()
    here = pools.alloc("device", 40, {"window": 8})  # from all pools, or from none
    there = pools.alloc("host", 40, {"window": 8})
    own = there.paired(here)
    async with offload.open_scheduler(pools) as scheduler:
        await (
            await scheduler.backup(device_pages=here.anchor, host_pages=there.anchor, members=own)
        )
        load = await scheduler.load(host_pages=there.anchor, device_pages=here.anchor, members=own)
        for layer in range(LAYERS):
            await load.layer(layer)  # landed when every pool that has this layer has it
        print(f"{load.nbytes / 2**20:.1f} MiB, over {pools}")
    pools.free("device", here)
    pools.free("host", there)


if __name__ == "__main__":
    anyio.run(main)
