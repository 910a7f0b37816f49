"""What a flight tells the loop, and when: news only, as each costs it a turn."""

from __future__ import annotations

import pytest

import offload
from offload.flight import Flight
from offload.shell import Shell
from offload.testing import Hooks, ThreadsDriver
from tests.sched import on_both, threads_scheduler


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return what flights report from now on: how many layers had landed, and whether it was over."""
    found: list[tuple[int, bool]] = []
    report = Shell._report

    def noted(self: Shell, flight: Flight) -> None:
        found.append((flight.landed_layers, flight.over))
        report(self, flight)

    monkeypatch.setattr(Shell, "_report", noted)
    return found


@on_both
async def test_the_last_layer_s_landing_is_a_flight_s_end(told: list[tuple[int, bool]]) -> None:
    """Where nobody waits for single layers, the loop hears of a flight once, when all of it is over."""
    async with threads_scheduler() as (scheduler, *_):
        await (await scheduler.load(host_pages=[1], device_pages=[2]))
    assert told == [(4, True)]


@on_both
async def test_a_flight_that_breaks_tells_of_its_error_and_of_its_end(
    told: list[tuple[int, bool]],
) -> None:
    """Its pages stay claimed until nothing of it moves, which is another moment than the error."""
    hooks = Hooks()
    hooks.fail(OSError("torn cable"), layer=2)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, *_):
        with pytest.raises(offload.TransferFailed):
            await (await scheduler.load(host_pages=[1], device_pages=[2]))
    assert told[:2] == [(2, False), (2, True)]
