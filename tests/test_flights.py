"""What a flight tells the loop, and when: news only, as each costs it a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

import offload
from offload.flight import Bell, Flight
from offload.shell import Shell
from offload.testing import Hooks, ThreadsDriver
from tests.sched import on_both, threads_scheduler


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return what flights report from now on: how many layers had landed, and whether it was over."""
    found: list[tuple[int, bool]] = []
    report = Shell.report

    def noted(self: Shell, flight: Flight) -> None:
        found.append((flight.landed_layers, flight.over))
        report(self, flight)

    monkeypatch.setattr(Shell, "report", noted)
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


class Asleep:
    """A thread that waits at a bell for a number of layers."""

    def __init__(
        self,
        bell: Bell,
        landed: Callable[[], bool],
        news: Callable[[], bool],
        *,
        issue: bool = False,
    ) -> None:
        self.looked: list[bool] = []
        """Each look of its own at what it waits for."""
        self.looks = threading.Semaphore(0)
        self._landed = landed
        self.thread = threading.Thread(
            target=lambda: bell.wait(self._look, timeout=30.0, news=news, issue=issue)
        )
        self.thread.start()
        self.looks.acquire()

    def _look(self) -> bool:
        found = self._landed()
        self.looked.append(found)
        self.looks.release()
        return found


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> Bell:
    """Return a bell at which nobody looks by himself."""
    monkeypatch.setattr("offload.flight.LOOK_S", 30.0)
    return Bell()


def test_a_bell_wakes_nobody_who_has_to_go_on_waiting(bell: Bell) -> None:
    """Of eight threads that wait for one layer each, a landing wakes the one whose layer it is."""
    landed = set[int]()
    asleep = []
    for layer in range(8):
        here = partial(landed.__contains__, layer)
        asleep.append(Asleep(bell, here, here))
    for layer, each in enumerate(asleep):
        landed.add(layer)
        bell.ring()
        each.thread.join()
        assert [len(other.looked) for other in asleep] == [2] * (layer + 1) + [1] * (7 - layer)
    assert not bell.waiting


@pytest.mark.parametrize("issue", [True, False])
def test_an_issue_wakes_those_who_wait_for_one(bell: Bell, issue: bool) -> None:
    """Others hear when something has landed."""
    done = threading.Event()
    asleep = Asleep(bell, done.is_set, done.is_set, issue=issue)
    done.set()
    bell.ring_issued()
    if not issue:
        assert asleep.looked == [False]
        bell.ring()
    asleep.thread.join()
    assert asleep.looked == [False, True]


@pytest.mark.parametrize("ring", [Bell.ring, Bell.alarm])
def test_whoever_cannot_say_what_is_news_is_woken_each_time(
    bell: Bell, ring: Callable[[Bell], None]
) -> None:
    """So is everybody by an alarm."""
    done = threading.Event()
    asleep = Asleep(bell, done.is_set, lambda: ring is Bell.ring)
    ring(bell)
    asleep.looks.acquire()
    done.set()
    ring(bell)
    asleep.thread.join()
    assert asleep.looked == [False, False, True]
