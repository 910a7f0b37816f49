"""How much of a load hides behind a forward that needs it layer by layer?

The bound is the slower of the two alone: 32 layers of 4 MiB loaded, and a forward on one thread whose
layers each take twice as long as a layer's load. Copies and forward have a core each. `serial_ratio` is load-then-run, in the same run.
`first_layer_ms` is how long the first layer takes from submit on: a forward that waits for it hides nothing of that,
and the bound knows nothing of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import torch

import offload
from bench.common import best, finish, options
from offload.testing import ThreadsDriver

LAYERS = 32
PAGES = 64
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
)
"""64 pages of one layer are 4 MiB: 16 tokens x 8 heads x 128 x 2 bytes, k and v, are 64 KiB."""

WIDTH = 256
"""A weight of 256 KiB stays in the cache: the forward competes for cores, not for memory."""

PRODUCTS = 4
"""Matrix products of one layer, about as many as a small transformer's layer has. Between two of them the
forward needs the interpreter, which copies and loop want as well."""


class Forward:
    """A model of `LAYERS` layers on so many rows; torch runs it on one thread."""

    def __init__(self, rows: int, core: int) -> None:
        self.core = core
        self._weight = torch.eye(WIDTH)
        self._hidden = torch.ones(rows, WIDTH)
        self._out = torch.empty(rows, WIDTH)

    def layer(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self._hidden, self._weight, out=self._out)

    def run(self, load: offload.Transfer | None = None) -> None:
        """Run every layer, each when its pages are there."""
        # torch hands its thread count on to a new thread, MKL does not.
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {self.core})
        for layer in range(LAYERS):
            if load is not None:
                load.wait_layer(layer)
            self.layer()


async def timed(run: Callable[[], Awaitable[object]]) -> float:
    """Return how many seconds it took."""
    start = time.perf_counter()
    await run()
    return time.perf_counter() - start


async def measure(repeats: int) -> dict[str, float]:
    """Take load, forward, both at once and one after the other in turns; keep the best of each."""
    device = offload.DevicePool.allocate(SPEC, num_pages=PAGES, device="cpu")
    host = offload.HostPool.like(device, num_pages=PAGES, layout="layer_first")
    pages = list(range(PAGES))
    # The forward has a core, the copies and the loop have another. Left alone, the system often starts a
    # woken worker on the core of the thread that woke it, and a load this short is over before it is moved.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    driver = ThreadsDriver(cpus=cores[-1:])
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:

        async def load() -> None:
            await (await scheduler.load(host_pages=pages, device_pages=pages))

        async def forward() -> None:
            await anyio.to_thread.run_sync(model.run)

        async def both() -> None:
            transfer = await scheduler.load(host_pages=pages, device_pages=pages)
            await anyio.to_thread.run_sync(model.run, transfer)
            await transfer

        async def first_layer() -> None:
            under_way.append(await scheduler.load(host_pages=pages, device_pages=pages))
            await under_way[-1].layer(0)

        async def serial() -> None:
            await load()
            await forward()

        load_s = min([await timed(load) for _ in range(max(5, repeats))])
        rows = 512
        took_s = best(Forward(rows, cores[0]).layer, 20)
        model = Forward(max(1, round(rows * 2 * load_s / LAYERS / took_s)), cores[0])
        under_way: list[offload.Transfer] = []
        runs = {
            "load": load,
            "forward": forward,
            "both": both,
            "serial": serial,
            "first_layer": first_layer,
        }
        took = dict.fromkeys(runs, float("inf"))
        for _ in range(repeats):
            for name, run in runs.items():
                took[name] = min(took[name], await timed(run))
                while under_way:
                    await under_way.pop()
    return took


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    torch.set_num_threads(1)
    took = anyio.run(measure, 5 if given.quick else 30)
    bound = max(took["load"], took["forward"])
    figures = {f"{name}_ms": seconds * 1e3 for name, seconds in took.items()}
    figures["load_gib_s"] = LAYERS * PAGES * 65536 / took["load"] / 2**30
    figures["forward_to_load"] = took["forward"] / took["load"]
    figures["serial_ratio"] = took["serial"] / bound
    figures["overlap_ratio"] = took["both"] / bound
    finish("overlap", figures, given)


if __name__ == "__main__":
    main()
