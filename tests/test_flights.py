"""What a flight tells the loop, and when: news only, as each costs it a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

import offload
from offload.flight import Flight, WaitingThreads
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
    """A thread that waits for a number of layers."""

    def __init__(
        self,
        waiting_threads: WaitingThreads,
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
            target=lambda: waiting_threads.wait(self._look, timeout=30.0, news=news, issue=issue)
        )
        self.thread.start()
        self.looks.acquire()

    def _look(self) -> bool:
        found = self._landed()
        self.looked.append(found)
        self.looks.release()
        return found


@pytest.fixture
def waiting_threads(monkeypatch: pytest.MonkeyPatch) -> WaitingThreads:
    """Return a `WaitingThreads` whose threads never look by themselves."""
    monkeypatch.setattr("offload.flight.LOOK_S", 30.0)
    return WaitingThreads()


def test_a_landing_wakes_nobody_who_has_to_go_on_waiting(waiting_threads: WaitingThreads) -> None:
    """Of eight threads that wait for one layer each, a landing wakes the one whose layer it is."""
    landed = set[int]()
    asleep = []
    for layer in range(8):
        here = partial(landed.__contains__, layer)
        asleep.append(Asleep(waiting_threads, here, here))
    for layer, each in enumerate(asleep):
        landed.add(layer)
        waiting_threads.wake()
        each.thread.join()
        assert [len(other.looked) for other in asleep] == [2] * (layer + 1) + [1] * (7 - layer)
    assert not waiting_threads.waiters


@pytest.mark.parametrize("issue", [True, False])
def test_an_issue_wakes_those_who_wait_for_one(
    waiting_threads: WaitingThreads, issue: bool
) -> None:
    """Others hear when something has landed."""
    done = threading.Event()
    asleep = Asleep(waiting_threads, done.is_set, done.is_set, issue=issue)
    done.set()
    waiting_threads.wake_for_issue()
    if not issue:
        assert asleep.looked == [False]
        waiting_threads.wake()
    asleep.thread.join()
    assert asleep.looked == [False, True]


@pytest.mark.parametrize("wake", [WaitingThreads.wake, WaitingThreads.wake_all])
def test_whoever_cannot_say_what_is_news_is_woken_each_time(
    waiting_threads: WaitingThreads, wake: Callable[[WaitingThreads], None]
) -> None:
    """So is everybody by `wake_all`."""
    done = threading.Event()
    asleep = Asleep(waiting_threads, done.is_set, lambda: wake is WaitingThreads.wake)
    wake(waiting_threads)
    asleep.looks.acquire()
    done.set()
    wake(waiting_threads)
    asleep.thread.join()
    assert asleep.looked == [False, False, True]
