"""A drain that is hurried: what is only queued is cancelled at once, and what is in the air lands all the same."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import LOOPS, check_left, on_loops, pools, state, threads_scheduler

HURRIES = ("scope", "another aclose", "deadline", "past deadline", "leaving")


@contextmanager
def never_done() -> Iterator[threading.Event]:
    """Return a mark that does not come while the block lasts."""
    mark = threading.Event()
    try:
        yield mark
    finally:
        mark.set()


@asynccontextmanager
async def draining(
    scheduler: offload.Scheduler, hurry: str, heard: list[str]
) -> AsyncIterator[None]:
    """Drain in one task, and hurry that from outside; note how the drain ends."""
    deadlines = {"deadline": scheduler.now() + 0.01, "past deadline": -math.inf}

    async def drain() -> None:
        try:
            await scheduler.aclose(drain=True, deadline=deadlines.get(hurry, math.inf))
        except anyio.get_cancelled_exc_class():
            heard.append("cancelled")
            raise
        heard.append("closed")

    async with anyio.create_task_group() as group, anyio.create_task_group() as drains:
        drains.start_soon(drain)
        for _ in range(5):
            await checkpoint()
        if hurry == "scope":
            drains.cancel_scope.cancel()
        elif hurry == "another aclose":
            group.start_soon(scheduler.aclose)
        elif hurry == "leaving":
            group.start_soon(scheduler.__aexit__, None, None, None)
        yield


@pytest.mark.parametrize("hurry", HURRIES)
@on_loops(*LOOPS)
async def test_a_drain_of_what_is_only_queued_ends_at_once(hurry: str) -> None:
    """Hurried in any way, `aclose(drain=True)` waits for nothing that is only queued, and is closed."""
    heard: list[str] = []
    async with threads_scheduler() as (scheduler, device, host):
        with never_done() as mark:
            load = await scheduler.load(host_pages=[0], device_pages=[0], after=mark)
            async with draining(scheduler, hurry, heard):
                pass
            assert (state(load), mark.is_set()) == ("cancelled", False)
        check_left(scheduler, device, host)
    assert heard == ["cancelled" if hurry == "scope" else "closed"]


@pytest.mark.parametrize("hurry", HURRIES)
@on_loops(*LOOPS)
async def test_a_hurried_drain_waits_for_what_is_in_the_air(hurry: str) -> None:
    """A copy under way lands before the hurried drain returns; what is queued behind it is cancelled before."""
    heard: list[str] = []
    hooks = Hooks()
    gate = hooks.gate(layer=2)
    driver, limits = ThreadsDriver(hooks=hooks), offload.Limits(max_inflight_requests=1)
    async with threads_scheduler(driver=driver, limits=limits) as (scheduler, *_):
        first = await scheduler.load(host_pages=[0], device_pages=[0])
        await first.layer(1)
        behind = await scheduler.load(host_pages=[1], device_pages=[0])
        async with draining(scheduler, hurry, heard):
            with anyio.CancelScope(shield=True):  # ours is the drain's scope
                with pytest.raises(offload.TransferCancelled):
                    await behind
                await checkpoint()
            early = list(heard)
            gate.open()
        assert early == []
        assert state(first) == "done"
    assert heard == ["cancelled" if hurry == "scope" else "closed"]


@on_loops(*LOOPS)
async def test_a_drain_in_a_cancelled_scope_closes_forcefully() -> None:
    """`aclose(drain=True)` whose scope is cancelled before it is called closes all the same, and is cancelled."""
    async with threads_scheduler() as (scheduler, device, host):
        with never_done() as mark:
            load = await scheduler.load(host_pages=[0], device_pages=[0], after=mark)
            with anyio.move_on_after(-1) as scope:
                await scheduler.aclose(drain=True)
            assert (scope.cancelled_caught, state(load)) == (True, "cancelled")
        check_left(scheduler, device, host)


@on_loops("asyncio", "uvloop")
async def test_asyncio_s_own_timeout_ends_a_drain() -> None:
    """`asyncio.timeout` around a drain ends it, and leaves no cancellation behind in the task."""
    async with threads_scheduler() as (scheduler, device, host):
        with never_done() as mark:
            load = await scheduler.load(host_pages=[0], device_pages=[0], after=mark)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await scheduler.aclose(drain=True)
            task = asyncio.current_task()
            assert task is not None
            assert (task.cancelling(), state(load)) == (0, "cancelled")
        check_left(scheduler, device, host)


def test_closing_a_blocking_scheduler_again_hurries_its_drain() -> None:
    """`close()` after a `close(drain=True)` that ran out of time cancels what is only queued."""
    scheduler = offload.start_scheduler(*pools())
    with never_done() as mark:
        load = scheduler.load(host_pages=[0], device_pages=[0], after=mark)
        with pytest.raises(TimeoutError, match="not closed within"):
            scheduler.close(drain=True, timeout=0.05)
        assert state(load) == "queued"
        scheduler.close(timeout=30.0)
        assert (state(load), mark.is_set()) == ("cancelled", False)
