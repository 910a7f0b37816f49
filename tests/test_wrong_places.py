"""Called on another thread, or on another loop: every public method of a scheduler refuses, or says that it works."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.sched import LOOPS, check_left, check_still_open, on_loops, pools, run

Call = Callable[[offload.Scheduler], Any]
PAGES: dict[str, Any] = {"host_pages": [1], "device_pages": [1]}

ITS_LOOP: dict[str, Call] = {
    "__aenter__": lambda scheduler: scheduler.__aenter__(),
    "__aexit__": lambda scheduler: scheduler.__aexit__(None, None, None),
    "aclose": lambda scheduler: scheduler.aclose(),
    "load": lambda scheduler: scheduler.load(**PAGES),
    "backup": lambda scheduler: scheduler.backup(**PAGES),
    "load_nowait": lambda scheduler: scheduler.load_nowait(**PAGES),
    "backup_nowait": lambda scheduler: scheduler.backup_nowait(**PAGES),
    "hold": lambda scheduler: scheduler.hold(),
    "busy": lambda scheduler: scheduler.busy(**PAGES),
    "idle": lambda scheduler: scheduler.idle(**PAGES),
}
"""What belongs to the scheduler's loop."""

ANYWHERE: dict[str, Call] = {
    "group": lambda scheduler: scheduler.group,
    "from_thread": lambda scheduler: scheduler.from_thread,
    "now": lambda scheduler: scheduler.now(),
    "counters": lambda scheduler: scheduler.counters,
    "statistics": lambda scheduler: scheduler.statistics(),
}
"""What any thread may ask."""

CALLS = ITS_LOOP | ANYWHERE


async def called(name: str, scheduler: offload.Scheduler) -> None:
    """Call a method where it must be refused, or must work."""

    async def done() -> None:
        made = CALLS[name](scheduler)
        if inspect.isawaitable(made):
            await made

    with anyio.fail_after(10):
        if name in ANYWHERE:
            await done()
            return
        with pytest.raises(offload.RequestError, match=r"another (thread|event loop)|entered once"):
            await done()


def test_every_public_method_is_called_here() -> None:
    """No method of `Scheduler` is forgotten in the tables."""
    public = {name for name in dir(offload.Scheduler) if not name.startswith("_")}
    assert public | {"__aenter__", "__aexit__"} == set(CALLS)


@pytest.mark.parametrize("there", LOOPS)
@pytest.mark.parametrize("name", CALLS)
@on_loops(*LOOPS)
async def test_on_another_thread_it_is_refused(name: str, there: str) -> None:
    """Whatever loop runs on the other thread; the scheduler goes on as if nobody had asked."""
    device, host = pools()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run(called, there, name=name, scheduler=scheduler)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
        thread = threading.Thread(target=work)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert failed == []
        await check_still_open(scheduler, device, host)
    check_left(scheduler, device, host)


@pytest.mark.parametrize("there", LOOPS)
@pytest.mark.parametrize("name", CALLS)
def test_on_another_loop_of_its_thread_it_is_refused(name: str, there: str) -> None:
    """Whatever other loop runs while the scheduler's is stopped; afterwards that goes on."""
    device, host = pools()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver())
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(scheduler.__aenter__())
        run(called, there, name=name, scheduler=scheduler)
        loop.run_until_complete(check_still_open(scheduler, device, host))
        loop.run_until_complete(scheduler.aclose())
    finally:
        loop.close()
    check_left(scheduler, device, host)


@on_loops(*LOOPS)
async def test_a_question_of_another_thread_runs_nothing_of_the_loop_s() -> None:
    """`busy` on another thread is refused before it does what was posted to the loop."""
    device, host = pools()
    threads: list[int] = []
    async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:

        def work() -> None:
            scheduler._shell.post(lambda: threads.append(threading.get_ident()))
            with pytest.raises(offload.RequestError, match=r"from_thread\.busy"):
                scheduler.busy(device_pages=[0])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        await check_still_open(scheduler, device, host)
        assert threads == [threading.get_ident()]


@pytest.mark.parametrize("there", LOOPS)
@pytest.mark.parametrize("loop", LOOPS)
def test_after_its_loop_has_ended_it_is_closed_on_any(loop: str, there: str) -> None:
    """`aclose` and `busy` of a scheduler whose loop ended under a copy are no misuse: its worker ends, its pools serve."""
    device, host = pools()
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    before = set(threading.enumerate())
    made: list[offload.Scheduler] = []

    async def left() -> None:
        scheduler = offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks))
        made.append(await scheduler.__aenter__())
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await scheduler.load(host_pages=[1], device_pages=[0])
        await load.layer(0)

    async def closed() -> None:
        assert made[0].busy(device_pages=[0])
        gate.open()
        await made[0].aclose(drain=True)
        await made[0].aclose()
        assert not made[0].busy(device_pages=[0])
        async with offload.open_scheduler(device, host) as scheduler:
            await check_still_open(scheduler, device, host)

    run(left, loop)
    run(closed, there)
    assert set(threading.enumerate()) - before == set()
