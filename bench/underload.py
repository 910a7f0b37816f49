"""Eight forwards at once, each waiting for its load and streaming its backup: what is lost to waiting?

The bound is the busiest of three resources alone: compute, the link to the device, the link back. On the
simulator every time is exact. On threads both links are throttled, as those of a GPU are. Compute is torch on a
core of its own, one layer at a time, as a GPU runs them: else the system would deal the core out in slices of
milliseconds, and stop threads that hold the interpreter. Loop and copies have the other core. Loads, forwards and
backups alone are measured in turns with all at once; for layers of a millisecond, as those of a prefill are, and
for layers so short that Python itself, which only one thread runs at a time, takes as long as they do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import torch

import offload
from bench.common import finish, options
from offload.testing import SimDriver, ThreadsDriver

FORWARDS = 8
LAYERS = 32
PAGES = 4
"""Pages that one forward reads and has loaded, and as many that it writes and has backed up."""

SMALL = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=2, num_kv_heads=1, head_dim=8, dtype=torch.float16
)
LARGE = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
)
LENGTHS = {"": (2.5e8, 8), "short_": (2e9, 1)}
"""Bytes a second, each way, and matrix products of a layer: 256 KiB take 1 ms, or 131 us. A product has so few rows
that its matrices stay in the core's own cache: forwards compete for the core, not for memory."""


def pools(spec: offload.PoolSpec) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return pools in which every forward has pages of its own to read and to write."""
    device = offload.DevicePool.allocate(spec, num_pages=2 * FORWARDS * PAGES, device="cpu")
    host = offload.HostPool.like(device, num_pages=2 * FORWARDS * PAGES, layout="layer_first")
    return device, host


def pages_of(number: int) -> tuple[list[int], list[int]]:
    """Return the pages that a forward reads, and those that it writes."""
    first = 2 * number * PAGES
    return list(range(first, first + PAGES)), list(range(first + PAGES, first + 2 * PAGES))


async def submit(
    scheduler: offload.Scheduler, number: int, *, same: bool = False
) -> tuple[offload.Transfer, offload.Transfer]:
    """Submit the load and the streaming backup of one forward; `same`: of the very same device pages."""
    old, new = pages_of(number)
    if same:
        load = await scheduler.load(host_pages=old, device_pages=new)
        return load, await scheduler.backup(device_pages=new, host_pages=new, streaming=True)
    load = await scheduler.load(host_pages=old, device_pages=old)
    return load, await scheduler.backup(device_pages=new, host_pages=new, streaming=True)


async def simulate(compute_s: float, load_s: float, backup_s: float, same: bool = False) -> float:
    """Return total time / the busiest resource's, given the seconds of one layer of one forward.

    Args:
        same: Whether a forward writes, and backs up, the very pages that it loads.
    """
    device, host = pools(SMALL)
    nbytes = PAGES * SMALL.page_bytes / LAYERS
    bandwidth = {"load": nbytes / load_s, "backup": nbytes / backup_s}
    sim = SimDriver(bandwidth=bandwidth, latency=0.0, detect_races=True)

    async def forward(number: int) -> None:
        load, backup = await submit(scheduler, number, same=same)
        old, new = pages_of(number)
        for layer in range(LAYERS):
            await load.layer(layer)
            sim.compute(compute_s, reads=[(device, layer, old)], writes=[(device, layer, new)])
            backup.layer_written(layer)
        await backup

    async with offload.open_scheduler(device, host, driver=sim) as scheduler:
        async with anyio.create_task_group() as group:
            for number in range(FORWARDS):
                group.start_soon(forward, number)
            await sim.run_until_idle()
        return sim.now() / (FORWARDS * LAYERS * max(compute_s, load_s, backup_s))


class Forwards:
    """Eight forwards in eight threads, on a device of one core: each layer so many matrix products."""

    def __init__(self, rows: int, products: int, core: int) -> None:
        self.rows = rows
        self._products = products
        self._core = core
        self._device = threading.Lock()
        self._weight = torch.eye(256)
        self._hidden = torch.ones(rows, 256)
        self._out = torch.empty(rows, 256)

    def run(self, load: offload.Transfer | None, backup: offload.Transfer | None) -> None:
        """Run every layer of one, each when its pages are there, and say that it was written."""
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {self._core})
        for layer in range(LAYERS):
            if load is not None:
                load.wait_layer(layer)
            with self._device:
                for _ in range(self._products):
                    torch.mm(self._hidden, self._weight, out=self._out)
            if backup is not None:
                backup.layer_written(layer)


async def timed(run: Callable[[], Awaitable[object]]) -> float:
    """Return how many seconds it took."""
    start = time.perf_counter()
    await run()
    return time.perf_counter() - start


async def on_threads(
    link: float, products: int, cores: list[int], repeats: int
) -> dict[str, float]:
    """Return the seconds of compute, loads and backups alone, and of all at once; the best of each."""
    device, host = pools(LARGE)
    driver = ThreadsDriver(link, cpus=cores[-1:])
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:

        async def one_way(name: str) -> None:
            moved = []
            for number in range(FORWARDS):
                pages = pages_of(number)[0]
                submitted = getattr(scheduler, name)(host_pages=pages, device_pages=pages)
                moved.append(await submitted)
            for each in moved:
                await each

        async def one(number: int) -> None:
            load, backup = await submit(scheduler, number)
            await anyio.to_thread.run_sync(models.run, load, backup)
            await backup

        async def compute() -> None:
            async with anyio.create_task_group() as group:
                for _ in range(FORWARDS):
                    group.start_soon(anyio.to_thread.run_sync, models.run, None, None)

        async def together() -> None:
            async with anyio.create_task_group() as group:
                for number in range(FORWARDS):
                    group.start_soon(one, number)

        models = Forwards(128, products, cores[0])
        link_s = FORWARDS * PAGES * LARGE.page_bytes / link
        for _ in range(3):
            alone_s = min([await timed(compute) for _ in range(5)])
            rows = max(1, round(models.rows * 1.2 * link_s / alone_s))
            models = Forwards(rows, products, cores[0])
        runs: dict[str, Callable[[], Awaitable[object]]] = {
            "compute": compute,
            "load": lambda: one_way("load"),
            "backup": lambda: one_way("backup"),
            "together": together,
        }
        took = dict.fromkeys(runs, float("inf"))
        for _ in range(repeats):
            for name, run in runs.items():
                took[name] = min(took[name], await timed(run))
    return took


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    torch.set_num_threads(1)
    figures = {
        "sim_compute_bound": anyio.run(simulate, 2e-4, 1e-4, 1e-4),
        "sim_load_bound": anyio.run(simulate, 1e-4, 2e-4, 1e-4),
        "sim_backup_bound": anyio.run(simulate, 1e-4, 1e-4, 2e-4),
        "sim_balanced": anyio.run(simulate, 1e-4, 1e-4, 1e-4),
        "sim_same_pages": anyio.run(simulate, 1e-4, 1e-4, 1e-4, True),
    }
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    for layers, length in LENGTHS.items():
        took = anyio.run(on_threads, *length, cores, 2 if given.quick else 10)
        figures |= {f"{layers}{name}_ms": seconds * 1e3 for name, seconds in took.items()}
        bound = max(took["compute"], took["load"], took["backup"])
        figures[f"threads_{layers}ratio"] = took["together"] / bound
        serial = took["compute"] + took["load"] + took["backup"]
        figures[f"{layers}serial_ratio"] = serial / bound
    finish("underload", figures, given)


if __name__ == "__main__":
    main()
