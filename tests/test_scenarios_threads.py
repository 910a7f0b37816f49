"""Faults that other projects had, on real threads and under load; see `test_known_cases` for the list."""

from __future__ import annotations

import asyncio
import os
import random
import threading

import anyio
import pytest

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import (
    PAGE_BYTES,
    PATIENCE_S,
    check_left,
    contents,
    on_both,
    pools,
    run,
    sim_scheduler,
    state,
    threads_scheduler,
)
from tests.test_cancel import outcome


@on_both
async def test_k17_on_threads_a_load_of_unfinished_backups_and_the_reverse() -> None:
    """Slow copies on real workers: a load behind a backup reads the new bytes, one in front the old."""
    hooks = Hooks()
    hooks.delay(0.03, nth=1)
    hooks.delay(0.03, nth=9)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, device, host):
        old_device, old_host = contents(device, [0, 1]), contents(host, [2, 3])
        backup = await scheduler.backup(device_pages=[0, 1], host_pages=[4, 5])
        load = await scheduler.load(host_pages=[4, 5], device_pages=[6, 7])
        await load
        await backup
        assert contents(device, [6, 7]) == contents(host, [4, 5]) == old_device
        load = await scheduler.load(host_pages=[2, 3], device_pages=[4, 5])
        backup = await scheduler.backup(device_pages=[0, 1], host_pages=[2, 3])
        await backup
        await load
        assert contents(device, [4, 5]) == old_host
        assert contents(host, [2, 3]) == old_device


def test_k22_twenty_restarts_with_a_failure_in_each() -> None:
    """Six backups of which the third breaks, twenty times over: the same threads, files and pages are left."""
    device, host = pools()
    before = contents(device, range(6))
    counts = []

    async def once() -> None:
        hooks = Hooks()
        hooks.fail(OSError("store"), stream="backup", layer=0, nth=3)
        driver = ThreadsDriver(hooks=hooks)
        limits = offload.Limits(max_inflight_requests=1)
        async with offload.open_scheduler(device, host, driver=driver, limits=limits) as scheduler:
            target = host.pages.alloc(6)
            backups = [
                await scheduler.backup(device_pages=[page], host_pages=target[page : page + 1])
                for page in range(6)
            ]
            ends = [await outcome(backup) for backup in backups]
            assert ends == ["done", "done", "failed at 0: OSError('store')", *["done"] * 3]
            for page in (0, 1, 3, 4, 5):
                assert contents(host, [int(target[page])]) == before[4 * page : 4 * page + 4]
            await scheduler.idle(host_pages=target)
            host.pages.free(target)
        check_left(scheduler, device, host)

    for _ in range(20):
        run(once)
        counts.append(
            (threading.active_count(), len(os.listdir("/proc/self/fd")), host.pages.num_free)
        )
    assert set(counts) == {counts[0]}


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("real", [False, True], ids=["simulator", "threads"])
@on_both
async def test_k24_whichever_layer_fails_everybody_hears(bad: int, real: bool) -> None:
    """Suspended waiters of each layer and of the whole; late ones, again and again; the pages come back."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=bad)
    gate = hooks.gate(layer=0)
    device, host = pools()
    sim = SimDriver(hooks=hooks)
    driver = ThreadsDriver(hooks=hooks) if real else sim
    before = contents(host, [3])
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        ends: dict[object, str] = {}

        async def wait(layer: int | None) -> None:
            ends[layer] = await outcome(load if layer is None else load.layer(layer))

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as group:
                for layer in (0, 1, 2, 3, None):
                    group.start_soon(wait, layer)
                await anyio.wait_all_tasks_blocked()
                gate.open()
                if not real:
                    await sim.run_until_idle()
            failed = f"failed at {bad}: OSError('no')"
            assert ends.pop(None) == failed
            assert ends == {layer: "done" if layer < bad else failed for layer in range(4)}
            for _ in range(2):
                assert [await outcome(load.layer(each)) for each in range(4)] == [
                    ends[each] for each in range(4)
                ]
            await load.source_reusable()
        assert (load.landed_layers, state(load)) == (bad, "failed")
        assert contents(device, [0], range(bad)) == before[:bad]
        assert not scheduler.busy(device_pages=[0], host_pages=[3])
    check_left(scheduler, device, host)


@pytest.mark.parametrize("how", ["cancelled", "wait_for", "fail_after"])
def test_k26_a_wait_that_ends_takes_its_queued_load_along(how: str) -> None:
    """A task whose wait is cancelled, or times out, cancels its load in the queue: no byte of it moves."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    limits = offload.Limits(max_inflight_requests=1)

    async def body() -> None:
        driver = ThreadsDriver(hooks=hooks)
        async with threads_scheduler(driver=driver, limits=limits) as (scheduler, device, _):
            before, owned = contents(device, [1]), device.pages.alloc(8)
            busy = await scheduler.load(host_pages=[0], device_pages=[0])
            queued = await scheduler.load(host_pages=[1], device_pages=[1])

            async def wait() -> None:
                try:
                    await queued
                except asyncio.CancelledError:
                    queued.cancel()
                    raise

            task = asyncio.create_task(wait())
            if how == "cancelled":
                await anyio.wait_all_tasks_blocked()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "wait_for":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(task, 0.01)
            else:
                with pytest.raises(TimeoutError), anyio.fail_after(0.01):
                    await wait()
                task.cancel()
            device.pages.free(owned[1:2])
            assert (state(queued), device.pages.num_free) == ("cancelled", 1)
            gate.open()
            await busy
            assert contents(device, [1]) == before
            assert len({id(op.flight) for op in hooks.ops}) == 1
            device.pages.free(owned[[0, *range(2, 8)]])

    run(body)


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_k26_five_hundred_cancels_at_the_moment_of_landing(first: int) -> None:
    """However a cancel meets a landing, in the queue or half way, both settle once and pages come back."""

    async def body(seed: int) -> None:
        draw = random.Random(seed)
        async with sim_scheduler(seed=seed, jitter=0.5, ahead=1 + seed % 3) as bed:
            loads = [
                await bed.scheduler.load(host_pages=[page], device_pages=[page // 2])
                for page in range(3)
            ]
            for _ in range(draw.randrange(30)):
                if draw.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
                bed.sim.step()
            victim = draw.choice(loads)
            victim.cancel()
            await bed.sim.run_until_idle()
            ends = [await outcome(load) for load in loads]
            assert all(
                load is victim or end == "done" for load, end in zip(loads, ends, strict=True)
            )
            numbers = bed.scheduler.statistics().load
            assert (numbers.settled, numbers.cancelled) == (3, ends.count("cancelled"))

    async def many() -> None:
        for seed in range(first, first + 50):
            await body(seed)

    run(many, "trio" if first % 100 else "asyncio")


@on_both
async def test_k35_a_thousand_backups_stay_within_the_bound() -> None:
    """A producer of a thousand one-page backups, its store stalled: never more than eight pages wait."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    limits = offload.Limits(max_queued_bytes=8 * PAGE_BYTES, max_inflight_requests=1)
    async with sim_scheduler(hooks=hooks, limits=limits, detect_races=False) as bed:
        scheduler, peak = bed.scheduler, [0]

        async def produce() -> None:
            for number in range(1000):
                await scheduler.backup(device_pages=[number % 8], host_pages=[number % 16])
                peak[0] = max(peak[0], scheduler.statistics().queued_bytes)

        async with anyio.create_task_group() as group:
            group.start_soon(produce)
            await bed.sim.run_until_idle()
            assert scheduler.statistics().backup.submitted == 9
            with pytest.raises(anyio.WouldBlock):
                scheduler.backup_nowait(device_pages=[0], host_pages=[0])
            gate.open()
            while scheduler.statistics().backup.settled < 1000:
                await bed.sim.run_until_idle()
        assert peak == [8 * PAGE_BYTES]


@on_both
async def test_k35_an_urgent_load_passes_twenty_backups() -> None:
    """Loads of pages that no backup touches begin after at most the copy under way."""
    hooks = Hooks()
    limits = offload.Limits(max_inflight_requests=1)
    async with sim_scheduler(hooks=hooks, limits=limits, latency=1.0, host_pages=168) as bed:
        for number in range(20):
            await bed.scheduler.backup(
                device_pages=range(7), host_pages=range(8 * number, 8 * number + 7)
            )
        await bed.sim.advance(1.5)
        begun = len(hooks.ops)
        load = await bed.scheduler.load(host_pages=[167], device_pages=[7])
        await bed.sim.run_until_idle()
        flights = list(dict.fromkeys(op.flight for op in hooks.ops))
        assert [op.stream for op in hooks.ops[:4]] == ["backup"] * 4
        assert begun <= 4
        assert [op.stream for op in hooks.ops[4:8]] == ["load"] * 4
        assert len(flights) == 21
        assert state(load) == "done"


async def alone(scheduler: offload.Scheduler, sim: SimDriver) -> float:
    """Return how long a load of one page takes."""
    begun = scheduler.now()
    load = await scheduler.load(host_pages=[1], device_pages=[1])
    while not load.done:
        await sim.advance(1e-6)
    return scheduler.now() - begun


@on_both
async def test_k35_a_slow_consumer_costs_others_no_time() -> None:
    """While one consumer takes 100 ms per layer, another request's load is as quick as alone."""
    async with sim_scheduler() as (scheduler, sim, *_):
        undisturbed = await alone(scheduler, sim)
        slow = await scheduler.load(host_pages=[0], device_pages=[0])
        seen: list[int] = []

        async def consume() -> None:
            for layer in range(4):
                await slow.layer(layer)
                await sim.sleep_until(sim.now() + 0.1)
                seen.append(layer)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await sim.advance(0.15)
            assert seen == [0]
            assert await alone(scheduler, sim) == pytest.approx(undisturbed, abs=2e-6)
            assert seen == [0]
            await sim.advance(1.0)
        assert seen == [0, 1, 2, 3]


@on_both
async def test_k35_a_consumer_that_stops_stops_nobody() -> None:
    """On threads, a consumer in a worker thread that stays at layer 0 holds up no other load."""
    go = threading.Event()
    async with threads_scheduler() as (scheduler, device, host):
        before = contents(host, [1])
        slow = await scheduler.load(host_pages=[0], device_pages=[0])

        def consume() -> list[int]:
            seen = []
            for layer in range(4):
                slow.wait_layer(layer, PATIENCE_S)
                assert go.wait(PATIENCE_S)
                seen.append(layer)
            return seen

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, consume)
            for _ in range(20):
                await (await scheduler.load(host_pages=[1], device_pages=[1]))
            assert contents(device, [1]) == before
            go.set()
