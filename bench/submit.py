"""What does the library itself cost, from submit to issue, and from submit to the caller's next line?

* `submit_us_8x32`: 8 requests of 64 page ids each, given as arrays, 32 layers, no copies: from the first
  submit until the last layer is issued, in CPU time of the one
  thread (as all but `handoff_*`). `_lists` and `_16` beside it: lists, 16 ids.
* `per_request_us_N`: N requests of 1 to 4 pages, queued at once and then issued: time over N. `flatness` is
  the dearest of the three over the cheapest. Limits are set, hazards exact, garbage collection on; but what
  was imported counts as old (`gc.freeze()`), or a full collection would mostly look at torch.
* `handoff_*`: one page loaded by a worker thread, end to end, all threads on one core; beside it a bare
  hand-off to a thread and back, and `anyio.to_thread.run_sync(copy)`, taken in turns.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.lowlevel import checkpoint

import offload
from bench.common import finish, options
from bench.paper import NAME, PaperDriver
from offload.core.page_ids import PagesLike
from offload.driver.loops import poster

LAYERS = 32
LIMITS = offload.Limits(
    max_queued_bytes=1 << 50,
    max_inflight_bytes=1 << 50,
    max_inflight_requests=1 << 30,
    max_batch_requests=None,
)
"""Never reached, and checked for every request. Nothing lands before all are issued: so they go up in the few
batches that may be in the air."""

Group = Sequence[tuple[PagesLike, PagesLike]]
"""(host pages, device pages) of each request."""


def pools(num_pages: int) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return two pools of rows; what they hold does not matter."""
    spec = offload.PoolSpec.rows(num_layers=LAYERS, page_size=1, row_bytes=4)
    device = offload.DevicePool.allocate(spec, num_pages=num_pages, device="cpu")
    return device, offload.HostPool.like(device, num_pages=num_pages, layout="page_first")


async def submit_to_issue(groups: Sequence[Group], num_pages: int) -> list[float]:
    """Return the seconds of each group of requests, from the first submit to the last layer's issue."""
    device, host = pools(num_pages)
    driver = PaperDriver()
    took = []
    async with offload.open_scheduler(
        device, host, driver=driver, io_backend=NAME, limits=LIMITS
    ) as scheduler:
        for group in groups:
            start = time.thread_time()
            for hosts, devices in group:
                scheduler.load_nowait(host_pages=hosts, device_pages=devices)
            while scheduler.statistics().queued_requests:
                await checkpoint()
            took.append(driver.load.issued_at - start)
            driver.load.land(LAYERS)
            while scheduler.statistics().inflight_requests:
                await checkpoint()
    return took


def eight(count: int, *, lists: bool, rounds: int) -> list[Group]:
    """Return groups of 8 requests of so many scattered pages."""
    draw = np.random.default_rng(0)
    groups: list[Group] = []
    for _ in range(rounds):
        hosts = draw.permutation(4096)[: 8 * count].reshape(8, count)
        devices = draw.permutation(4096)[: 8 * count].reshape(8, count)
        pairs = list(zip(hosts, devices, strict=True))
        groups.append([(h.tolist(), d.tolist()) for h, d in pairs] if lists else pairs)
    return groups


def small(count: int, rounds: int) -> tuple[list[Group], int]:
    """Return groups of requests of 1 to 4 pages, and how many pages that takes."""
    draw = random.Random(0)
    sizes = [draw.randrange(1, 5) for _ in range(count)]
    ends = np.cumsum(sizes)
    num_pages = int(ends[-1])
    hosts = np.random.default_rng(0).permutation(num_pages)
    pairs = [
        (hosts[end - size : end], np.arange(end - size, end))
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]
    return [pairs] * rounds, num_pages


async def costs(quick: bool) -> dict[str, float]:
    """Measure everything that needs no thread."""
    rounds = 60 if quick else 400
    gc.collect()
    gc.freeze()
    figures = {}
    for name, count, lists in (
        ("submit_us_8x32", 64, False),
        ("submit_us_8x32_lists", 64, True),
        ("submit_us_8x32_16", 16, False),
        ("submit_us_8x32_16_lists", 16, True),
    ):
        took = await submit_to_issue(eight(count, lists=lists, rounds=rounds), 4096)
        figures[name] = median(took[len(took) // 4 :]) * 1e6
    each = {}
    for queued, times in ((64, rounds), (1024, rounds // 10), (100_000, 2 if quick else 5)):
        groups, num_pages = small(queued, times)
        took = await submit_to_issue(groups, num_pages)
        each[queued] = median(took[len(took) // 4 :]) / queued * 1e6
        figures[f"per_request_us_{queued}"] = each[queued]
    figures["flatness"] = max(each.values()) / min(each.values())
    return figures


class Worker:
    """A bare thread that is handed a function, runs it and wakes the loop."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], anyio.Event] | None] = (
            queue.SimpleQueue()
        )
        self._post = poster()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (handed := self._work.get()) is not None:
            work, done = handed
            work()
            self._post(done.set)

    async def run(self, work: Callable[[], object]) -> None:
        done = anyio.Event()
        self._work.put((work, done))
        await done.wait()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


async def handoffs(rounds: int) -> dict[str, float]:
    """Return the median seconds of a transfer and its peers, taken in turns."""
    spec = offload.PoolSpec.rows(num_layers=1, page_size=1, row_bytes=4096)
    device = offload.DevicePool.allocate(spec, num_pages=8, device="cpu")
    host = offload.HostPool.like(device, num_pages=8, layout="page_first")
    source, target = host.view("row", 0), device.view("row", 0)

    def copy() -> None:
        target[1].copy_(source[1])

    worker = Worker()
    async with offload.open_scheduler(device, host, driver="threads") as scheduler:

        async def transfer() -> None:
            await (await scheduler.load(host_pages=[1], device_pages=[1]))

        runs: dict[str, Callable[[], Awaitable[object]]] = {
            "transfer": transfer,
            "bare": lambda: worker.run(lambda: None),
            "to_thread": lambda: anyio.to_thread.run_sync(copy),
        }
        took: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                await run()
                took[name].append(time.perf_counter() - start)
    worker.close()
    return {name: median(times[rounds // 10 :]) for name, times in took.items()}


def handoff(quick: bool) -> dict[str, float]:
    """Measure on one core, under both event loops."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    figures: dict[str, float] = {}
    try:
        for backend, suffix in (("asyncio", ""), ("trio", "_trio")):
            took = anyio.run(handoffs, 300 if quick else 3000, backend=backend)
            figures |= {f"handoff_{name}_us{suffix}": each * 1e6 for name, each in took.items()}
            figures[f"handoff_added_us{suffix}"] = (took["transfer"] - took["bare"]) * 1e6
            figures[f"handoff_ratio{suffix}"] = took["transfer"] / took["to_thread"]
    finally:
        os.sched_setaffinity(0, cores)
    return figures


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    torch.set_num_threads(1)
    figures = anyio.run(costs, given.quick)
    finish("submit", figures | handoff(given.quick), given)


if __name__ == "__main__":
    main()
