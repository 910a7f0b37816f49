"""Turns of the loop: none is long, and none comes that nobody waits for."""

from __future__ import annotations

import anyio
import pytest

import offload
from offload import acts, shell
from tests.sched import contents, on_both, sim_scheduler, threads_scheduler


@on_both
async def test_batches_hold_as_many_requests_as_limits_say() -> None:
    """Requests of one turn go up in batches of so many, and all of them land."""
    async with sim_scheduler(limits=offload.Limits(max_batch_requests=3)) as (scheduler, sim, *_):
        loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(8)]
        await sim.run_until_idle()
        assert scheduler.statistics().batches == 3
        assert all(load.done for load in loads)


@on_both
async def test_landings_of_many_batches_are_taken_in_several_turns() -> None:
    """What one turn leaves, the next ones take: every request settles and gives its pages back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_PER_TURN", 1)
        limits = offload.Limits(max_batch_ops=1)
        async with threads_scheduler(limits=limits) as (scheduler, device, host):
            loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(8)]
            for load in loads:
                await load
            assert not scheduler.busy(device_pages=range(8), host_pages=range(8))
            assert contents(device, range(8)) == contents(host, range(8))


@on_both
async def test_held_requests_are_let_go_a_few_at_a_time() -> None:
    """A hold of more than one turn lets go of ends in several, and keeps the order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acts, "_LET_GO", 2)
        async with sim_scheduler() as (scheduler, sim, *_):
            with scheduler.hold():
                loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(7)]
            await sim.run_until_idle()
            assert all(load.done for load in loads)
            assert scheduler.statistics().batches == 4


@on_both
async def test_only_who_waits_for_a_layer_wakes_the_loop_for_layers() -> None:
    """A task that waits for a whole transfer asks its flight for no news of layers; for one layer it does."""
    async with sim_scheduler() as (scheduler, sim, *_), anyio.create_task_group() as group:
        load = await scheduler.load(host_pages=[1], device_pages=[1])
        group.start_soon(load._settled)
        await sim.advance_to_layer(1)
        flight = load._ride.flight_of(0)
        assert flight is not None
        assert not flight.watched
        group.start_soon(load.layer, 2)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert flight.watched
        await sim.run_until_idle()
