"""How long does the library keep the event loop to itself?

A heartbeat beats every 5 ms beside what costs most: a million page ids in one request, 100,000 queued
requests issued and landed (behind a limit; let go by one `hold`), as many cancelled by closing, 20,000 tasks that wait for
room when it closes, as many that wait for pages, and a trace exported by a worker thread. The figures are the longest gaps between two beats, in milliseconds; `longest_gap_ms` is the greatest.

Each is measured three times and the shortest of the longest gaps counts: what we do happens every time, what
the machine does elsewhere does not. `idle_gap_ms` is the same beside a loop that has nothing to do.

Submits are the caller's own frame: it submits 100 requests and then lets the loop run, as a server would.
What was imported before counts as old (`gc.freeze()`): a full collection then looks at what the library
made, and not at torch; `gc_torch_ms` is what one costs that does, for comparison, and `*_collection_ms`
the longest one that came by itself in a scenario: a part of its gap, not on top of it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.lowlevel import checkpoint

import offload
from bench.common import finish, options

BEAT_S = 0.005
LAYERS = 4


class Heart:
    """Beats, and remembers the longest gap."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.beats = 0

    async def beat(self) -> None:
        """Beat until cancelled."""
        last = time.perf_counter()
        while True:
            await anyio.sleep(BEAT_S)
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            self.beats += 1
            last = now


class Collections:
    """Remembers the longest garbage collection."""

    def __init__(self) -> None:
        self.longest = self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Take a collector's callback."""
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.longest = max(self.longest, now - self._began)


@asynccontextmanager
async def heart(figures: dict[str, float], name: str) -> AsyncIterator[None]:
    """Beat while the block runs; note the longest gap in milliseconds."""
    gc.collect()
    beating, collections = Heart(), Collections()
    gc.callbacks.append(collections)
    async with anyio.create_task_group() as group:
        group.start_soon(beating.beat)
        await anyio.sleep(2 * BEAT_S)
        yield
        await anyio.sleep(2 * BEAT_S)
        group.cancel_scope.cancel()
    gc.callbacks.remove(collections)
    gap, collection = beating.longest * 1e3, collections.longest * 1e3
    if gap < figures.get(name, float("inf")):
        figures[name] = gap
        figures[name.replace("gap", "collection")] = collection


def pools(num_pages: int, layers: int = LAYERS) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return pools with so many small pages."""
    spec = offload.PoolSpec.rows(num_layers=layers, page_size=1, row_bytes=8)
    device = offload.DevicePool.allocate(spec, num_pages=num_pages, device="cpu")
    return device, offload.HostPool.like(device, num_pages=num_pages, layout="page_first")


async def million(figures: dict[str, float], count: int) -> None:
    """Load a million scattered pages in one request."""
    device, host = pools(count, layers=2)
    hosts = np.random.default_rng(0).permutation(count)
    devices = np.arange(count)
    async with (
        offload.open_scheduler(device, host) as scheduler,
        heart(figures, "million_ids_gap_ms"),
    ):
        await (await scheduler.load(host_pages=hosts, device_pages=devices))


async def queue(scheduler: offload.Scheduler, count: int) -> list[offload.Transfer]:
    """Submit many small requests, 100 at a time."""
    found = []
    for page in range(count):
        found.append(scheduler.load_nowait(host_pages=[page], device_pages=[page]))
        if page % 100 == 99:
            await checkpoint()
    return found


async def crowd(figures: dict[str, float], name: str, count: int, *, held: bool) -> None:
    """Queue many requests, behind a small limit or in one hold; wait until the last has landed."""
    device, host = pools(count)
    limits = None if held else offload.Limits(max_inflight_requests=256)
    async with offload.open_scheduler(device, host, limits=limits) as scheduler:
        async with heart(figures, name):
            with scheduler.hold() if held else nullcontext():
                transfers = await queue(scheduler, count)
            for transfer in transfers[:: max(1, count // 100)]:
                await transfer
            await transfers[-1]
            await scheduler.idle(host_pages=[count - 1])
        del transfers


async def closing(figures: dict[str, float], count: int) -> None:
    """Close on many queued requests."""
    device, host = pools(count)
    limits = offload.Limits(max_inflight_requests=1, max_batch_ops=1)
    async with offload.open_scheduler(device, host, limits=limits) as scheduler:
        transfers = await queue(scheduler, count)
        async with heart(figures, "closing_gap_ms"):
            await scheduler.aclose()
        del transfers


async def parked(figures: dict[str, float], count: int) -> None:
    """Close on many tasks that wait for room."""
    device, host = pools(count)
    limits = offload.Limits(max_queued_bytes=1, max_inflight_requests=1)
    async with offload.open_scheduler(device, host, limits=limits) as scheduler:

        async def wait(page: int) -> None:
            with suppress(offload.SchedulerClosedError):
                await scheduler.load(host_pages=[page], device_pages=[page])

        async with anyio.create_task_group() as group:
            for page in range(count):
                group.start_soon(wait, page)
                if page % 100 == 99:
                    await checkpoint()
            async with heart(figures, "parked_gap_ms"):
                await scheduler.aclose()


async def idlers(figures: dict[str, float], count: int) -> None:
    """Let many tasks wait for pages, each for its own, while their requests end one after another."""
    device, host = pools(count)
    limits = offload.Limits(max_inflight_requests=256)
    async with offload.open_scheduler(device, host, limits=limits) as scheduler:
        with scheduler.hold():
            transfers = await queue(scheduler, count)
        async with heart(figures, "idlers_gap_ms"), anyio.create_task_group() as group:
            for page in range(count):
                group.start_soon(partial(scheduler.idle, host_pages=[page]))
                if page % 100 == 99:
                    await checkpoint()
        del transfers


async def exporting(figures: dict[str, float], count: int) -> None:
    """Export a full trace in a worker thread, while the loop goes on."""
    device, host = pools(64)
    tracer = offload.Tracer()
    with tempfile.TemporaryDirectory() as folder:
        async with offload.open_scheduler(device, host, tracer=tracer) as scheduler:
            for _ in range(count):
                await (await scheduler.load(host_pages=range(8), device_pages=range(8)))
            async with heart(figures, "exporting_gap_ms"):
                path = Path(folder) / "trace.json.gz"
                await anyio.to_thread.run_sync(tracer.export, path)


async def idling(figures: dict[str, float]) -> None:
    """Do nothing, as often as queueing lets the loop run."""
    async with heart(figures, "idle_gap_ms"):
        for _ in range(1000):
            await anyio.sleep(0.001)


async def measure(quick: bool) -> dict[str, float]:
    """Measure all, so many times, and keep the shortest gap of each."""
    figures: dict[str, float] = {}
    start = time.perf_counter()
    gc.collect()
    gc_torch = (time.perf_counter() - start) * 1e3
    gc.freeze()
    many = 10_000 if quick else 100_000
    for _ in range(1 if quick else 3):
        await idling(figures)
        await million(figures, 100_000 if quick else 1_000_000)
        await crowd(figures, "queued_gap_ms", many, held=False)
        await crowd(figures, "held_gap_ms", many, held=True)
        await closing(figures, many)
        await parked(figures, many // 5)
        await idlers(figures, many // 5)
        await exporting(figures, 300 if quick else 3_000)
    figures["longest_gap_ms"] = max(gap for name, gap in figures.items() if "gap" in name)
    figures["gc_torch_ms"] = gc_torch
    return figures


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    torch.set_num_threads(1)
    finish("heartbeat", anyio.run(measure, given.quick), given)


if __name__ == "__main__":
    main()
