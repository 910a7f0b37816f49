"""Leaving: in every form, from every place, under a running copy; no hang, no stray line, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import anyio
import pytest

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import (
    LOOPS,
    check_left,
    check_workers_end,
    contents,
    on_both,
    on_loops,
    pools,
    run,
    sim_scheduler,
    state,
)
from tests.test_cancel import outcome

# Forms of leaving ----------------------------------------------------------------------------------------


@on_both
async def test_leaving_cancels_what_is_queued_and_lands_what_is_issued() -> None:
    """What was issued lands in full, what was not is cancelled, and pages are free afterwards."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [0])
        issued = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.advance_to_layer(1)
        queued = await scheduler.load(host_pages=[1], device_pages=[0])
        await scheduler.aclose()
        assert [state(t) for t in (issued, queued)] == ["done", "cancelled"]
        assert contents(device, [0]) == before
        assert await outcome(queued) == "cancelled"


@on_both
async def test_draining_finishes_what_is_queued() -> None:
    """`aclose(drain=True)` lands everything that was admitted, behind hazards too."""
    async with sim_scheduler(limits=offload.Limits(max_batch_ops=1)) as bed:
        scheduler = bed.scheduler
        before = contents(bed.device, [0])
        transfers = []
        for page in range(6):
            transfers.append(await scheduler.backup(device_pages=[page], host_pages=[page]))
            transfers.append(await scheduler.load(host_pages=[page], device_pages=[page + 1]))
        await scheduler.aclose(drain=True)
        assert {state(t) for t in transfers} == {"done"}
        assert contents(bed.device, [6]) == before


@on_both
async def test_a_drain_s_deadline_cancels_what_is_still_queued() -> None:
    """At the deadline the queue is cancelled after all, and what is issued still lands."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        first = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        second = await scheduler.load(host_pages=[1], device_pages=[0])
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: scheduler.aclose(drain=True, deadline=sim.now() + 1.0))
            dones = []
            for _ in range(2):
                await sim.advance(0.6)
                dones.append(second.done)
            gate.open()
            await sim.run_until_idle()
        assert dones == [False, True]
        assert [state(t) for t in (first, second)] == ["done", "cancelled"]


@on_both
async def test_closing_refuses_new_requests_at_once() -> None:
    """From the first moment of `aclose` every submit raises SchedulerClosedError."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.aclose)
            await sim.run_until_idle()
            for call in (scheduler.load_nowait, scheduler.backup_nowait):
                with pytest.raises(offload.SchedulerClosedError):
                    call(host_pages=[1], device_pages=[1])
            for submit in (scheduler.load, scheduler.backup):
                with pytest.raises(offload.SchedulerClosedError):
                    await submit(host_pages=[1], device_pages=[1])
            assert scheduler.busy(device_pages=[0])
            gate.open()
            await sim.run_until_idle()


@on_both
async def test_closing_may_be_asked_for_any_number_of_times() -> None:
    """Concurrent and late calls of `aclose` all return when it is closed, in whatever form."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
        closed: list[int] = []

        async def close(number: int) -> None:
            await scheduler.aclose(drain=number % 2 == 1)
            closed.append(number)

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(close, number)
            await sim.run_until_idle()
            assert closed == []
            gate.open()
            await sim.run_until_idle()
        assert sorted(closed) == [0, 1, 2, 3]
        await scheduler.aclose()
        await scheduler.aclose(drain=True, deadline=0.0)
        await load


@on_both
async def test_closing_cannot_be_cancelled() -> None:
    """A cancelled scope is left only when the copy under way has landed."""
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    device, host = pools()
    sim = SimDriver(hooks=hooks)
    left = anyio.Event()

    async def serve(scope: anyio.CancelScope) -> None:
        with scope:
            async with offload.open_scheduler(device, host, driver=sim) as scheduler:
                await scheduler.load(host_pages=[0], device_pages=[0])
                await anyio.sleep_forever()
        left.set()

    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()
        group.start_soon(serve, scope)
        await sim.run_until_idle()
        scope.cancel()
        await sim.run_until_idle()
        early = left.is_set()
        gate.open()
        await sim.run_until_idle()
    assert (early, left.is_set()) == (False, True)


@on_both
async def test_waiters_hear_of_the_cancel_when_it_closes() -> None:
    """Tasks that wait for a queued transfer raise TransferCancelled when the scheduler closes."""
    async with sim_scheduler() as (scheduler, sim, *_):
        event = sim.compute(1.0)
        ends: list[str] = []

        async def wait(transfer: offload.Transfer) -> None:
            ends.append(await outcome(transfer))

        async with anyio.create_task_group() as group:
            for page in range(3):
                load = await scheduler.load(host_pages=[page], device_pages=[page], after=event)
                group.start_soon(wait, load)
            await anyio.lowlevel.checkpoint()
            await scheduler.aclose()
        assert ends == ["cancelled"] * 3


@on_both
async def test_a_closed_scheduler_still_answers() -> None:
    """After closing, transfers, statistics, busy and idle answer as before."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()
    await load
    await load.layer(2)
    load.wait_layer(1)
    load.fence(0)
    load.cancel()
    assert state(load) == "done"
    assert not scheduler.busy(device_pages=[0])
    await scheduler.idle(device_pages=[0])
    assert scheduler.statistics().load.settled == 1
    assert "closed" in repr(scheduler)


# Exceptions -------------------------------------------------------------------------------------------------


class Mine(Exception):
    """What the body raises."""


@pytest.mark.parametrize("error", [Mine("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@on_both
async def test_the_body_s_exception_leaves_as_itself(error: BaseException) -> None:
    """What the body raises leaves `async with` as the very same object, never in a group."""
    device, host = pools()

    async def body() -> None:
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            await scheduler.load(host_pages=[0], device_pages=[0])
            raise error

    with pytest.raises(type(error)) as caught:
        await body()
    assert caught.value is error
    assert getattr(error, "__notes__", []) == []


def break_machine(patch: pytest.MonkeyPatch) -> None:
    """Make the scheduler's own turn raise."""

    def broken(_: object) -> bool:
        raise ZeroDivisionError("ours")

    patch.setattr("offload.core.machine.Machine.waiting", broken)


@on_both
async def test_a_fault_of_ours_is_raised_where_it_is_left() -> None:
    """A fault of the scheduler settles everything as failed and is raised at the end of a calm body."""
    device, host = pools()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver())

    async def body() -> None:
        async with scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            assert "ZeroDivisionError" in await outcome(load)
            with pytest.raises(offload.SchedulerClosedError):
                await scheduler.load(host_pages=[1], device_pages=[1])

    with pytest.MonkeyPatch.context() as patch:
        break_machine(patch)
        with pytest.raises(ZeroDivisionError, match="ours"):
            await body()
    numbers = scheduler.statistics().load
    assert (numbers.submitted, numbers.settled, numbers.failed) == (1, 1, 1)


@on_both
async def test_a_fault_of_ours_is_a_note_on_the_body_s_exception() -> None:
    """When the body raises too, its exception leaves, and the fault is a note on it."""
    device, host = pools()

    async def body() -> None:
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            await outcome(await scheduler.load(host_pages=[0], device_pages=[0]))
            raise Mine("x")

    with pytest.MonkeyPatch.context() as patch:
        break_machine(patch)
        with pytest.raises(Mine) as caught:
            await body()
    assert any("ZeroDivisionError('ours')" in note for note in caught.value.__notes__)


# Under a running copy --------------------------------------------------------------------------------------------


@on_loops("asyncio", "trio", "uvloop")
async def test_leaving_waits_for_the_worker() -> None:
    """On threads, leaving waits for the copy under way, and the bytes are there."""
    hooks = Hooks()
    gate = hooks.gate(layer=2)
    device, host = pools()
    before = contents(host, [3])

    def open_when_it_has_come() -> None:
        gate.wait_arrived()
        gate.open()

    opener = threading.Thread(target=open_when_it_has_come)
    opener.start()
    async with offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks)) as scheduler:
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        await load.issued()
    opener.join()
    assert load.done
    assert contents(device, [0]) == before
    check_left(scheduler, device, host)


@pytest.mark.parametrize("loop", ["asyncio", "trio", "uvloop"])
def test_a_loop_that_ends_under_a_copy_says_nothing(loop: str) -> None:
    """A scheduler that nobody left, its loop gone under a copy: threads hear it, and its pools are free."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    device, host = pools()
    loads: list[offload.Transfer] = []

    async def body() -> None:
        scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        await scheduler.__aenter__()
        loads.extend(
            [await scheduler.load(host_pages=[0], device_pages=[page]) for page in (0, 1, 0)]
        )
        await loads[0].layer(0)

    async def once() -> None:
        async with offload.open_scheduler(device, host) as scheduler:
            await (await scheduler.load(host_pages=[0], device_pages=[0]))

    pages = host.pages.alloc(16)
    before = set(threading.enumerate())
    run(body, loop)
    host.pages.free(pages)
    assert host.pages.num_free == 15
    loads[0].wait_layer(0)
    for load in loads:
        with pytest.raises(offload.TransferFailed, match="event loop of its scheduler has ended"):
            load.result(timeout=5.0)
    gate.open()
    loads.clear()
    del load
    assert len(set(threading.enumerate()) - before) == 1
    check_workers_end(before, hooks)
    assert host.pages.num_free == 16
    run(once, loop)


def test_a_turn_that_a_loop_was_asked_for_and_never_took_holds_no_worker() -> None:
    """News that was posted in the last moment of a loop is not taken for heard: what waits is let go."""
    hooks = Hooks()
    gates = hooks.gate(layer=1), hooks.gate(layer=2)
    device, host = pools()

    async def body() -> None:
        scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        await scheduler.__aenter__()
        first = await scheduler.load(host_pages=[0], device_pages=[0])
        await scheduler.load(host_pages=[1], device_pages=[0])
        await first.layer(0)
        while len(scheduler._shell.flights) < 2:
            await anyio.lowlevel.checkpoint()
        loop = scheduler._shell.loop
        with pytest.MonkeyPatch.context() as patch:
            for door in ("post", "post_threadsafe"):
                patch.setattr(loop, door, lambda callback: True)
            gates[0].open()
            gates[1].wait_arrived()

    before = set(threading.enumerate())
    run(body)
    gates[1].open()
    assert len(set(threading.enumerate()) - before) == 1
    check_workers_end(before, hooks)


@pytest.mark.parametrize(
    ("loop", "busy"),
    [
        *((loop, busy) for loop in LOOPS for busy in ("idle", "held")),
        *(
            (loop, "heard") for loop in LOOPS if loop != "trio"
        ),  # it calls whatever was posted before
    ],
)
def test_a_loop_that_ends_under_a_scheduler_lets_its_pools_go(loop: str, busy: str) -> None:
    """Nothing in the air, or its end heard of by a turn that never came: the pools are free, the worker ends."""
    device, host = pools()
    hooks = Hooks()
    gate = hooks.gate(layer=3)
    before = set(threading.enumerate())

    async def body() -> None:
        scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        await scheduler.__aenter__()
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await load.layer(2)
        if busy == "heard":
            with pytest.MonkeyPatch.context() as patch:
                for door in ("post", "post_threadsafe"):
                    patch.setattr(scheduler._shell.loop, door, lambda callback: True)
                gate.open()
                while not load._entry.flight_of(0).over:  # type: ignore[union-attr]
                    os.sched_yield()
            return
        gate.open()
        await load
        if busy == "held":
            hold = scheduler.hold()
            hold.__enter__()
            await scheduler.load(host_pages=[1], device_pages=[1])

    run(body, loop)
    for pool in (device, host):
        assert pool.pages.table.owner is None
        assert not pool.pages.table.held()
    check_workers_end(before, hooks)


PRELUDE = """
import asyncio, os, signal, sys, threading, traceback, warnings
from pathlib import Path
import anyio
import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import contents, pools
"""

FORKS = """
where, names = sys.argv[1], sys.argv[2:]
children = {}
for name in names:
    child = os.fork()
    if child:
        children[name] = child
        continue
    children.clear()
    signal.alarm(40)
    os.dup2(os.open(f"{where}/{name}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    device, host = pools()
    hooks = Hooks()
    exec(Path(where, f"{name}.py").read_text())
    break  # off the end of the program, as programs end
for name, child in children.items():
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(where, f"{name}.code").write_text(str(code))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Run every program in an interpreter that ends by itself; return exit code and stderr of each.

    They are forked off one that has imported everything: torch takes seconds.
    """
    where = tmp_path_factory.mktemp("exits")
    names = {name: f"{number}" for number, name in enumerate(EXITS)}
    for name, file in names.items():
        (where / f"{file}.py").write_text(textwrap.dedent(EXITS[name]))
    command = [sys.executable, "-W", "error", "-c", PRELUDE + FORKS, str(where), *names.values()]
    root = os.path.dirname(os.path.dirname(__file__))
    made = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=50, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")
    return {
        name: (
            int((where / f"{file}.code").read_text()),
            (where / f"{file}.stderr").read_text(),
        )
        for name, file in names.items()
    }


EXITS = {
    "scheduler not left, copy gated": """
        gate = hooks.gate(layer=1)

        async def main():
            scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
            await scheduler.__aenter__()
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            await load.layer(0)
            threading.Timer(0.2, gate.open).start()

        asyncio.run(main())
    """,
    "scheduler not left, on trio": """
        gate = hooks.gate(layer=1)

        async def main():
            scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
            await scheduler.__aenter__()
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            await load.layer(0)
            threading.Timer(0.2, gate.open).start()

        anyio.run(main, backend="trio")
    """,
    "blocking scheduler not closed": """
        scheduler = offload.start_scheduler(device, host)
        scheduler.load(host_pages=[0], device_pages=[0]).result()
        scheduler.backup(host_pages=[0], device_pages=[0])
    """,
    "blocking scheduler not closed, copy gated for ever": """
        gate = hooks.gate(layer=1)
        scheduler = offload.start_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        scheduler.load(host_pages=[0], device_pages=[0]).wait_layer(0)
    """,
    "loop stopped, another thread waits with a timeout": """
        gate = hooks.gate(layer=1)
        loop = asyncio.new_event_loop()
        scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))

        async def main():
            await scheduler.__aenter__()
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            await load.layer(0)
            return load

        load = loop.run_until_complete(main())

        def wait():
            try:
                load.result(timeout=0.2)
            except TimeoutError:
                gate.open()
                load.result(timeout=5.0)
                load.wait_layer(3)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        loop.close()
    """,
    "forked on the loop's thread": """
        warnings.simplefilter("ignore", DeprecationWarning)
        gate = hooks.gate(layer=1, nth=2)
        before = pools()[1]

        async def main():
            made = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
            async with made as scheduler:
                await (await scheduler.load(host_pages=[0], device_pages=[0]))
                load = await scheduler.load(host_pages=[0], device_pages=[1])
                await load.layer(0)
                locked, free = threading.Event(), threading.Event()

                def hold_the_lock():
                    with device.pages.table.mutex:
                        locked.set()
                        free.wait()

                holder = threading.Thread(target=hold_the_lock)
                holder.start()
                locked.wait()
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    for call in (scheduler.load_nowait, scheduler.backup_nowait):
                        try:
                            call(host_pages=[3], device_pages=[3])
                        except offload.RequestError as error:
                            assert "forked" in str(error), error
                        else:
                            os._exit(7)
                    assert load.state == "issued"
                    assert scheduler.busy(device_pages=[1])
                    scheduler.statistics()
                    await scheduler.aclose()
                    await scheduler.__aexit__(None, None, None)
                    os._exit(3)  # its loop shares the parent's epoll instance, and must not be closed
                free.set()
                holder.join()
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
                gate.open()
                await load
                assert contents(device, [1]) == contents(before, [0])
                assert not scheduler.busy(device_pages=[0, 1], host_pages=[0])

        asyncio.run(main())
    """,
    "exit inside the block": """
        async def main():
            async with offload.open_scheduler(device, host) as scheduler:
                await scheduler.load(host_pages=[0], device_pages=[0])
                sys.exit(0)

        asyncio.run(main())
    """,
    "forked with a live scheduler": """
        warnings.simplefilter("ignore", DeprecationWarning)
        gate = hooks.gate(layer=1, nth=2)
        scheduler = offload.start_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        scheduler.load(host_pages=[0], device_pages=[0]).result()
        load = scheduler.load(host_pages=[0], device_pages=[1])
        load.wait_layer(0)
        locked = threading.Event()
        free = threading.Event()

        def hold_the_lock():
            with device.pages.table.mutex:
                locked.set()
                free.wait()

        holder = threading.Thread(target=hold_the_lock)
        holder.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            for call in (scheduler.load, scheduler.load_nowait, scheduler.backup):
                try:
                    call(host_pages=[3], device_pages=[3])
                except offload.RequestError as error:
                    assert "forked" in str(error), error
                else:
                    os._exit(7)
            for wait in (load.result, lambda: load.wait_layer(3)):
                try:
                    wait()
                except offload.RequestError as error:
                    assert "forked" in str(error), error
                else:
                    os._exit(8)
            assert load.state == "issued"
            scheduler.statistics()
            scheduler.close()
            os._exit(0)
        free.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        gate.open()
        load.result(timeout=5.0)
        assert contents(device, [1]) == contents(host, [0])
        scheduler.close()
    """,
}


@pytest.mark.parametrize("name", EXITS)
def test_the_interpreter_exits_cleanly(name: str, ends: dict[str, tuple[int, str]]) -> None:
    """However a program ends, it exits with 0 and writes nothing to stderr."""
    assert ends[name] == (0, "")


def test_twenty_schedulers_leave_nothing_behind() -> None:
    """Threads and descriptors after twenty schedulers are as many as after one."""
    counts = []
    device, host = pools()

    async def body() -> None:
        async with offload.open_scheduler(device, host) as scheduler:
            await (await scheduler.load(host_pages=[0], device_pages=[0]))
            await (await scheduler.backup(host_pages=[0], device_pages=[0]))

    for _ in range(20):
        run(body)
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[-1] == counts[0]
