"""Interrupted while it closes: whatever is thrown into `aclose`, and wherever, the next call finishes it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from types import CodeType, FrameType, coroutine
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import offload
from offload import closing
from offload.driver.loops import running_on_asyncio
from offload.testing import Gate, Hooks, SimDriver, ThreadsDriver
from tests.sched import LOOPS, PAGE_BYTES, check_left, on_loops, pools, state

MOST = 12
"""More suspensions than closing has here."""

DRIVERS: dict[str, Callable[[Hooks], Any]] = {
    "threads": lambda hooks: ThreadsDriver(hooks=hooks),
    "sim": lambda hooks: SimDriver(hooks=hooks),
}


@coroutine
def thrown_into(
    work: Coroutine[Any, Any, object], nth: int, error: BaseException
) -> Generator[Any, Any, int]:
    """Run a coroutine, and throw an error into it where it suspends for the nth time; return how often it did."""
    suspended, answer = 0, None
    steps = work.__await__()
    while True:
        try:
            asked = steps.send(answer)
            if suspended == nth:
                _abort(asked, error)
                asked = steps.throw(error)
        except StopIteration:
            return suspended
        suspended += 1
        answer = yield asked


def _abort(asked: object, error: BaseException) -> None:
    """Take back what a task of trio has asked for, as its loop would before it throws."""
    abort = getattr(asked, "abort_func", None)
    if abort is not None:

        def throw() -> None:
            raise error

        abort(throw)


async def queue_up(scheduler: offload.Scheduler) -> list[offload.Transfer]:
    """Submit a load that hangs in its second layer, and some behind it."""
    loads = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(3)]
    loads.append(await scheduler.backup(device_pages=[1], host_pages=[9], streaming=True))
    driver = scheduler._shell.driver
    if isinstance(driver, SimDriver):
        await driver.advance_to_layer(1)
    await loads[0].layer(0)
    return loads


async def open_soon(gate: Gate) -> None:
    """Open a gate when everybody else has come to wait for that."""
    for _ in range(10 * MOST):
        await checkpoint()
    gate.open()


@pytest.mark.parametrize("nth", range(MOST))
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("drain", [False, True])
@on_loops(*LOOPS)
async def test_what_interrupts_a_close_leaves_it_to_the_next(
    driver: str, nth: int, drain: bool
) -> None:
    """Thrown into `aclose` where it suspends, a signal comes out at once, and a second `aclose` ends everything."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    before = set(threading.enumerate())
    device, host = pools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "_CHUNK", 2)
        scheduler = offload.open_scheduler(device, host, driver=DRIVERS[driver](hooks))
        await scheduler.__aenter__()
        loads = await queue_up(scheduler)
        error = KeyboardInterrupt()
        async with anyio.create_task_group() as group:
            group.start_soon(open_soon, gate)
            with contextlib.suppress(KeyboardInterrupt):
                assert await thrown_into(scheduler.aclose(drain), nth, error) <= nth
            await scheduler.aclose()
        await scheduler.__aexit__(None, None, None)
    check_left(scheduler, device, host)
    assert not {state(load) for load in loads} - {"done", "cancelled"}
    assert set(threading.enumerate()) - before == set()
    async with offload.open_scheduler(device, host) as other:
        await scheduler.aclose()  # closed for good: the pools are another one's now
        assert device.pages.table.owner is not None
        await (await other.load(host_pages=[0], device_pages=[0]))


@pytest.mark.parametrize("nth", range(MOST))
@pytest.mark.parametrize("driver", DRIVERS)
@on_loops(*LOOPS)
async def test_what_interrupts_the_leaving_of_a_block_waits_until_it_is_left(
    driver: str, nth: int
) -> None:
    """Nobody closes again who is thrown out of a block's end: what was thrown comes out when all has ended."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    before = set(threading.enumerate())
    device, host = pools()
    scheduler = offload.open_scheduler(device, host, driver=DRIVERS[driver](hooks))
    await scheduler.__aenter__()
    await queue_up(scheduler)
    async with anyio.create_task_group() as group:
        group.start_soon(open_soon, gate)
        with contextlib.suppress(KeyboardInterrupt):
            leaving = scheduler.__aexit__(None, None, None)
            assert await thrown_into(leaving, nth, KeyboardInterrupt()) <= nth
    check_left(scheduler, device, host)
    assert set(threading.enumerate()) - before == set()


@pytest.mark.parametrize("nth", range(MOST))
@on_loops("asyncio", "uvloop")
async def test_a_cancel_of_asyncio_s_own_is_heard_when_the_copy_has_landed(nth: int) -> None:
    """`task.cancel()` knows no shield: it is raised all the same, and not before nothing moves any more."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    device, host = pools()
    async with offload.open_scheduler(device, host, driver=SimDriver(hooks=hooks)) as scheduler:
        await queue_up(scheduler)
        closer = asyncio.ensure_future(scheduler.aclose())
        another = asyncio.ensure_future(scheduler.aclose())
        for _ in range(nth + 1):
            await checkpoint()
        closer.cancel()
        another.cancel()
        await open_soon(gate)
        for each in (closer, another):
            with contextlib.suppress(asyncio.CancelledError):
                await each
        assert closer.cancelled() or nth > 1
        check_left(scheduler, device, host)


@on_loops(*LOOPS)
async def test_who_waits_for_a_close_that_is_interrupted_takes_it_over() -> None:
    """A second `aclose` under way closes, when the first is thrown out."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    device, host = pools()
    scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
    await scheduler.__aenter__()
    await queue_up(scheduler)
    async with anyio.create_task_group() as group:
        group.start_soon(open_soon, gate)
        first = thrown_into(scheduler.aclose(), 1, KeyboardInterrupt())
        group.start_soon(scheduler.aclose)
        with pytest.raises(KeyboardInterrupt):
            await first
    check_left(scheduler, device, host)


@pytest.mark.parametrize("nth", range(4))
@on_loops(*LOOPS)
async def test_what_interrupts_the_entering_of_a_block_leaves_nothing_behind(nth: int) -> None:
    """Thrown out while streams warm up, nobody holds the scheduler: its workers end, its pools are free."""
    before = set(threading.enumerate())
    device, host = pools()
    scheduler = offload.open_scheduler(device, host)
    scheduler._shell.driver.stream("load")
    with contextlib.suppress(KeyboardInterrupt):
        await thrown_into(scheduler.__aenter__(), nth, KeyboardInterrupt())
    await scheduler.aclose()
    check_left(scheduler, device, host)
    assert set(threading.enumerate()) - before == set()


def test_what_interrupts_the_end_of_a_blocking_block_is_not_a_note() -> None:
    """A signal that comes while a `with` block ends, because its body raised, comes out; closing goes on."""
    before = set(threading.enumerate())
    device, host = pools()
    scheduler = offload.start_scheduler(device, host)
    thread = scheduler._thread

    def join(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    def body(patch: pytest.MonkeyPatch) -> None:
        with scheduler:
            patch.setattr(thread, "join", join)
            raise OSError("body")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as raised:
        body(patch)
    assert isinstance(raised.value.__context__, OSError)
    scheduler.close()
    assert set(threading.enumerate()) - before == set()


# Cancelled where it suspends ----------------------------------------------------------------------------

FAR = 34
"""Places to cancel at: as many as `walk` has on the simulator."""


@coroutine
def cancelled_at(
    work: Coroutine[Any, Any, object], nth: int, cancel: Callable[[], object]
) -> Generator[Any, Any, int]:
    """Run a coroutine, and have it cancelled where it suspends for the nth time; return how often it did."""
    suspended, answer = 0, None
    thrown: BaseException | None = None
    steps = work.__await__()
    while True:
        try:
            asked = steps.send(answer) if thrown is None else steps.throw(thrown)
        except StopIteration:
            return suspended
        if suspended == nth:
            cancel()
        suspended += 1
        answer = thrown = None
        try:
            answer = yield asked
        except BaseException as error:  # noqa: BLE001 - the loop's, for the work
            thrown = error


async def walk(device: offload.DevicePool, host: offload.HostPool, driver: Any) -> None:
    """Wait for everything that can be waited for, from the opening of a scheduler to its end."""
    limits = offload.Limits(max_queued_bytes=PAGE_BYTES, max_inflight_requests=1)
    async with offload.open_scheduler(device, host, driver=driver, limits=limits) as scheduler:
        first = await scheduler.load(host_pages=[0], device_pages=[0])
        await first.layer(1)
        loads = [await scheduler.load(host_pages=[n], device_pages=[0]) for n in range(1, 4)]
        await loads[0].issued(2)
        backup = await scheduler.backup(
            device_pages=[0], host_pages=[5], deadline=60.0 + scheduler.now()
        )
        await backup
        await loads[2].source_reusable()
        stream = await scheduler.backup(device_pages=[1], host_pages=[6], streaming=True)
        for layer in range(4):
            stream.layer_written(layer)
        await scheduler.idle(host_pages=[6])
        await scheduler.load(host_pages=[7], device_pages=[7])
        await scheduler.aclose(drain=True)


@pytest.mark.parametrize("nth", range(FAR))
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("native", [False, True])
@on_loops(*LOOPS)
async def test_cancelled_at_any_wait_everything_is_left_as_it_should_be(
    driver: str, nth: int, native: bool
) -> None:
    """Cancelled wherever it suspends, by its scope or by asyncio's own `cancel`, a task leaves nothing behind."""
    device, host = pools()
    made = DRIVERS[driver](Hooks())
    before = set(threading.enumerate())
    cancel: Callable[[], object]

    async def pump() -> None:
        while True:
            if isinstance(made, SimDriver):
                await made.run_until_idle()
            await checkpoint()

    async def work() -> None:
        nonlocal cancel
        with anyio.CancelScope() as scope:
            cancel = scope.cancel
            task = asyncio.current_task() if native and running_on_asyncio() else None
            if task is not None:
                cancel = task.cancel
            with contextlib.suppress(asyncio.CancelledError) if task else contextlib.nullcontext():
                await cancelled_at(walk(device, host, made), nth, cancel)

    async with anyio.create_task_group() as group:
        group.start_soon(pump)
        if native and running_on_asyncio():
            await asyncio.ensure_future(work())
        else:
            await work()
        group.cancel_scope.cancel()
    for pool in (device, host):
        assert not pool.pages.table.held()
        assert pool.pages.table.owner is None
    left = [each for each in set(threading.enumerate()) - before if each.name.startswith("offload")]
    assert left == []
    async with offload.open_scheduler(device, host) as scheduler:
        await (await scheduler.load(host_pages=[0], device_pages=[0]))


class Alarm(BaseException):
    """What a signal's handler raises."""


OURS = os.path.dirname(offload.__file__)


@functools.cache
def calls(code: CodeType, line: int) -> bool:
    """Return whether a line of ours calls or loops: there the interpreter looks for signals."""
    text = linecache.getline(code.co_filename, line)
    return "(" in text or text.lstrip().startswith("for ")


def raising_at(nth: int, act: Callable[[], object]) -> int:
    """Do something, and raise `Alarm` at its nth line in offload that calls; return how many it took."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal passed
        if event == "call" and not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and calls(frame.f_code, frame.f_lineno):
            passed += 1
            if passed == nth:
                sys.settrace(None)
                raise Alarm
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return passed


def submits(scheduler: offload.Scheduler) -> None:
    """Submit what takes all ways: free pages, shared ones, several, those of a streaming backup."""
    scheduler.load_nowait(host_pages=[1], device_pages=[1])
    scheduler.load_nowait(host_pages=[1, 2], device_pages=[0, 2], deadline=scheduler.now() + 60)
    stream = scheduler.backup_nowait(device_pages=[1, 3], host_pages=[3, 4], streaming=True)
    stream.layer_written(0)
    scheduler.busy(device_pages=[0])
    scheduler.backup_nowait(device_pages=[1], host_pages=[3]).cancel()


async def raised_in_submits(
    line: int, device: offload.DevicePool, host: offload.HostPool
) -> int | None:
    """Raise at a line of submits, and leave; check that the pools are free. Return how many lines there are."""
    count: int | None = None
    with contextlib.suppress(Alarm):
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            await scheduler.load(host_pages=[0], device_pages=[0])
            await checkpoint()
            count = raising_at(line, lambda: submits(scheduler))
    for pool in (device, host):
        assert not pool.pages.table.held(), f"line {line}"
        assert pool.pages.table.owner is None
    return count


@on_loops("asyncio")
async def test_a_signal_at_any_line_of_a_submit_leaves_the_pools_free() -> None:
    """Raised at each line in turn, whatever was half done, no page is held when the scheduler has been left."""
    device, host = pools()
    line, count = 1, None
    while count is None:
        count = await raised_in_submits(line, device, host)
        line += 1
    assert line > 300
    async with offload.open_scheduler(device, host) as scheduler:
        await scheduler.backup(device_pages=range(4), host_pages=range(4))
        await (await scheduler.load(host_pages=range(4), device_pages=range(4)))
