"""`busy` and `idle`: every pool that a request touches counts, and nobody waits in the wrong place."""

from __future__ import annotations

from typing import Literal

import anyio
import anyio.to_thread
import pytest

import offload
from offload.testing import SimDriver
from tests.sched import SPEC, on_both, sim_scheduler


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
