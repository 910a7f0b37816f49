"""`busy` and `idle`: every pool that a request touches counts, and nobody waits in the wrong place."""

from __future__ import annotations

import functools
from typing import Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import offload
from offload import asked, scheduler, threadface, vacancy
from offload.shell import Places
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import LOOPS, SPEC, on_both, on_loops, pools, sim_scheduler, threads_scheduler


def a_group() -> offload.PoolGroup:
    """Return an anchor, a member that follows it, and one with pages of its own."""

    def pair(pages: Literal["same", "own"]) -> offload.Pair:
        device = offload.DevicePool.allocate(SPEC, num_pages=8)
        host = offload.HostPool.like(device, num_pages=8, layout="page_first")
        return offload.Pair(device, host, pages=pages)

    return offload.PoolGroup(kv=pair("same"), indexer=pair("same"), swa=pair("own"))


def own(host: list[int], device: list[int]) -> dict[str, offload.PagePair]:
    """Return the pages of the member that has its own."""
    return {"swa": offload.PagePair(host_pages=host, device_pages=device)}


@on_both
async def test_pages_of_members_with_their_own_count() -> None:
    """A member's own pages are busy as long as the request is under way, whatever the anchor's ids say."""
    sim = SimDriver()
    async with offload.open_scheduler(a_group(), driver=sim) as scheduler:
        await scheduler.load(host_pages=[1], device_pages=[2], members=own([3], [4]))
        assert scheduler.busy(members=own([3], []))
        assert scheduler.busy(members=own([], [4]))
        assert scheduler.busy(device_pages=[2], members=own([0], [0]))
        assert not scheduler.busy(device_pages=[4], host_pages=[3], members=own([1], [2]))
        idle = anyio.Event()

        async def wait() -> None:
            await scheduler.idle(members=own([3], [4]))
            idle.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await sim.advance(0)
            assert not idle.is_set()
            await sim.run_until_idle()
            assert idle.is_set()
        assert not scheduler.busy(members=own([3], [4]))


@on_both
async def test_pages_of_members_count_in_threads_too() -> None:
    """`busy` and `wait_idle` of other threads take `members` as well."""
    device_pages, driver = [2], offload.testing.ThreadsDriver()
    async with offload.open_scheduler(a_group(), driver=driver) as scheduler:

        def work() -> None:
            face = scheduler.from_thread
            with face.hold():
                face.load(host_pages=[1], device_pages=device_pages, members=own([3], [4]))
                assert face.busy(members=own([3], []))
                assert not face.busy(members=own([1], [2]))
            face.wait_idle(members=own([3], [4]), timeout=5.0)
            assert not face.busy(device_pages=device_pages, members=own([3], [4]))

        await anyio.to_thread.run_sync(work)


@on_both
async def test_wrong_pages_and_members_are_refused() -> None:
    """A page out of range, and a member that has no pages of its own, are refused as by `load`."""
    async with offload.open_scheduler(a_group(), driver=SimDriver()) as scheduler:
        with pytest.raises(offload.RequestError, match="host page 9"):
            scheduler.busy(members=own([9], []))
        with pytest.raises(offload.UnknownNameError, match="swa"):
            await scheduler.idle(
                members={"indexer": offload.PagePair(host_pages=[0], device_pages=[0])}
            )


@on_both
async def test_idle_on_another_loop_is_refused() -> None:
    """A wait that another loop's news would have to end says so."""
    caught: list[BaseException] = []
    async with sim_scheduler() as (scheduler, *_):

        async def foreign() -> None:
            try:
                await scheduler.idle(device_pages=[0])
            except offload.RequestError as error:
                caught.append(error)

        await anyio.to_thread.run_sync(anyio.run, foreign)
    assert "wait_idle" in str(caught[0])


def counted(patch: pytest.MonkeyPatch) -> list[object]:
    """Count the looks at pages of all who wait for them."""
    looks: list[object] = []
    inner = asked.in_use

    def in_use(places: Places) -> bool:
        looks.append(places)
        return inner(places)

    for face in (scheduler, threadface, vacancy):
        patch.setattr(face, "in_use", in_use)
    return looks


@pytest.mark.parametrize("count", [8, 64])
@on_both
async def test_who_waits_for_pages_looks_when_they_are_free_and_not_whenever_some_are(
    count: int,
) -> None:
    """As many tasks as requests, each behind its own, look at their pages twice each: not all at every end."""
    limits = offload.Limits(max_inflight_requests=1, max_batch_requests=1)
    async with sim_scheduler(limits=limits, device_pages=64, host_pages=64) as bed:
        scheduler, sim = bed.scheduler, bed.sim
        for page in range(count):
            await scheduler.load(host_pages=[page], device_pages=[page])
        with pytest.MonkeyPatch.context() as patch:
            looks = counted(patch)
            async with anyio.create_task_group() as group:
                for page in range(count):
                    group.start_soon(functools.partial(scheduler.idle, host_pages=[page]))
                await sim.run_until_idle()
            assert len(looks) == 2 * count
        assert not scheduler._shell.vacancies


@on_loops(*LOOPS)
async def test_threads_that_wait_for_pages_look_when_they_are_free() -> None:
    """Threads too: each looks a few times, however many requests of others end meanwhile."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    limits = offload.Limits(max_inflight_requests=1, max_batch_requests=1)
    async with threads_scheduler(driver=driver, limits=limits) as (scheduler, *_):
        for page in range(8):
            await scheduler.load(host_pages=[page], device_pages=[page])
        with pytest.MonkeyPatch.context() as patch:
            looks = counted(patch)
            async with anyio.create_task_group() as group:
                for page in range(8):
                    wait = functools.partial(scheduler.from_thread.wait_idle, host_pages=[page])
                    group.start_soon(anyio.to_thread.run_sync, wait)
                while sum(map(len, scheduler._shell.vacancies._waiting.values())) < 8:
                    await anyio.lowlevel.checkpoint()
                gate.open()
            assert len(looks) <= 4 * 8
        assert not scheduler._shell.vacancies


@on_both
async def test_a_wait_that_is_given_up_leaves_nothing_behind() -> None:
    """Cancelled, or too late, nobody stands behind a request any more."""
    hooks = Hooks()
    gate = hooks.gate()
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        with anyio.move_on_after(0):
            await scheduler.idle(device_pages=[0])
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(scheduler.idle, device_pages=[0]))
            while not scheduler._shell.vacancies:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()

        def late() -> None:
            for timeout in (0, 0.01):
                with pytest.raises(TimeoutError):
                    scheduler.from_thread.wait_idle(device_pages=[0], timeout=timeout)

        await anyio.to_thread.run_sync(late)
        await anyio.lowlevel.checkpoint()
        scheduler._shell.take_inbox()
        assert not scheduler._shell.vacancies
        gate.open()
        await load


@on_both
async def test_whoever_waits_for_pages_hears_of_layers_ghosts_and_locks() -> None:
    """Pages of a layer, of a cancelled request that stands behind another, of one after another: all come free."""
    async with sim_scheduler() as (scheduler, sim, *_):
        ends: list[str] = []

        async def wait(name: str, **pages: Any) -> None:
            await scheduler.idle(**pages)
            ends.append(name)

        backup = await scheduler.backup(device_pages=[0], host_pages=[0], streaming=True)
        backup.layer_written(0)
        first = await scheduler.load(host_pages=[3], device_pages=[3])
        ghost = await scheduler.load(host_pages=[4], device_pages=[3])
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(wait, "layer", device_pages=[0]))
            group.start_soon(functools.partial(wait, "ghost", host_pages=[4]))
            group.start_soon(functools.partial(wait, "both", device_pages=[3]))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            ghost.cancel()
            await scheduler.load(host_pages=[5], device_pages=[3])
            await sim.run_until_idle()
            assert sorted(ends) == ["both", "ghost", "layer"]
        assert first.done
        assert scheduler.busy(host_pages=[0])
        backup.cancel()


@on_both
async def test_pages_that_are_never_free_again_are_not_waited_for() -> None:
    """What a scheduler with a lost device has left in the air is told, not waited for."""
    device, host = pools()
    host.pages.table.claim(1, np.array([2]), write=False)
    async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
        with anyio.fail_after(5), pytest.raises(offload.RequestError, match="never free again"):
            await scheduler.idle(host_pages=[2])

        def work() -> None:
            with pytest.raises(offload.RequestError, match="never free again"):
                scheduler.from_thread.wait_idle(host_pages=[1, 2], timeout=5.0)

        await anyio.to_thread.run_sync(work)
        await scheduler.idle(host_pages=[1])
