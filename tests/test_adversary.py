"""What should never happen, and does: faults where nobody expects them, calls from where nobody calls."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

import offload
from offload.core.batch import Batch
from offload.core.budget import Budget
from offload.core.chains import Chains
from offload.core.in_flight import InFlight
from offload.core.machine import Machine
from offload.loop import LoopHandle
from offload.shell import Shell
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import (
    PAGE_BYTES,
    check_left,
    check_workers_end,
    contents,
    on_both,
    pools,
    run,
    sim_scheduler,
    state,
)
from tests.test_cancel import outcome

ONE = offload.Limits(max_queued_bytes=PAGE_BYTES, max_inflight_requests=1)


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


# Faults -----------------------------------------------------------------------------------------------


@on_both
async def test_a_close_that_fails_is_over_for_all_who_wait_for_it() -> None:
    """When the driver cannot be closed, `aclose` raises that once, and nobody waits for it for ever."""
    device, host = pools()
    sim = SimDriver()

    def broken() -> None:
        raise OSError("no")

    sim.close = broken  # type: ignore[method-assign]
    with anyio.fail_after(5):
        scheduler = await offload.open_scheduler(device, host, driver=sim).__aenter__()
        with pytest.raises(OSError, match="no"):
            await scheduler.aclose()
        await scheduler.aclose()
    async with offload.open_scheduler(device, host, driver=SimDriver()):
        pass  # the pools are free all the same


@on_both
async def test_a_stream_that_cannot_be_had_fails_its_requests_alone() -> None:
    """A driver that has no thread left for backups fails these, and loads go on."""
    device, host = pools()
    driver = ThreadsDriver()
    have = driver.stream

    def stream(name: str) -> object:
        if name == "backup":
            raise RuntimeError("can't start new thread")
        return have(name)

    driver.stream = stream  # type: ignore[method-assign, assignment]
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:
        backups = [await scheduler.backup(device_pages=[n], host_pages=[n]) for n in range(2)]
        load = await scheduler.load(host_pages=[5], device_pages=[5])
        for backup in backups:
            assert "can't start new thread" in await outcome(backup)
        assert await outcome(load) == "done"
    check_left(scheduler, device, host)


@on_both
async def test_a_fault_in_what_a_thread_posted_is_not_the_next_callers() -> None:
    """Our own fault while an act of another thread is done breaks the scheduler, not who submits next."""
    device, host = pools()
    sim = SimDriver()
    caught: list[BaseException] = []
    try:
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            scheduler._shell._orders.append(lambda: 1 / 0)  # type: ignore[arg-type]
            with pytest.raises(offload.SchedulerClosedError, match="an error in the scheduler has"):
                await scheduler.load(host_pages=[0], device_pages=[0])
    except ZeroDivisionError as error:
        caught.append(error)
    assert len(caught) == 1


@on_both
async def test_an_error_that_cannot_be_shown_fails_its_transfer_all_the_same() -> None:
    """An exception whose repr raises is a cause like any other, also for who relied on the transfer."""
    hooks = Hooks()
    hooks.fail(Unspeakable(), stream="backup", layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[0], host_pages=[5])
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        await sim.run_until_idle()
        for each in (backup, load):
            with pytest.raises(offload.TransferFailed):
                await each
        assert [state(each) for each in (backup, load)] == ["failed"] * 2
        later = await scheduler.load(host_pages=[5], device_pages=[1])
        with pytest.raises(offload.TransferFailed, match="Unspeakable"):
            await later


# Calls out of the blue --------------------------------------------------------------------------------


def interrupting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[object]:
    """Do something once in the middle of a decision, as a finalizer or a signal handler would."""
    done: list[object] = []
    inner = Machine._landed

    def landed(self: Machine, batch: Batch, layers: int) -> None:
        if not done:
            done.append(None)
            done[0] = act()
        inner(self, batch, layers)

    monkeypatch.setattr(Machine, "_landed", landed)
    return done


@on_both
async def test_a_finalizer_may_cancel_in_the_middle_of_a_decision() -> None:
    """A cancel out of a garbage collection, while the scheduler decides, is settled at once and done later."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [1])
        loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(2)]
        with pytest.MonkeyPatch.context() as patch:

            def act() -> bool:
                loads[0].cancel()
                return loads[0].done

            done = interrupting(patch, act)
            async with anyio.create_task_group() as group:
                group.start_soon(loads[1].layer, 0)
                await sim.run_until_idle()
        assert done == [True]
        await sim.run_until_idle()
        assert [await outcome(load) for load in loads] == ["cancelled", "done"]
        assert contents(device, [1]) == before


@on_both
async def test_a_finalizer_may_not_submit_in_the_middle_of_a_decision() -> None:
    """A submit out of a garbage collection, while the scheduler decides, is refused."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.MonkeyPatch.context() as patch:

            def act() -> object:
                with pytest.raises(offload.RequestError, match="finalizer"):
                    scheduler.load_nowait(host_pages=[1], device_pages=[1])
                return True

            done = interrupting(patch, act)
            await sim.run_until_idle()
        await load
        assert done == [True]


def test_a_signal_that_interrupts_a_submit_leaves_nothing_behind() -> None:
    """A thread that is thrown out of a blocking submit by any exception has submitted nothing."""

    class Alarm(BaseException):
        """What the handler raises."""

    def ring(*_: object) -> None:
        raise Alarm

    hooks = Hooks()
    gate = hooks.gate()
    device, host = pools()
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with offload.start_scheduler(
            device, host, driver=ThreadsDriver(hooks=hooks), limits=ONE
        ) as scheduler:
            scheduler.load(host_pages=[0], device_pages=[0]).wait_issued(timeout=5.0)
            scheduler.load(host_pages=[1], device_pages=[1])
            line = scheduler._shell.parking

            def interrupt() -> None:
                while not line.parked:
                    os.sched_yield()
                os.kill(os.getpid(), signal.SIGUSR1)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(Alarm):
                scheduler.load(host_pages=[2], device_pages=[2])
            thread.join()
            gate.open()
            scheduler.wait_idle(device_pages=range(8), timeout=5.0)
            numbers = scheduler.statistics()
            assert (numbers.load.submitted, numbers.parked) == (2, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_interrupts_the_start_leaves_nothing_running() -> None:
    """Thrown out of `start_scheduler`, nobody holds the scheduler: it is closed, and its pools are free."""
    device, host = pools()
    before = set(threading.enumerate())
    raised = threading.Event()
    inner = Shell.open

    def ring(*_: object) -> None:
        raised.set()
        raise OSError("alarm")

    def slow(shell: Shell) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert raised.wait(5.0)
        inner(shell)

    handler = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shell, "open", slow)
            with pytest.raises(OSError, match="alarm"):
                offload.start_scheduler(device, host)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert set(threading.enumerate()) == before
    with offload.start_scheduler(device, host) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(5.0)


@pytest.mark.parametrize(
    ("act", "owner", "step"),
    [
        ("submit", Budget, "queue"),
        ("submit", Machine, "_follow"),
        ("submit", Machine, "_advance"),
        ("cancel", Budget, "dequeue"),
        ("cancel", InFlight, "drop"),
        ("cancel", Chains, "retire"),
        ("cancel", LoopHandle, "post"),
    ],
)
@pytest.mark.parametrize("loop", ["asyncio", "trio", "uvloop"])
def test_a_signal_in_the_middle_of_a_decision_neither_hangs_nor_keeps_pages(
    loop: str, act: str, owner: type, step: str
) -> None:
    """Thrown out of a submit or a cancel half way, the block is left with that, and its pools serve again."""
    device, host = pools()
    raised = KeyboardInterrupt()

    async def body() -> None:
        hooks = Hooks()
        gate = hooks.gate()
        driver = ThreadsDriver(hooks=hooks)
        async with offload.open_scheduler(device, host, driver=driver) as scheduler:
            first = await scheduler.load(host_pages=[0], device_pages=[0])
            await first.issued()
            queued = await scheduler.load(host_pages=[1], device_pages=[0])
            for _ in range(5):
                await checkpoint()
            with pytest.MonkeyPatch.context() as patch:

                def interrupted(*given: object) -> object:
                    patch.undo()
                    raise raised

                patch.setattr(owner, step, interrupted)
                try:
                    if act == "submit":
                        scheduler.load_nowait(host_pages=[2], device_pages=[0])
                    else:
                        queued.cancel()
                finally:
                    gate.open()

    async def once() -> None:
        async with offload.open_scheduler(device, host) as scheduler:
            await (await scheduler.load(host_pages=[0], device_pages=[0]))
            await scheduler.idle(device_pages=range(8), host_pages=range(16))

    async def caught() -> None:
        with pytest.raises(KeyboardInterrupt) as thrown:
            await body()
        assert thrown.value is raised
        assert not hasattr(raised, "__notes__")

    run(caught, loop)
    run(once, loop)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_wait_on_a_later_loop_of_the_same_thread_is_refused(backend: str) -> None:
    """A transfer of a loop that has ended is not awaited on the next one, which would never be told."""
    hooks = Hooks()
    gate = hooks.gate()
    kept: list[offload.Transfer] = []

    async def first() -> None:
        made = offload.open_scheduler(*pools(), driver=ThreadsDriver(hooks=hooks))
        scheduler = await made.__aenter__()
        kept.append(await scheduler.load(host_pages=[0], device_pages=[0]))

    async def second() -> None:
        with anyio.fail_after(5), pytest.raises(offload.RequestError, match="another event loop"):
            await kept[0]

    before = set(threading.enumerate())
    anyio.run(first, backend=backend)
    for each in ("asyncio", "trio"):
        anyio.run(second, backend=each)
    gate.open()
    kept.clear()
    check_workers_end(before, hooks)


# Nothing piles up ---------------------------------------------------------------------------------------


@on_both
async def test_those_who_left_the_line_leave_nothing_behind() -> None:
    """Parked loads with far deadlines that were cancelled are neither in the line nor in the timer."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(hooks=hooks, limits=ONE) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        await scheduler.load(host_pages=[1], device_pages=[1])
        shell = scheduler._shell
        for _ in range(700):
            async with anyio.create_task_group() as group:
                group.start_soon(park, scheduler, 3600.0)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
        assert shell.parking.parked == 0
        assert len(shell.parking._heap) < 300
        assert len(shell.timer._heap) < 300
        gate.open()
        await sim.run_until_idle()


async def park(scheduler: offload.Scheduler, seconds: float) -> None:
    """Submit a load that has to wait."""
    await scheduler.load(host_pages=[2], device_pages=[2], deadline=scheduler.now() + seconds)


@on_both
async def test_waits_for_idle_pages_that_were_cancelled_leave_nothing_behind() -> None:
    """`idle` in a loop with a time limit does not gather what it waited for."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        for _ in range(50):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: scheduler.idle(device_pages=[0]))
                await sim.advance(0)
                group.cancel_scope.cancel()
        assert len(scheduler._shell.changed) < 5
        gate.open()
        await sim.run_until_idle()


# A cancel at every step ------------------------------------------------------------------------------------


async def everything(scheduler: offload.Scheduler) -> None:
    """Do all that can be awaited, with a line in which some have to wait."""

    async def one(number: int) -> None:
        load = await scheduler.load(
            host_pages=[number], device_pages=[number % 2], deadline=scheduler.now() + 60
        )
        await load.issued()
        await load.layer(2)
        await load
        await load.source_reusable()
        await scheduler.idle(device_pages=[number % 2])

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(one, number)
        backup = await scheduler.backup(device_pages=[5], host_pages=[9], streaming=True)
        for layer in range(4):
            backup.layer_written(layer)
            await backup.layer(layer)
        await backup
    await scheduler.aclose(drain=True)


@pytest.mark.parametrize("ticks", range(0, 60, 3))
@on_both
async def test_a_cancel_at_any_step_leaves_everything_whole(ticks: int) -> None:
    """Whoever is cancelled after however many turns of the loop: nothing hangs, and nothing is lost."""
    device, host = pools()
    made = offload.open_scheduler(device, host, driver=ThreadsDriver(), limits=ONE)
    async with made as scheduler, anyio.create_task_group() as group:
        group.start_soon(everything, scheduler)
        for _ in range(ticks):
            await checkpoint()
        group.cancel_scope.cancel()
    check_left(scheduler, device, host)
