"""Pools that serve one scheduler after another."""

from __future__ import annotations

import pytest

import offload
from offload.driver.base import Driver
from offload.testing import SimDriver, ThreadsDriver
from tests.sched import check_left, contents, on_both, on_loops, pools, sim_scheduler


@pytest.mark.parametrize("first", ["load", "backup"])
@on_both
async def test_a_second_scheduler_keeps_the_order_of_page_users(first: str) -> None:
    """However many requests the first one served, the second tells readers and writers of a page apart."""
    async with sim_scheduler() as bed:
        for _ in range(20):
            await bed.scheduler.backup(device_pages=[0], host_pages=[5])
            await bed.scheduler.load(host_pages=[5], device_pages=[0])
        await bed.scheduler.aclose(drain=True)
        sim = SimDriver(detect_races=True)
        async with offload.open_scheduler(bed.device, bed.host, driver=sim) as scheduler:
            old, new = contents(bed.host, [5]), contents(bed.device, [2])
            if first == "load":
                await scheduler.load(host_pages=[5], device_pages=[1])
            await scheduler.backup(device_pages=[2], host_pages=[5])
            if first == "backup":
                await scheduler.load(host_pages=[5], device_pages=[1])
            await sim.run_until_idle()
            assert contents(bed.device, [1]) == (old if first == "load" else new)
            assert contents(bed.host, [5]) == new


@pytest.mark.parametrize("blocking", [False, True])
@on_loops("asyncio", "trio", "uvloop")
async def test_a_driver_that_a_scheduler_has_closed_is_refused(blocking: bool) -> None:
    """A driver object goes with its scheduler: the next one that is given it says so, and takes no pools."""
    driver = ThreadsDriver()
    device, host = pools()
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:
        await (await scheduler.load(host_pages=[0], device_pages=[0]))
    assert driver.closed

    async def again() -> None:
        if blocking:
            offload.start_scheduler(device, host, driver=driver)
        else:
            await offload.open_scheduler(device, host, driver=driver).__aenter__()

    with pytest.raises(offload.RequestError, match=r"driver= is the scheduler's"):
        await again()
    check_left(scheduler, device, host)


@on_both
async def test_the_simulator_s_clock_goes_on_under_another_scheduler() -> None:
    """The simulator has nothing to close: the next scheduler may be given the same."""
    device, host = pools()
    sim: Driver = SimDriver()
    for _ in range(2):
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            await scheduler.load(host_pages=[0], device_pages=[0])
            await scheduler.aclose(drain=True)
        check_left(scheduler, device, host)


@on_both
async def test_schedulers_made_before_others_served_are_no_older() -> None:
    """What counts is when a scheduler is entered, not when it was made."""
    device, host = pools()
    made = [
        offload.open_scheduler(device, host, driver=SimDriver(detect_races=True)) for _ in range(3)
    ]
    for each in made:
        async with each as scheduler:
            for _ in range(3):
                await scheduler.load(host_pages=[5], device_pages=[1])
                await scheduler.backup(device_pages=[1], host_pages=[5])
            await scheduler.aclose(drain=True)
            driver = scheduler._shell.driver
            assert isinstance(driver, SimDriver)
            driver.raise_races()
