"""`hold`: one batch of several calls, and no wait that could never end."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import Bed, contents, on_both, pools, sim_scheduler, state, threads_scheduler

WAITS: dict[str, Callable[[offload.Transfer], object]] = {
    "await": lambda load: load.__await__(),
    "issued": lambda load: load.issued(),
    "layer": lambda load: load.layer(2),
    "source_reusable": lambda load: load.source_reusable(),
}
BLOCKING: dict[str, Callable[[offload.Transfer], object]] = {
    "result": lambda load: load.result(),
    "wait_issued": lambda load: load.wait_issued(),
    "wait_layer": lambda load: load.wait_layer(2),
    "wait_source_reusable": lambda load: load.wait_source_reusable(),
    "fence": lambda load: load.fence(1),
}


async def ended(wait: object) -> None:
    """Await something that may be a bare iterator."""

    class Awaitable:
        def __await__(self) -> object:
            return wait if hasattr(wait, "__next__") else wait.__await__()  # type: ignore[attr-defined]

    await Awaitable()  # type: ignore[misc]


async def held_directly(bed: Bed) -> offload.Transfer:
    """Return a load that the hold keeps back."""
    return await bed.scheduler.load(host_pages=[0], device_pages=[0])


async def held_behind(bed: Bed) -> offload.Transfer:
    """Return a load of another thread that follows one that the hold keeps back, over a third."""
    await bed.scheduler.load(host_pages=[0], device_pages=[0])

    def others() -> offload.Transfer:
        face = bed.scheduler.from_thread
        face.backup(device_pages=[0], host_pages=[1])
        return face.load(host_pages=[1], device_pages=[1])

    return await anyio.to_thread.run_sync(others)


async def held_as_rider(bed: Bed) -> offload.Transfer:
    """Return a load that shares one that the hold keeps back."""
    await bed.scheduler.load(host_pages=[0], device_pages=[0])
    return await bed.scheduler.load(host_pages=[0], device_pages=[0], join=True)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("held", [held_directly, held_behind, held_as_rider])
@on_both
async def test_waiting_inside_the_own_hold_is_refused(
    wait: str, held: Callable[[Bed], object]
) -> None:
    """What cannot begin before the block ends cannot be awaited in it; after the block it can."""
    async with sim_scheduler() as bed:
        with bed.scheduler.hold():
            load: offload.Transfer = await held(bed)  # type: ignore[misc]
            with pytest.raises(offload.RequestError, match="Leave the block, then wait"):
                await ended(WAITS[wait](load))
        await bed.sim.run_until_idle()
        await ended(WAITS[wait](load))


@pytest.mark.parametrize("wait", BLOCKING)
@on_both
async def test_blocking_inside_the_own_hold_is_refused(wait: str) -> None:
    """The same for a thread that holds, and for the pages of what it holds."""
    async with threads_scheduler() as (scheduler, *_):

        def work() -> None:
            face = scheduler.from_thread
            with face.hold():
                load = face.load(host_pages=[0], device_pages=[0])
                with pytest.raises(offload.RequestError, match="Leave the block, then wait"):
                    BLOCKING[wait](load)
                with pytest.raises(offload.RequestError, match="Leave the block, then wait"):
                    face.wait_idle(host_pages=[0])
                face.wait_idle(host_pages=[1])
            BLOCKING[wait](load)

        await anyio.to_thread.run_sync(work)


@on_both
async def test_waiting_for_idle_pages_inside_the_own_hold_is_refused() -> None:
    """Pages of what is held are not idle before the block ends; others may be waited for."""
    async with sim_scheduler() as (scheduler, sim, *_):
        other = await scheduler.load(host_pages=[5], device_pages=[5])
        with scheduler.hold():
            await scheduler.load(host_pages=[0], device_pages=[0])
            for host, device in (([], [0]), ([0, 1], [])):
                with pytest.raises(offload.RequestError, match="Leave the block, then wait"):
                    await scheduler.idle(host_pages=host, device_pages=device)
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: scheduler.idle(device_pages=[5]))
                await sim.run_until_idle()
            await other
        await sim.run_until_idle()
        await scheduler.idle(device_pages=[0])


@on_both
async def test_another_task_may_wait_for_what_is_held() -> None:
    """A task that is not in the block waits as ever: the block will end."""
    async with sim_scheduler() as (scheduler, sim, *_), anyio.create_task_group() as group:
        with scheduler.hold():
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            group.start_soon(load.layer, 0)
            await sim.run_until_idle()
            assert state(load) == "queued"
        await sim.run_until_idle()
        assert load.done


@on_both
async def test_what_is_done_may_be_awaited_in_a_hold() -> None:
    """A wait that need not wait is never refused."""
    async with sim_scheduler() as (scheduler, *_):
        with scheduler.hold():
            empty = await scheduler.load(host_pages=[], device_pages=[])
            await empty
            held = await scheduler.load(host_pages=[0], device_pages=[0])
            held.cancel()
            with pytest.raises(offload.TransferCancelled):
                await held


@pytest.mark.parametrize("drain", [False, True])
@on_both
async def test_closing_lets_go_of_what_is_held(drain: bool) -> None:
    """`aclose` inside a hold ends: what is held is cancelled, or drained like all else."""
    async with sim_scheduler() as (scheduler, _, device, host):
        before = contents(host, [3])
        with scheduler.hold():
            load = await scheduler.load(host_pages=[3], device_pages=[0])
            with anyio.fail_after(5):
                await scheduler.aclose(drain=drain)
        assert state(load) == ("done" if drain else "cancelled")
        assert (contents(device, [0]) == before) is drain


def test_closing_lets_go_of_what_a_thread_holds() -> None:
    """A thread that died in its hold keeps nothing back for ever."""
    hooks = Hooks()
    device, host = pools()
    driver = ThreadsDriver(hooks=hooks)
    scheduler = offload.start_scheduler(device, host, driver=driver)
    scheduler.hold().__enter__()
    load = scheduler.load(host_pages=[3], device_pages=[0])
    scheduler.close(drain=True, timeout=5.0)
    load.result()
