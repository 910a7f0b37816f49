"""Whose pools they are is asked of the loop: nothing but its end frees those of a scheduler that nobody left."""

from __future__ import annotations

import asyncio
import gc
import selectors
import threading
from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

import offload
from offload.testing import SimDriver
from tests.sched import (
    LOOPS,
    check_left,
    check_still_open,
    on_loops,
    pools,
    run,
    waiting_in_loop,
)


class Jumping(asyncio.SelectorEventLoop):
    """A loop as tests of timeouts use: when nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.jumped = 0.0

        class Selector(selectors.SelectSelector):
            def select(
                made, timeout: float | None = None
            ) -> list[tuple[selectors.SelectorKey, int]]:
                if timeout:
                    self.jumped += timeout
                    timeout = 0.0
                return super().select(timeout)

        super().__init__(Selector())

    def time(self) -> float:
        """Return the time with all jumps."""
        return super().time() + self.jumped


def test_a_loop_that_jumps_to_its_next_timer_keeps_its_pools() -> None:
    """An open scheduler puts no timer into a loop, and a clock that jumps neither jumps for it nor frees its pools."""

    async def body() -> None:
        device, host = pools()
        loop = asyncio.get_running_loop()
        mark = threading.Event()
        async with offload.open_scheduler(device, host) as scheduler:
            load = await scheduler.load(host_pages=[1], device_pages=[1], after=mark)
            await loop.run_in_executor(None, gc.collect)
            assert isinstance(loop, Jumping)
            assert loop.jumped == 0.0
            assert scheduler.busy(device_pages=[1])
            await check_still_open(scheduler, device, host)
            await asyncio.sleep(3600.0)
            await check_still_open(scheduler, device, host)
            mark.set()
            await load
        check_left(scheduler, device, host)

    loop = Jumping()
    try:
        loop.run_until_complete(body())
    finally:
        loop.close()


@on_loops("asyncio", "uvloop")
async def test_a_loop_that_goes_on_after_its_shutdown_keeps_its_pools() -> None:
    """`shutdown_asyncgens`, and a far timer that is dropped or comes, are not the end of a loop."""
    device, host = pools()
    loop = asyncio.get_running_loop()
    async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.loop._FAR_S", 0.0)
            await loop.shutdown_asyncgens()
            await asyncio.sleep(0.001)
        gc.collect()
        await check_still_open(scheduler, device, host)
    check_left(scheduler, device, host)


@pytest.mark.parametrize("shut_down", [False, True])
@pytest.mark.parametrize("made", [asyncio.new_event_loop, Jumping])
def test_a_loop_that_is_closed_gives_its_pools_to_the_next(
    made: Callable[[], asyncio.AbstractEventLoop], shut_down: bool
) -> None:
    """Pools of a scheduler whose loop was closed under it serve another one, also where nobody heard of that end."""
    device, host = pools()

    async def body() -> None:
        scheduler = offload.open_scheduler(device, host)
        await scheduler.__aenter__()
        await (await scheduler.load(host_pages=[0], device_pages=[0]))

    async def another() -> None:
        async with offload.open_scheduler(device, host) as scheduler:
            await (await scheduler.load(host_pages=[0], device_pages=[0]))

    loop = made()
    loop.run_until_complete(body())
    if shut_down:
        loop.run_until_complete(loop.shutdown_asyncgens())
    assert device.pages.table.owner is not None
    loop.close()
    gc.collect()
    assert (device.pages.table.owner is None) == shut_down
    anyio.run(another)


@pytest.mark.parametrize("loop", LOOPS)
def test_pools_are_free_when_a_loop_has_ended_and_not_before(loop: str) -> None:
    """Until its last task has ended, a loop keeps the pools of a scheduler that nobody left."""
    device, host = pools()
    owners: list[object] = []

    async def body() -> None:
        scheduler = offload.open_scheduler(device, host, driver=SimDriver())
        await scheduler.__aenter__()
        owners.append(device.pages.table.owner)

    run(body, loop)
    assert owners != [None]
    assert device.pages.table.owner is None


@on_loops("asyncio", "trio")
async def test_an_alarm_that_stands_in_a_loop_is_seen_by_what_checks_tests() -> None:
    """What every test must leave behind is looked for where it would be."""
    device, host = pools()
    mark = threading.Event()
    async with offload.open_scheduler(device, host) as scheduler:
        deadline = scheduler.now() + 3600.0
        await scheduler.load(host_pages=[0], device_pages=[0], after=mark, deadline=deadline)
        await checkpoint()
        assert ["offload" in each for each in waiting_in_loop()] == [True]
    mark.set()
    await anyio.wait_all_tasks_blocked()
    assert waiting_in_loop() == []
