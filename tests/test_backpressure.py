"""Limits: who parks, in which order they are let in, and that no permit is lost or doubled."""

from __future__ import annotations

import anyio
import attrs
import pytest

import offload
from offload.testing import Hooks
from tests.sched import PAGE_BYTES, contents, on_both, sim_scheduler, state

TWO_PAGES = offload.Limits(max_queued_bytes=2 * PAGE_BYTES, max_inflight_requests=1)


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(offload.Limits)])
def test_limits_are_at_least_one(field: str) -> None:
    """A bound of 0 or less would admit nothing for ever, and is refused by name."""
    with pytest.raises(ValueError, match=field):
        offload.Limits(**{field: 0})


@on_both
async def test_nowait_raises_would_block_where_await_parks() -> None:
    """At the bound `load_nowait` raises, and nothing is queued; below it both are admitted."""
    async with sim_scheduler(limits=TWO_PAGES) as (scheduler, sim, *_):
        for page in range(2):
            scheduler.load_nowait(host_pages=[page], device_pages=[page])
        for call in (scheduler.load_nowait, scheduler.backup_nowait):
            with pytest.raises(anyio.WouldBlock):
                call(host_pages=[5], device_pages=[5])
        assert scheduler.statistics().queued_requests == 2
        await sim.run_until_idle()
        assert not scheduler.busy(device_pages=[5])


@on_both
async def test_a_request_larger_than_the_bound_goes_alone() -> None:
    """What alone exceeds the bound is admitted when nothing else is queued."""
    async with sim_scheduler(limits=TWO_PAGES) as (scheduler, sim, *_):
        big = scheduler.load_nowait(host_pages=range(5), device_pages=range(5))
        with pytest.raises(anyio.WouldBlock):
            scheduler.load_nowait(host_pages=[6], device_pages=[6])
        await sim.run_until_idle()
        assert big.done


@on_both
async def test_the_parked_are_let_in_by_priority_and_then_in_order() -> None:
    """Higher priorities first; equal ones as they came."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(limits=TWO_PAGES, hooks=hooks) as (scheduler, sim, *_):
        for page in range(2):
            await scheduler.load(host_pages=[page], device_pages=[page])
        await sim.run_until_idle()
        await scheduler.load(host_pages=[9], device_pages=[7])
        admitted: list[str] = []

        async def submit(name: str, priority: int) -> None:
            await scheduler.load(host_pages=[5], device_pages=[2], priority=priority)
            admitted.append(name)

        async with anyio.create_task_group() as group:
            for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", 1), ("f", -1)):
                group.start_soon(submit, name, priority)
                await sim.run_until_idle()
            assert admitted == []
            assert scheduler.statistics().parked == 6
            gate.open()
            await sim.run_until_idle()
        assert admitted == ["c", "e", "a", "b", "d", "f"]


@on_both
async def test_newcomers_do_not_overtake_the_parked() -> None:
    """While somebody as urgent is parked, a newcomer parks too, even one that would fit."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(limits=TWO_PAGES, hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        await scheduler.load(host_pages=[1], device_pages=[1])
        async with anyio.create_task_group() as group:

            async def submit() -> None:
                await scheduler.load(host_pages=[2, 3], device_pages=[2, 3])

            group.start_soon(submit)
            await sim.run_until_idle()
            assert scheduler.statistics().parked == 1
            with pytest.raises(anyio.WouldBlock):
                scheduler.load_nowait(host_pages=[4], device_pages=[4])
            scheduler.load_nowait(host_pages=[4], device_pages=[4], priority=1)
            gate.open()
            await sim.run_until_idle()


@pytest.mark.parametrize("woken", [False, True])
@on_both
async def test_cancelled_while_parked_nothing_was_submitted(woken: bool) -> None:
    """A parked call that is cancelled, even when it was just let in, submits nothing and loses no permit."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(limits=TWO_PAGES, hooks=hooks) as (scheduler, sim, *_):
        first = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        queued = await scheduler.load(host_pages=[1, 2], device_pages=[1, 2])
        scopes = [anyio.CancelScope(), anyio.CancelScope()]
        admitted: list[int] = []

        async def submit(number: int) -> None:
            with scopes[number]:
                await scheduler.load(host_pages=[3], device_pages=[3 + number])
                admitted.append(number)

        async with anyio.create_task_group() as group:
            group.start_soon(submit, 0)
            await sim.run_until_idle()
            group.start_soon(submit, 1)
            await sim.run_until_idle()
            if woken:
                queued.cancel()
            scopes[0].cancel()
            await sim.run_until_idle()
            assert scheduler.statistics().load.submitted == (3 if woken else 2)
            gate.open()
            await sim.run_until_idle()
        assert admitted == [1]
        assert scheduler.statistics().load.submitted == 3
        assert first.done


@on_both
async def test_a_deadline_that_passes_while_parked_raises_there() -> None:
    """`await load` raises TimeoutError at the deadline, and nothing was submitted."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(limits=TWO_PAGES, hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        await scheduler.load(host_pages=[1, 2], device_pages=[1, 2])
        raised: list[float] = []

        async def submit() -> None:
            with pytest.raises(TimeoutError, match="nothing was submitted"):
                await scheduler.load(host_pages=[3], device_pages=[3], deadline=1.0)
            raised.append(scheduler.now())

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            await sim.advance(0.5)
            assert raised == []
            await sim.advance(1.0)
            assert raised
            assert scheduler.statistics().parked == 0
            gate.open()
        await sim.run_until_idle()
        assert scheduler.statistics().load.submitted == 2


@on_both
async def test_closing_refuses_the_parked() -> None:
    """Parked calls raise SchedulerClosedError when the scheduler closes."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(limits=TWO_PAGES, hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        await scheduler.load(host_pages=[1, 2], device_pages=[1, 2])
        refused: list[int] = []

        async def submit(number: int) -> None:
            with pytest.raises(offload.SchedulerClosedError):
                await scheduler.load(host_pages=[3], device_pages=[3])
            refused.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(submit, number)
            await sim.run_until_idle()
            group.start_soon(scheduler.aclose)
            gate.open()
            await sim.run_until_idle()
        assert sorted(refused) == [0, 1, 2]


@on_both
async def test_a_hold_that_meets_the_bound_lets_go() -> None:
    """What is held is released when the next request has to park for it, so nobody waits for ever."""
    async with sim_scheduler(limits=TWO_PAGES) as (scheduler, sim, *_):
        done: list[int] = []

        async def submit() -> None:
            with scheduler.hold():
                for page in range(6):
                    await scheduler.load(host_pages=[page], device_pages=[page])
                    done.append(page)

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            await sim.run_until_idle()
        await sim.run_until_idle()
        assert done == list(range(6))
        assert scheduler.statistics().load.settled == 6


@on_both
async def test_in_flight_bytes_never_exceed_the_bound() -> None:
    """With a bound on bytes in flight, batches are cut to it and queue behind each other."""
    limits = offload.Limits(max_inflight_bytes=3 * PAGE_BYTES)
    async with sim_scheduler(limits=limits) as (scheduler, sim, device, host):
        before = contents(host, range(8))
        for page in range(8):
            await scheduler.load(host_pages=[page], device_pages=[page])
        most = 0
        while scheduler.statistics().load.settled < 8:
            for _ in range(4):
                await anyio.lowlevel.checkpoint()
            most = max(most, scheduler.statistics().inflight_bytes)
            sim.step()
        assert most == 3 * PAGE_BYTES
        await sim.run_until_idle()
        assert contents(device, range(8)) == before


@on_both
async def test_a_bound_of_one_request_runs_a_whole_chain() -> None:
    """With one request in flight at a time, chains over both directions still end, in order."""
    limits = offload.Limits(max_inflight_requests=1, max_queued_bytes=PAGE_BYTES)
    async with sim_scheduler(limits=limits) as (scheduler, sim, device, host):
        before = contents(device, [0])
        transfers: list[offload.Transfer] = []

        async def submit() -> None:
            for page in range(7):
                transfers.append(await scheduler.backup(device_pages=[page], host_pages=[page]))
                transfers.append(await scheduler.load(host_pages=[page], device_pages=[page + 1]))

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            await sim.run_until_idle()
        await sim.run_until_idle()
        assert {state(transfer) for transfer in transfers} == {"done"}
        assert contents(device, [7]) == before
        assert contents(host, [6]) == before
