"""Turns of the loop: none is long, and none comes that nobody waits for."""

from __future__ import annotations

import threading

import anyio
import pytest

import offload
from offload import actions, closing, parking, shell, timer
from offload.core import machine
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import (
    PAGE_BYTES,
    contents,
    on_both,
    pools,
    sim_scheduler,
    state,
    threads_scheduler,
)


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
        patch.setattr(actions, "_LET_GO", 2)
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
        flight = load._entry.flight_of(0)
        assert flight is not None
        assert not flight.watched
        group.start_soon(load.layer, 2)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert flight.watched
        await sim.run_until_idle()


@on_both
async def test_deadlines_of_one_moment_are_kept_in_several_turns() -> None:
    """Requests whose deadlines pass at once fail a few at a time, and all of them do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "_PER_RING", 2)
        hooks = Hooks()
        gate = hooks.gate()
        async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
            when = scheduler.now() + 1.0
            loads = [
                await scheduler.load(host_pages=[n], device_pages=[0], deadline=when)
                for n in range(7)
            ]
            await sim.advance(2.0)
            assert [state(load) for load in loads] == ["draining"] * 7
            gate.open()
            await sim.run_until_idle()
            assert [state(load) for load in loads] == ["failed"] * 7


@pytest.mark.parametrize("streaming", [False, True])
@on_both
async def test_a_drain_gives_up_a_few_at_a_time(streaming: bool) -> None:
    """What a drain cancels, at its deadline or because no forward will write it, it cancels in several turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "_CHUNK", 2)
        hooks = Hooks()
        gate = hooks.gate()
        async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
            first = await scheduler.load(host_pages=[0], device_pages=[0])
            await first.issued()
            if streaming:
                queued = [
                    await scheduler.backup(device_pages=[n], host_pages=[n], streaming=True)
                    for n in range(1, 7)
                ]
            else:
                queued = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(7)]
            async with anyio.create_task_group() as group:
                group.start_soon(scheduler.aclose, True, scheduler.now() + 0.01)
                for each in queued:
                    with pytest.raises(offload.TransferCancelled):
                        await each
                gate.open()
            await first


@on_both
async def test_posts_of_threads_are_taken_in_several_turns() -> None:
    """Cancels of another thread that came while the loop was busy are carried out a few at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_PER_TURN", 2)
        hooks = Hooks()
        gate = hooks.gate()
        async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
            first = await scheduler.load(host_pages=[0], device_pages=[0])
            await first.issued()
            loads = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(1, 8)]

            def cancel() -> None:
                for load in loads:
                    load.cancel()

            thread = threading.Thread(target=cancel)
            thread.start()
            thread.join()  # and the loop with it
            gate.open()
            await first
            await scheduler.idle(device_pages=[0])
            assert [state(load) for load in loads] == ["cancelled"] * 7


@on_both
async def test_a_broken_scheduler_keeps_no_loop_busy() -> None:
    """After a fault of ours nothing is issued any more, and no turn asks for the next because of that."""
    turns: list[object] = []
    inner = shell.Shell._turn

    def turn(self: shell.Shell) -> None:
        turns.append(self)
        inner(self)

    async def body() -> None:
        async with offload.open_scheduler(*pools(), driver=SimDriver()) as scheduler:
            await scheduler.load(host_pages=[0], device_pages=[0])
            scheduler._shell._inbox.append(lambda: 1 / 0)  # type: ignore[arg-type]
            for _ in range(20):
                await anyio.lowlevel.checkpoint()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell.Shell, "_turn", turn)
        with pytest.raises(ZeroDivisionError):
            await body()
    assert 0 < len(turns) < 5


@on_both
async def test_who_waits_for_pages_of_a_broken_scheduler_hears_that_it_is_done() -> None:
    """Landed before a fault of ours that keeps its pages from being given back: done, and nobody waits on."""

    async def body() -> None:
        async with offload.open_scheduler(*pools(), driver=(sim := SimDriver())) as scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            async with anyio.create_task_group() as group:
                group.start_soon(load._settled)
                await sim.run_until_idle()
                await anyio.wait_all_tasks_blocked()
                assert load.done
                scheduler._shell.post(lambda: 1 / 0)  # type: ignore[arg-type]
                with anyio.fail_after(5):
                    await load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.Machine, "_leave", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            await body()


@on_both
async def test_a_submit_does_not_do_what_threads_have_posted() -> None:
    """However much was posted while the loop was busy, it costs the next submit on the loop nothing."""
    hooks = Hooks()
    gate = hooks.gate()
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        loads = [await scheduler.load(host_pages=[0], device_pages=[0]) for _ in range(50)]
        await loads[0].issued()

        def cancel() -> None:
            for load in loads[1:]:
                load.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join()  # and the loop with it
        posted = len(scheduler._shell._inbox)
        assert posted >= 49
        loads.append(await scheduler.load(host_pages=[1], device_pages=[1]))
        loads[-1].cancel()
        assert len(scheduler._shell._inbox) == posted
        gate.open()
        await loads[0]
        await scheduler.idle(device_pages=[0])
        assert [state(load) for load in loads[1:]] == ["cancelled"] * 50


@on_both
async def test_what_is_submitted_comes_after_the_layers_that_threads_have_written() -> None:
    """A thread has said that layers are written, and the loop was busy: a load into their pages follows the backup."""
    async with threads_scheduler() as (scheduler, device, host):
        before, new = contents(device, [0]), contents(host, [3])
        backup = await scheduler.backup(device_pages=[0], host_pages=[5], streaming=True)
        for _ in range(50):  # posts that nobody needs to wait for
            scheduler._shell.post(lambda: None)

        def forward() -> None:
            for layer in range(4):
                backup.layer_written(layer)

        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        load = scheduler.load_nowait(host_pages=[3], device_pages=[0])
        assert len(scheduler._shell._inbox) == 50
        await load
        await backup
        assert contents(host, [5]) == before
        assert contents(device, [0]) == new


@on_both
async def test_those_in_line_hear_of_the_close_some_at_a_time() -> None:
    """A close wakes few of those who wait for room; each that leaves wakes another, and all of them hear."""
    limits = offload.Limits(max_queued_bytes=PAGE_BYTES, max_inflight_requests=1)
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    heard: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parking, "REFUSE_AT_ONCE", 2)
        async with threads_scheduler(limits=limits, driver=driver) as (scheduler, *_):
            for _ in range(2):
                first = await scheduler.load(host_pages=[0], device_pages=[0])
                await anyio.lowlevel.checkpoint()

            async def wait(page: int) -> None:
                with pytest.raises(offload.SchedulerClosedError):
                    await scheduler.load(host_pages=[page], device_pages=[page])
                heard.append(page)

            def work(page: int) -> None:
                with pytest.raises(offload.SchedulerClosedError):
                    scheduler.from_thread.load(host_pages=[page], device_pages=[page])
                heard.append(page)

            line = scheduler._shell.parking
            async with anyio.create_task_group() as group:
                for page in range(6):
                    group.start_soon(wait, page)
                for page in (6, 7):
                    group.start_soon(anyio.to_thread.run_sync, work, page)
                while line.parked < 8:
                    await anyio.lowlevel.checkpoint()
                scheduler._shell.stop_intake()
                assert sum(place.event.is_set() for _, _, place in line._heap) == 2
            assert sorted(heard) == list(range(8))
            gate.open()
            del first


@on_both
async def test_a_fault_fails_what_is_queued_a_few_at_a_time() -> None:
    """After a fault of ours one turn fails so many, the next ones the rest; closing leaves none."""
    loads: list[offload.Transfer] = []

    async def body(wait: bool) -> None:
        async with offload.open_scheduler(*pools(), driver=SimDriver()) as scheduler:
            loads[:] = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(9)]
            scheduler._shell._inbox.append(lambda: 1 / 0)  # type: ignore[arg-type]
            scheduler._shell.take_inbox()
            assert [load.done for load in loads] == [True] * 2 + [False] * 7
            if wait:
                for load in loads:
                    with pytest.raises(offload.TransferFailed):
                        await load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_PER_TURN", 2)
        for wait in (True, False):
            with pytest.raises(ZeroDivisionError):
                await body(wait)
            assert [state(load) for load in loads] == ["draining"] * 9
