"""Schedulers for tests: opened on the simulator, filled from a seed, and checked when they are left.

Bodies are coroutines; `on_loops` turns one into a test that runs on each event loop. What every test
must leave behind is checked here and not in the tests: nothing claimed, every request settled, every
counter back, the loop's exception handler never called.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest
import sniffio
import torch
import trio
from anyio.lowlevel import checkpoint

import offload
from offload.testing import Hooks, SimDriver
from tests import oracle

LOOPS: dict[str, tuple[str, dict[str, object]]] = {
    "asyncio": ("asyncio", {}),
    "trio": ("trio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}
"""By name, the backend and its options as `anyio.run` takes them."""

SPEC = offload.PoolSpec.mha(
    num_layers=4, page_size=2, num_kv_heads=2, head_dim=3, v_head_dim=5, dtype=torch.float16
)
PAGE_BYTES = SPEC.page_bytes
OURS = os.path.join(os.path.dirname(offload.__file__), "")
WORKERS = ("offload-load", "offload-backup", "offload-loop", "offload-apart")
"""How threads of a scheduler are called. Others are a caller's event's, or the process's."""

PATIENCE_S = 30.0
"""No body takes longer, however busy the machine is; one that does hangs."""

Body = Callable[..., Coroutine[Any, Any, None]]


def run(body: Body, loop: str = "asyncio", **arguments: object) -> None:
    """Run a body on a loop; fail when it hangs, or when the loop's exception handler was called."""
    backend, options = LOOPS[loop]
    complaints: list[object] = []

    async def bounded() -> None:
        if backend == "asyncio":
            handler = asyncio.get_running_loop().set_exception_handler
            handler(lambda _, context: complaints.append(context))
        with anyio.fail_after(PATIENCE_S):
            await body(**arguments)
        for _ in range(3):  # what was cancelled last may end
            await checkpoint()
        assert waiting_in_loop() == []

    anyio.run(bounded, backend=backend, backend_options=options)
    assert complaints == []


def waiting_in_loop() -> list[str]:
    """Return the tasks and timers of ours that the running loop still has, in its words."""
    if sniffio.current_async_library() == "trio":
        root = trio.lowlevel.current_root_task()
        assert root is not None
        tasks = [task for nursery in root.child_nurseries for task in nursery.child_tasks]
        return [task.name for task in tasks if task.name.startswith("offload.")]
    loop = asyncio.get_running_loop()
    timers = getattr(loop, "_scheduled", ())  # uvloop does not show its own
    found = [repr(timer) for timer in timers if not timer.cancelled()]
    found += [repr(task) for task in asyncio.all_tasks()]
    return [each for each in found if OURS in each]


def on_loops(*loops: str) -> Callable[[Body], Callable[..., None]]:
    """Make a test of a body, one per loop; without names, asyncio and trio."""

    def made(body: Body) -> Callable[..., None]:
        def test(loop: str, **arguments: object) -> None:
            run(body, loop, **arguments)

        functools.update_wrapper(test, body)
        del test.__dict__["__wrapped__"]
        given = inspect.signature(body).parameters.values()
        own = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *given])  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize("loop", loops or ("asyncio", "trio"))(
            test
        )
        return marked

    return made


on_both = on_loops()


class Bed(NamedTuple):
    """A scheduler under test and what it works on."""

    scheduler: offload.Scheduler
    sim: SimDriver
    device: offload.DevicePool
    host: offload.HostPool


@asynccontextmanager
async def sim_scheduler(
    *,
    spec: offload.PoolSpec = SPEC,
    device_pages: int = 8,
    host_pages: int = 16,
    layout: str = "page_first",
    limits: offload.Limits | None = None,
    tracer: offload.Tracer | None = None,
    hooks: Hooks | None = None,
    seed: int = 0,
    jitter: float = 0.0,
    ahead: int = 1,
    bandwidth: float = 1e9,
    latency: float = 10e-6,
    detect_races: bool = True,
) -> AsyncIterator[Bed]:
    """Open a scheduler on the simulator, over pools filled from a seed; check what it leaves behind."""
    device, host = pools(spec, device_pages, host_pages, layout)
    sim = SimDriver(
        seed, bandwidth=bandwidth, latency=latency, jitter=jitter, ahead=ahead, hooks=hooks,
        detect_races=detect_races,
    )  # fmt: skip
    async with offload.open_scheduler(
        device, host, driver=sim, limits=limits, tracer=tracer
    ) as scheduler:
        yield Bed(scheduler, sim, device, host)
    sim.raise_races()
    check_left(scheduler, device, host)


@asynccontextmanager
async def threads_scheduler(
    *,
    driver: offload.testing.ThreadsDriver | None = None,
    limits: offload.Limits | None = None,
    tracer: offload.Tracer | None = None,
) -> AsyncIterator[tuple[offload.Scheduler, offload.DevicePool, offload.HostPool]]:
    """Open a scheduler on worker threads, over filled pools; check what it leaves behind."""
    device, host = pools()
    async with offload.open_scheduler(
        device, host, driver=driver, limits=limits, tracer=tracer
    ) as scheduler:
        yield scheduler, device, host
    check_left(scheduler, device, host)


def pools(
    spec: offload.PoolSpec = SPEC,
    device_pages: int = 8,
    host_pages: int = 16,
    layout: str = "page_first",
) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return a device and a host pool, every byte filled from a seed."""
    device = offload.DevicePool.allocate(spec, num_pages=device_pages, device="cpu")
    host = offload.HostPool.allocate(spec, num_pages=host_pages, layout=layout, pinned=False)
    oracle.fill(device, 1)
    oracle.fill(host, 2)
    return device, host


def check_left(
    scheduler: offload.Scheduler, device: offload.DevicePool, host: offload.HostPool
) -> None:
    """Check what must hold when a scheduler has been left, whatever happened inside."""
    numbers = scheduler.statistics()
    for each in (numbers.load, numbers.backup):
        assert each.submitted == each.settled, numbers
    assert (numbers.queued_requests, numbers.queued_bytes) == (0, 0), numbers
    assert (numbers.inflight_requests, numbers.inflight_bytes) == (0, 0), numbers
    assert numbers.parked == 0, numbers
    for pool in (device, host):
        assert not pool.pages.table.busy(torch.arange(pool.num_pages).numpy())
        assert pool.pages.num_locked == 0
        assert pool.pages.table.owner is None
    assert [each.name for each in threading.enumerate() if each.name.startswith(WORKERS)] == []


async def check_still_open(
    scheduler: offload.Scheduler, device: offload.DevicePool, host: offload.HostPool
) -> None:
    """Check that a scheduler has its pools to itself and serves, after a call that was refused."""
    for pool in (device, host):
        assert pool.pages.table.owner is not None
    with pytest.raises(offload.RequestError, match="belongs to a scheduler that is open"):
        await offload.open_scheduler(device, host, driver=SimDriver()).__aenter__()
    driver = scheduler._shell.driver
    load = await scheduler.load(host_pages=[0], device_pages=[0])
    if isinstance(driver, SimDriver):
        await driver.run_until_idle()
    await load


def content(pool: offload.DevicePool | offload.HostPool, page: int, layer: int) -> bytes:
    """Return the bytes of one layer of a page, row by row, alike in every layout."""
    rows = [
        oracle.row(pool, made.name, layer, page, token, head)
        for made in pool.spec.components
        for token in range(made.component.tokens)
        for head in range(made.component.heads)
    ]
    return bytes(torch.cat(rows).numpy().tobytes())


def contents(
    pool: offload.DevicePool | offload.HostPool,
    pages: Iterable[int],
    layers: Iterable[int] | None = None,
) -> list[bytes]:
    """Return the bytes of pages, layer by layer."""
    found = list(range(pool.num_layers) if layers is None else layers)
    return [content(pool, page, layer) for page in pages for layer in found]


def overwrite(pool: offload.DevicePool | offload.HostPool, pages: Sequence[int], byte: int) -> None:
    """Set every byte of pages."""
    for page in pages:
        for made in pool.spec.components:
            for layer in range(pool.num_layers):
                for token in range(made.component.tokens):
                    for head in range(made.component.heads):
                        row = oracle.row(pool, made.name, layer, page, token, head)
                        oracle.put(
                            pool, made.name, layer, page, token, head, torch.full_like(row, byte)
                        )


def state(transfer: offload.Transfer) -> str:
    """Return a transfer's state as it is now, as a word."""
    return str(transfer.state)


def check_workers_end(before: set[threading.Thread], hooks: Hooks) -> None:
    """Check that a scheduler which nobody left, once forgotten, takes the threads since `before` along."""
    workers = set(threading.enumerate()) - before
    for _ in range(50):
        gc.collect()
        hooks.ops.clear()  # they know the flights
        for worker in workers:
            worker.join(0.1)
        if not any(worker.is_alive() for worker in workers):
            return
    raise AssertionError(f"still alive: {workers}")
