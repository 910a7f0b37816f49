"""The blocking face, and waiting in threads: while the loop is busy, from any thread, with time limits."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import (
    PAGE_BYTES,
    check_left,
    contents,
    on_both,
    on_loops,
    overwrite,
    pools,
    run,
    sim_scheduler,
    state,
    threads_scheduler,
)

TWO_PAGES = offload.Limits(max_queued_bytes=2 * PAGE_BYTES, max_inflight_requests=1)
SOON, LATE = 0.01, 30.0
"""A timeout that shall pass, and one that shall not."""


async def in_thread(work: Callable[[], object]) -> None:
    """Run blocking work in a thread that is not the loop's."""
    await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


# From any thread ------------------------------------------------------------------------------------------


@on_loops("asyncio", "trio", "uvloop")
async def test_a_thread_submits_and_waits() -> None:
    """`from_thread` loads and backs up, and every blocking wait returns when its time has come."""
    async with threads_scheduler() as (scheduler, device, host):
        before = contents(device, [1])

        def work() -> None:
            face = scheduler.from_thread
            backup = face.backup(device_pages=[1], host_pages=[5])
            load = face.load(host_pages=[5], device_pages=[2], timeout=LATE)
            load.wait_issued(timeout=LATE)
            for layer in range(4):
                load.wait_layer(layer, timeout=LATE)
            load.fence(3)
            load.result(timeout=LATE)
            backup.result()
            load.wait_source_reusable(timeout=LATE)
            face.wait_idle(device_pages=[1, 2], host_pages=[5], timeout=LATE)
            assert not face.busy(device_pages=[1, 2])
            assert face.statistics().load.settled == 1
            assert face.now() > 0

        await in_thread(work)
        assert contents(device, [2]) == before == contents(host, [5])


@on_both
async def test_nowait_from_a_thread_would_block() -> None:
    """`from_thread.load_nowait` raises WouldBlock at the bound."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    async with threads_scheduler(driver=driver, limits=TWO_PAGES) as (scheduler, *_):

        def work() -> None:
            face = scheduler.from_thread
            with face.hold():
                face.load_nowait(host_pages=[0, 1], device_pages=[0, 1])
                with pytest.raises(anyio.WouldBlock):
                    face.load_nowait(host_pages=[2], device_pages=[2])
                with pytest.raises(anyio.WouldBlock):
                    face.backup_nowait(host_pages=[2], device_pages=[2])
            gate.open()

        await in_thread(work)


@on_both
async def test_submit_checks_raise_in_the_thread() -> None:
    """A bad request raises in the thread that made it."""
    async with threads_scheduler() as (scheduler, *_):

        def work() -> None:
            face = scheduler.from_thread
            for call in (face.load, face.backup, face.load_nowait, face.backup_nowait):
                with pytest.raises(offload.RequestError, match="host page 99"):
                    call(host_pages=[99], device_pages=[0])
            with pytest.raises(offload.RequestError, match="device page 8"):
                face.busy(device_pages=[8])

        await in_thread(work)
        assert scheduler.statistics().load.submitted == 0


@on_both
async def test_hold_belongs_to_its_thread() -> None:
    """A hold in a thread makes one batch of that thread's requests, and lets others pass."""
    async with threads_scheduler() as (scheduler, *_):

        def work() -> None:
            face = scheduler.from_thread
            with face.hold():
                loads = [face.load(host_pages=[n], device_pages=[n]) for n in range(3)]
                anyio.from_thread.run(mine)
                assert not any(load.done for load in loads)
            for load in loads:
                load.result(LATE)

        async def mine() -> None:
            await (await scheduler.load(host_pages=[7], device_pages=[7]))

        await in_thread(work)
        assert scheduler.statistics().batches == 2


@on_both
async def test_waits_of_a_thread_raise_what_awaiting_raises() -> None:
    """A failed transfer raises in threads too, with its cause, and landed layers return."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=2)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):

        def work() -> None:
            load = scheduler.from_thread.load(host_pages=[0], device_pages=[0])
            waits: list[Callable[[], None]] = [
                lambda: load.wait_layer(2), lambda: load.wait_layer(3), load.result,
                lambda: load.fence(2),
            ]  # fmt: skip
            for wait in waits:
                with pytest.raises(offload.TransferFailed) as caught:
                    wait()
                assert isinstance(caught.value.__cause__, OSError)
                assert caught.value.layer == 2
            load.wait_layer(1)
            load.fence(0)
            load.wait_source_reusable()

        await in_thread(work)


@on_both
async def test_cancel_from_a_thread_reaches_all_who_wait() -> None:
    """A cancel from any thread ends waits in threads and in tasks."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])

        def work() -> None:
            load.wait_layer(0)
            load.cancel()
            with pytest.raises(offload.TransferCancelled):
                load.result(LATE)
            with pytest.raises(TimeoutError):
                load.wait_source_reusable(SOON)
            with pytest.raises(TimeoutError):
                scheduler.from_thread.wait_idle(device_pages=[0], timeout=SOON)
            gate.open()
            load.wait_source_reusable(LATE)
            scheduler.from_thread.wait_idle(device_pages=[0], timeout=LATE)

        async with anyio.create_task_group() as group:
            group.start_soon(in_thread, work)
            with pytest.raises(offload.TransferCancelled):
                await load


# Time limits ------------------------------------------------------------------------------------------------


@on_both
async def test_timeouts_bound_the_wait_only() -> None:
    """A wait that times out raises TimeoutError, and the transfer goes on."""
    hooks = Hooks()
    gate = hooks.gate(layer=0)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):

        def work() -> None:
            face = scheduler.from_thread
            load = face.load(host_pages=[0], device_pages=[0])
            load.wait_issued(0, timeout=LATE)
            waits: list[Callable[[float], None]] = [
                lambda limit: load.wait_layer(0, timeout=limit),
                lambda limit: load.wait_issued(1, timeout=limit),
                lambda limit: load.result(timeout=limit),
                lambda limit: load.wait_source_reusable(timeout=limit),
                lambda limit: face.wait_idle(device_pages=[0], timeout=limit),
            ]
            for wait in waits:
                for limit in (0.0, SOON):
                    with pytest.raises(TimeoutError):
                        wait(limit)
            gate.open()
            for wait in waits:
                wait(LATE)
                wait(0.0)

        await in_thread(work)


@on_both
async def test_a_parked_load_that_times_out_has_submitted_nothing() -> None:
    """`timeout=` on the blocking face ends a parked load, leaves the line, and loses no permit."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    async with threads_scheduler(driver=driver, limits=TWO_PAGES) as (scheduler, *_):
        await (await scheduler.load(host_pages=[0], device_pages=[0])).issued()
        await scheduler.load(host_pages=[1, 2], device_pages=[1, 2])

        def work() -> None:
            face = scheduler.from_thread
            with pytest.raises(TimeoutError, match="nothing was submitted"):
                face.load(host_pages=[3], device_pages=[3], timeout=SOON)
            with pytest.raises(TimeoutError, match="nothing was submitted"):
                face.backup(host_pages=[3], device_pages=[3], timeout=0.0)
            assert not face.busy(device_pages=[3])
            assert face.statistics().parked == 0
            gate.open()
            face.load(host_pages=[3], device_pages=[3], timeout=LATE).result(LATE)

        await in_thread(work)
        assert scheduler.statistics().load.submitted == 3


@pytest.mark.parametrize("timeout", [None, LATE])
@on_both
async def test_a_deadline_in_the_line_is_raised_to_the_thread(timeout: float | None) -> None:
    """A parked load of a thread raises TimeoutError when its deadline passes."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    async with threads_scheduler(driver=driver, limits=TWO_PAGES) as (scheduler, *_):
        await (await scheduler.load(host_pages=[0], device_pages=[0])).issued()
        await scheduler.load(host_pages=[1, 2], device_pages=[1, 2])

        def work() -> None:
            face = scheduler.from_thread
            with pytest.raises(TimeoutError, match="deadline"):
                face.load(
                    host_pages=[3], device_pages=[3], deadline=face.now() + SOON, timeout=timeout
                )
            gate.open()

        await in_thread(work)
        assert scheduler.statistics().load.submitted == 2


# The loop's own thread ---------------------------------------------------------------------------------------


@on_both
async def test_blocking_the_loop_is_refused() -> None:
    """Every wait that would stop the loop's own thread raises RequestError instead."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        face = scheduler.from_thread
        blocking: list[Callable[[], object]] = [
            load.result, lambda: load.wait_layer(0), load.wait_issued, load.wait_source_reusable,
            lambda: load.fence(0), lambda: face.load(host_pages=[1], device_pages=[1]),
            lambda: face.backup(host_pages=[1], device_pages=[1]),
            lambda: face.load_nowait(host_pages=[1], device_pages=[1]),
            lambda: face.wait_idle(device_pages=[0]), lambda: face.busy(device_pages=[0]),
        ]  # fmt: skip
        for call in blocking:
            with pytest.raises(offload.RequestError, match="own loop thread"):
                call()
        for name in ("load", "backup", "load_nowait", "backup_nowait"):
            with pytest.raises(
                offload.RequestError, match=rf"`await scheduler\.{name.split('_')[0]}\("
            ):
                getattr(face, name)(host_pages=[1], device_pages=[1])
        with pytest.raises(offload.RequestError, match=r"`await scheduler\.idle\(\.\.\.\)`"):
            face.wait_idle(device_pages=[0])
        with pytest.raises(offload.RequestError, match="Call the scheduler itself"):
            face.busy(device_pages=[0])
        await sim.run_until_idle()
        assert scheduler.statistics().load.submitted == 1
        load.result()
        load.wait_layer(3)
        load.wait_issued()
        load.wait_source_reusable()


@on_both
async def test_waits_work_while_the_loop_runs_a_long_callback() -> None:
    """A layer and a whole load reach a waiting thread while the loop is stuck in one callback."""
    async with threads_scheduler() as (scheduler, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await load.issued()
        waited = threading.Event()

        def work() -> None:
            load.wait_layer(0)
            load.result()
            assert load.done
            waited.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert waited.wait(LATE)  # this blocks the loop until the thread has what it wants
        thread.join()


@on_both
async def test_failures_reach_threads_while_the_loop_is_stuck() -> None:
    """The failure of a load that flies alone is known to threads before the loop hears of it."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    hooks.fail(OSError("no"), layer=1)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await load.issued(1)
        raised: list[BaseException] = []
        heard = threading.Event()

        def work() -> None:
            try:
                load.wait_layer(3)
            except offload.TransferFailed as error:
                raised.append(error)
            heard.set()

        thread = threading.Thread(target=work)
        thread.start()
        gate.open()
        assert heard.wait(LATE)  # this blocks the loop
        thread.join()
        assert len(raised) == 1
        with pytest.raises(offload.TransferFailed):
            await load


@on_both
async def test_calling_from_the_wrong_thread_names_the_right_way() -> None:
    """The async face refuses other threads and points to `from_thread`."""
    async with threads_scheduler() as (scheduler, *_):

        def work() -> None:
            for name in ("load_nowait", "backup_nowait"):
                with pytest.raises(offload.RequestError, match=rf"from_thread\.{name}"):
                    getattr(scheduler, name)(host_pages=[0], device_pages=[0])

        await in_thread(work)
        assert scheduler.statistics().load.submitted == 0


def test_another_loop_is_refused() -> None:
    """A scheduler used on another loop of the same thread says that it belongs to one loop."""
    device, host = pools()
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver())

    async def use() -> None:
        with pytest.raises(offload.RequestError, match="another event loop"):
            await scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(offload.RequestError, match="another event loop"):
            scheduler.load_nowait(host_pages=[0], device_pages=[0])

    try:
        first.run_until_complete(scheduler.__aenter__())
        second.run_until_complete(use())
        first.run_until_complete(scheduler.aclose())
    finally:
        first.close()
        second.close()
    check_left(scheduler, device, host)


@on_both
async def test_marks_of_another_thread_order_its_submits() -> None:
    """A thread's `after="compute"` means the compute of that thread."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [3])
        loads: list[offload.Transfer] = []

        def work() -> None:
            sim.compute(1.0, lambda: overwrite(device, [0], 7), writes=[(device, 0, [0])])
            loads.append(scheduler.from_thread.load(host_pages=[3], device_pages=[0]))

        await in_thread(work)
        await sim.advance(0.5)
        assert state(loads[0]) == "queued"
        await sim.run_until_idle()
        assert contents(device, [0]) == before


# A loop of its own ----------------------------------------------------------------------------------------------


def test_start_scheduler_serves_a_program_without_a_loop() -> None:
    """`start_scheduler` is the same scheduler, blocking, until its `with` ends."""
    device, host = pools()
    before = contents(device, [1])
    with offload.start_scheduler(device, host) as scheduler:
        scheduler.backup(device_pages=[1], host_pages=[5]).result(LATE)
        load = scheduler.load(host_pages=[5], device_pages=[2], timeout=LATE)
        load.wait_layer(0)
        load.result(timeout=LATE)
        with scheduler.hold():
            more = [scheduler.load(host_pages=[5], device_pages=[n]) for n in (3, 4)]
        for each in more:
            each.result(LATE)
    numbers = scheduler.statistics()
    assert (numbers.load.settled, numbers.batches) == (3, 3)
    for page in (2, 3, 4):
        assert contents(device, [page]) == before
    for call in (scheduler.load, scheduler.load_nowait):
        with pytest.raises(offload.SchedulerClosedError, match="the scheduler is closed"):
            call(host_pages=[0], device_pages=[0])
    assert not any(thread.name == "offload-loop" for thread in threading.enumerate())
    assert device.pages.table.owner is None


def test_start_scheduler_raises_what_opening_raises() -> None:
    """Pools that belong to another scheduler are refused in the caller's frame, and no thread is left."""
    device, host = pools()
    with offload.start_scheduler(device, host):
        before = threading.active_count()
        with pytest.raises(offload.RequestError, match="belongs to a scheduler that is open"):
            offload.start_scheduler(device, host)
        assert threading.active_count() <= before


@pytest.mark.parametrize("drain", [False, True])
def test_close_of_the_blocking_face(drain: bool) -> None:
    """`close` may time out and be called again; drained, what was queued is finished."""
    device, host = pools()
    hooks = Hooks()
    gate = hooks.gate(nth=1)
    scheduler = offload.start_scheduler(
        device, host, driver=ThreadsDriver(hooks=hooks), limits=TWO_PAGES
    )
    first = scheduler.load(host_pages=[0], device_pages=[0])
    first.wait_issued(timeout=LATE)
    queued = scheduler.load(host_pages=[1], device_pages=[1])
    with pytest.raises(TimeoutError, match="not closed"):
        scheduler.close(drain=drain, timeout=SOON)
    with pytest.raises(offload.SchedulerClosedError, match="the scheduler is closed"):
        scheduler.load(host_pages=[2], device_pages=[2])
    gate.open()
    scheduler.close(drain=drain, timeout=LATE)  # without `drain` it would end the first one's
    scheduler.close()
    first.result()
    if drain:
        queued.result()
    else:
        with pytest.raises(offload.TransferCancelled):
            queued.result()


def test_the_body_s_exception_leaves_with_as_itself() -> None:
    """An exception in the body of `with start_scheduler` is not wrapped."""
    device, host = pools()
    with pytest.raises(KeyError, match="mine"), offload.start_scheduler(device, host):
        raise KeyError("mine")


def test_a_thread_parked_at_close_is_refused() -> None:
    """A thread that waits for room when the scheduler closes hears SchedulerClosedError."""
    device, host = pools()
    hooks = Hooks()
    gate = hooks.gate()
    scheduler = offload.start_scheduler(
        device, host, driver=ThreadsDriver(hooks=hooks), limits=TWO_PAGES
    )
    scheduler.load(host_pages=[0], device_pages=[0]).wait_issued(timeout=LATE)
    scheduler.load(host_pages=[1, 2], device_pages=[1, 2])
    raised: list[BaseException] = []

    def submit() -> None:
        try:
            scheduler.load(host_pages=[3], device_pages=[3])
        except offload.SchedulerClosedError as error:
            raised.append(error)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    while scheduler.statistics().parked < 3:
        os.sched_yield()
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    for thread in threads:
        thread.join(LATE)
    assert len(raised) == 3
    gate.open()
    closer.join(LATE)
    assert not closer.is_alive()


def test_many_threads_submit_at_once() -> None:
    """Submits of many threads all settle, with exact bytes, and permits come back."""
    device, host = pools(device_pages=16, host_pages=16)
    before = contents(host, range(16))
    with offload.start_scheduler(device, host, limits=TWO_PAGES) as scheduler:
        errors: list[BaseException] = []

        def work(page: int) -> None:
            try:
                for _ in range(10):
                    scheduler.load(host_pages=[page], device_pages=[page]).result(LATE)
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(page,)) for page in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LATE)
        assert errors == []
    assert scheduler.statistics().load.settled == 160
    assert scheduler.statistics().parked == 0
    assert contents(device, range(16)) == before


def test_a_loop_that_is_gone_ends_the_waits_of_threads() -> None:
    """Threads that ask a scheduler whose loop was closed under it hear so, and do not hang."""
    device, host = pools()
    loop = asyncio.new_event_loop()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver())
    loop.run_until_complete(scheduler.__aenter__())
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            scheduler.from_thread.load(host_pages=[0], device_pages=[0])
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            heard.append(error)

    early = threading.Thread(target=ask, daemon=True)
    early.start()
    while not scheduler._shell._inbox:
        os.sched_yield()
    loop.close()
    late = threading.Thread(target=ask, daemon=True)
    late.start()
    start = time.monotonic()
    for thread in (early, late):
        thread.join(LATE)
    assert [type(error) for error in heard] == [offload.SchedulerClosedError] * 2
    assert all("event loop has ended" in str(error) for error in heard)
    assert time.monotonic() - start < LATE


def test_run_leaves_no_thread() -> None:
    """A scheduler on threads that was left has ended every thread that it started."""
    before = set(threading.enumerate())

    async def body() -> None:
        async with threads_scheduler() as (scheduler, *_):
            await (await scheduler.load(host_pages=[0], device_pages=[0]))
            await (await scheduler.backup(host_pages=[0], device_pages=[0]))

    for loop in ("asyncio", "trio"):
        run(body, loop)
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("offload")]
    assert left == []


def test_close_waits_for_ever_when_asked_to() -> None:
    """An endless timeout of `close` is one, as of every other wait."""
    scheduler = offload.start_scheduler(*pools())
    scheduler.close(timeout=float("inf"))
    assert scheduler.statistics().load.submitted == 0
