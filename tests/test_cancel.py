"""Cancelling and failing at every moment: who hears of it, what stays usable, when pages come back."""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread
import pytest

import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import (
    contents,
    on_both,
    on_loops,
    sim_scheduler,
    state,
    threads_scheduler,
)


class Stop(BaseException):
    """A `BaseException` that a copy raises."""


async def outcome(wait: object) -> str:
    """Await something; return how it ended."""
    try:
        await wait  # type: ignore[misc]
    except offload.TransferCancelled:
        return "cancelled"
    except offload.TransferFailed as error:
        return f"failed at {error.layer}: {error.__cause__!r}"
    return "done"


# Cancel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("landed", range(-1, 5))
@on_both
async def test_cancel_at_every_layer(landed: int) -> None:
    """Cancelled in the queue (-1) or after some layers, a load settles at once and keeps what had landed."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before, old = contents(host, [3]), contents(device, [0])
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        if landed >= 0:
            await sim.advance_to_layer(landed)
        load.cancel()
        assert load.done
        expected = "done" if landed == 4 else "cancelled"
        for layer in range(4):
            assert await outcome(load.layer(layer)) == ("done" if layer < landed else expected)
        assert await outcome(load) == expected
        if landed == -1:
            assert not scheduler.busy(device_pages=[0], host_pages=[3])
        await sim.run_until_idle()
        assert state(load) == expected
        now = contents(device, [0])
        assert now[: max(landed, 0)] == before[: max(landed, 0)]
        assert all(byte in (new, was) for byte, new, was in zip(now, before, old, strict=True))
        assert scheduler.statistics().load.cancelled == (expected == "cancelled")


@on_both
async def test_cancel_in_the_queue_moves_no_byte() -> None:
    """A load that is cancelled before the turn ends leaves both pools as they were."""
    hooks = Hooks()
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, _):
        before = contents(device, range(8))
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        load.cancel()
        load.cancel()
        await sim.run_until_idle()
        assert hooks.ops == []
        assert contents(device, range(8)) == before


@on_both
async def test_cancel_wakes_everybody_who_waits() -> None:
    """Waiters of the transfer and of its missing layers raise TransferCancelled at once."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        heard: dict[str, str] = {}

        async def listen(name: str, wait: object) -> None:
            heard[name] = await outcome(wait)

        async with anyio.create_task_group() as group:
            for layer in range(4):
                group.start_soon(listen, f"layer {layer}", load.layer(layer))
            group.start_soon(listen, "issued 3", load.issued(3))
            group.start_soon(listen, "all", load)
            await sim.run_until_idle()
            load.cancel()
        assert heard == {
            "layer 0": "done", "layer 1": "cancelled", "layer 2": "cancelled",
            "layer 3": "cancelled", "issued 3": "cancelled", "all": "cancelled",
        }  # fmt: skip
        gate.open()
        await sim.run_until_idle()


@on_both
async def test_pages_of_a_cancelled_load_are_not_handed_on_before_it_has_drained() -> None:
    """A later load into the same page starts only when the cancelled copy has landed."""
    hooks = Hooks()
    gate = hooks.gate(layer=1, nth=1)
    async with sim_scheduler(hooks=hooks, ahead=2) as (scheduler, sim, device, host):
        before = contents(host, [4])
        first = await scheduler.load(host_pages=[3], device_pages=[0])
        await sim.run_until_idle()
        first.cancel()
        second = await scheduler.load(host_pages=[4], device_pages=[0])
        await sim.run_until_idle()
        assert second.landed_layers <= 1
        gate.open()
        await sim.run_until_idle()
        assert second.done
        assert contents(device, [0]) == before


@on_both
async def test_cancelling_one_of_a_batch_leaves_its_mates_alone() -> None:
    """Batch mates of a cancelled load complete."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [1, 2])
        loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(3)]
        await sim.advance_to_layer(2)
        loads[0].cancel()
        await sim.run_until_idle()
        assert [state(load) for load in loads] == ["cancelled", "done", "done"]
        assert contents(device, [1, 2]) == before


@on_both
async def test_cancelling_what_others_wait_for_lets_them_go() -> None:
    """A load that follows a backup goes on when that is cancelled in the queue."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [5])
        backup = await scheduler.backup(device_pages=[0], host_pages=[5])
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        backup.cancel()
        await sim.run_until_idle()
        assert state(load) == "done"
        assert contents(device, [1]) == before


@on_both
async def test_a_cancelled_link_of_a_chain_keeps_the_order() -> None:
    """With the middle of three loads into one page cancelled, the last still follows the first."""
    hooks = Hooks()
    gate = hooks.gate(nth=2)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [2])
        loads = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(3)]
        await sim.run_until_idle()
        loads[1].cancel()
        assert loads[1].done
        assert scheduler.busy(host_pages=[1])
        await sim.run_until_idle()
        assert state(loads[2]) in ("queued", "issued")
        assert loads[2].landed_layers <= 1
        gate.open()
        await sim.run_until_idle()
        assert [state(load) for load in loads] == ["done", "cancelled", "done"]
        assert contents(device, [0]) == before


# Failure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no"), MemoryError(), Stop("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("torn", [False, True])
@on_both
async def test_a_failing_copy_fails_its_transfer(error: BaseException, torn: bool) -> None:
    """Whatever a copy raises is the cause of TransferFailed; earlier layers stay usable, later ones raise."""
    hooks = Hooks()
    hooks.fail(error, layer=2, nth=1, torn=torn)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [3], [0, 1])
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        await sim.run_until_idle()
        failed = f"failed at 2: {error!r}"
        for _ in range(2):
            assert [await outcome(load.layer(layer)) for layer in range(4)] == [
                "done", "done", failed, failed,
            ]  # fmt: skip
            assert await outcome(load) == failed
        assert state(load) == "failed"
        assert contents(device, [0], [0, 1]) == before
        assert scheduler.statistics().load.failed == 1
        again = await scheduler.load(host_pages=[3], device_pages=[1], io_backend="cpu")
        await sim.run_until_idle()
        assert state(again) == "done"


@pytest.mark.parametrize("guilty", range(3))
@pytest.mark.parametrize("layer", [0, 3])
@on_both
async def test_batch_mates_of_a_failure_complete(guilty: int, layer: int) -> None:
    """When one request of a batch cannot be copied, it alone fails; the others' bytes are exact."""
    hooks = Hooks()
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, range(3))
        hooks.fail(OSError("merged"), layer=layer, nth=1)
        hooks.fail(OSError("alone"), layer=layer, nth=2 + guilty)
        loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(3)]
        await sim.run_until_idle()
        expected = ["done"] * 3
        expected[guilty] = f"failed at {layer}: OSError('alone')"
        assert [await outcome(load) for load in loads] == expected
        for page in {0, 1, 2} - {guilty}:
            assert contents(device, [page]) == before[4 * page : 4 * page + 4]


@on_both
async def test_planning_that_fails_fails_the_transfer() -> None:
    """An io backend whose `prepare` raises fails the transfer, and the stream goes on."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with sim_scheduler() as (scheduler, sim, device, host):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.backend.cpu.CpuBackend.prepare", broken)
            load = await scheduler.load(host_pages=[3], device_pages=[0], io_backend="cpu")
            await sim.run_until_idle()
        assert await outcome(load) == "failed at None: ZeroDivisionError()"
        before = contents(host, [3])
        await scheduler.load(host_pages=[3], device_pages=[0], io_backend="cpu")
        await sim.run_until_idle()
        assert contents(device, [0]) == before


@on_both
async def test_a_failure_nobody_awaits_is_counted_and_says_nothing() -> None:
    """An unawaited failure shows in the statistics only."""
    hooks = Hooks()
    hooks.fail(OSError("no"), nth=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[3], device_pages=[0])
        await sim.run_until_idle()
        numbers = scheduler.statistics().load
        assert (numbers.settled, numbers.failed, numbers.cancelled) == (1, 1, 0)


# Deadlines -----------------------------------------------------------------------------------------------------


@on_both
async def test_a_deadline_fails_what_has_not_settled() -> None:
    """At its deadline a transfer fails from TimeoutError; its pages stay locked until it drained."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        late = await scheduler.load(
            host_pages=[3], device_pages=[0], deadline=scheduler.now() + 1.0
        )
        queued = await scheduler.load(
            host_pages=[5], device_pages=[0], deadline=scheduler.now() + 2.0
        )
        await sim.advance(0.9)
        assert not late.done
        await sim.advance(0.2)
        assert late.done
        assert not queued.done
        assert (await outcome(late)).startswith("failed at None: TimeoutError")
        await late.layer(0)
        assert scheduler.busy(device_pages=[0])
        await sim.advance(1.0)
        assert (await outcome(queued)).startswith("failed at None: TimeoutError")
        assert scheduler.busy(host_pages=[5])
        gate.open()
        await sim.run_until_idle()
        assert not scheduler.busy(device_pages=[0], host_pages=[3, 5])


@on_both
async def test_a_deadline_that_is_kept_changes_nothing() -> None:
    """A transfer that settled in time stays done when its deadline passes."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(
            host_pages=[3], device_pages=[0], deadline=scheduler.now() + 1.0
        )
        await sim.advance(2.0)
        await load
        assert scheduler.statistics().load.failed == 0


@on_both
async def test_an_infinite_deadline_is_none() -> None:
    """`deadline=inf` is a request without one."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[3], device_pages=[0], deadline=float("inf"))
        await sim.run_until_idle()
        await load


# Threads ---------------------------------------------------------------------------------------------------------


@on_loops("asyncio", "trio", "uvloop")
async def test_on_threads_a_failure_leaves_the_worker_alive() -> None:
    """A worker that saw a BaseException serves the next request."""
    hooks = Hooks()
    hooks.fail(Stop("x"), stream="load", nth=2)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, device, host):
        before = contents(host, [4])
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        assert await outcome(load) == "failed at 1: Stop('x')"
        await load.source_reusable()
        await (await scheduler.load(host_pages=[4], device_pages=[0]))
        assert contents(device, [0]) == before


@pytest.mark.parametrize("landed", range(-1, 4))
@on_loops("asyncio", "trio", "uvloop")
async def test_a_thread_that_cancels_need_not_wait_for_the_loop(landed: int) -> None:
    """While the loop is stuck, a cancel from a thread has settled when it returns, with what had landed."""
    hooks = Hooks()
    gate = hooks.gate(layer=max(landed, 0))
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        if landed >= 0:
            await load.issued(landed)
        seen: list[object] = []

        def work() -> None:
            load.cancel()
            seen.extend((load.done, str(load.state), load.landed_layers))
            for layer in range(4):
                try:
                    load.wait_layer(layer, timeout=5.0)
                    seen.append("landed")
                except offload.TransferCancelled:
                    seen.append("cancelled")
            with pytest.raises(offload.TransferCancelled):
                load.result(timeout=5.0)
            load.cancel()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10.0)  # this keeps the loop from running
        count = max(landed, 0)
        assert seen == [True, "draining", count] + ["landed"] * count + ["cancelled"] * (4 - count)
        gate.open()
        with pytest.raises(offload.TransferCancelled):
            await load
        await scheduler.idle(device_pages=[0], host_pages=[3])
        assert state(load) == "cancelled"
        assert scheduler.statistics().load.cancelled == 1


@pytest.mark.parametrize("who", range(3))
@on_both
async def test_a_thread_cancels_one_of_those_who_ride_together(who: int) -> None:
    """A cancel from a thread leaves the copy to the others, whoever it is."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, device, host):
        before = contents(host, [3])
        loads = [
            await scheduler.load(host_pages=[3], device_pages=[0], join=True) for _ in range(3)
        ]
        await loads[0].issued(1)
        await anyio.to_thread.run_sync(loads[who].cancel)
        gate.open()
        ends = [await outcome(load) for load in loads]
        assert ends == ["cancelled" if number == who else "done" for number in range(3)]
        assert contents(device, [0]) == before
        assert scheduler.statistics().load.cancelled == 1


def taken_back(load: offload.Transfer) -> list[str]:
    """Watch a transfer in a thread until it has settled, and a little longer; return what it took back."""
    found, most = [], 0
    while load._entry.verdict() is None:
        landed = load.landed_layers
        if landed < most:
            found.append(f"{landed} layers after {most}")
        most = max(most, landed)
    verdict = load._entry.verdict()
    for _ in range(20):
        now, landed = load._entry.verdict(), load.landed_layers
        if now is not verdict or landed < most:
            found.append(f"{now}, {landed} layers after {verdict}, {most}")
    return found


@on_both
async def test_an_outcome_that_was_seen_stays() -> None:
    """However threads cancel, land and look at once: who has seen an outcome, or a layer, keeps it."""
    async with threads_scheduler() as (scheduler, *_):
        ends = set()
        for number in range(60):
            load = await scheduler.load(host_pages=[3], device_pages=[0])
            found: list[str] = []

            async def watch(load: offload.Transfer, found: list[str]) -> None:
                found += await anyio.to_thread.run_sync(taken_back, load)

            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(watch, load, found)
                if number % 2:
                    await load.issued(number % 4)
                await anyio.to_thread.run_sync(load.cancel)
            assert found == []
            ends.add(await outcome(load))
            await scheduler.idle(device_pages=[0], host_pages=[3])
        assert ends <= {"done", "cancelled"}
        numbers = scheduler.statistics().load
        assert numbers.settled == numbers.submitted == 60


@on_both
async def test_on_threads_cancel_races_with_landing() -> None:
    """However a cancel meets the landing, the transfer settles once, and its pages come back."""
    async with threads_scheduler() as (scheduler, *_):
        ends = set()
        for _ in range(100):
            load = await scheduler.load(host_pages=[3], device_pages=[0])
            await load.issued()
            load.cancel()
            ends.add(await outcome(load))
            await scheduler.idle(device_pages=[0], host_pages=[3])
        assert ends <= {"done", "cancelled"}
