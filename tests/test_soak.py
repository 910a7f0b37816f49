"""Random programs: nothing is found, unless a fault is planted, and then it is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from offload.testing import RaceError
from tests.sched import on_both, sim_scheduler
from tests.soak.plants import PLANTS, first_find, planted
from tests.soak.run import Outcome, play, shrink
from tests.soak.steps import program

CHUNK = 20


def found(seeds: range, *, threads: bool = False) -> Outcome | None:
    """Return the first failure."""
    outcomes = (play(seed, threads=threads) for seed in seeds)
    return next((outcome for outcome in outcomes if outcome.error is not None), None)


def told(outcome: Outcome | None) -> str:
    """Return what a person needs to go on."""
    if outcome is None:
        return ""
    lines = "\n".join(outcome.story)
    return f"python -m tests.soak --seed {outcome.seed}\n{lines}\n{outcome.error!r}"


@pytest.mark.parametrize("first", range(0, 240, CHUNK))
def test_programs_on_the_simulator_find_nothing(first: int) -> None:
    """No race, no wrong byte, no leak, no wait that never ends."""
    outcome = found(range(first, first + CHUNK))
    assert outcome is None, told(outcome)


@pytest.mark.parametrize("first", range(0, 80, CHUNK))
def test_programs_on_threads_find_nothing(first: int) -> None:
    """The same with real workers, where every run is another order."""
    outcome = found(range(first, first + CHUNK), threads=True)
    assert outcome is None, told(outcome)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    """Each rule that is taken away shows within 200 programs, as a race or as wrong bytes."""
    assert first_find(name) is not None


def test_a_failing_program_is_made_smaller_and_replays() -> None:
    """What is left after shrinking still fails, and fails again the same way."""
    with planted("no fence"):
        outcome = found(range(200))
        assert outcome is not None
        less, kept = shrink(outcome)
        assert less.error is not None
        assert len(kept) < len(program(outcome.seed))
        again = play(outcome.seed, [program(outcome.seed)[index] for index in kept])
        assert str(again.error) == str(less.error)
        assert again.story == less.story


def test_programs_repeat() -> None:
    """A seed tells the same story every time."""
    assert play(3) == play(3)


@pytest.mark.parametrize("early", [False, True])
@on_both
async def test_the_race_detector_sees_a_page_that_was_freed_early(early: bool) -> None:
    """A page whose bytes still move is not handed out; if it is, compute that writes it is a race."""
    with planted("freed early") if early else nullcontext():
        async with sim_scheduler(latency=1e-3) as (scheduler, sim, device, _):
            pages = device.pages.alloc(8)
            await scheduler.backup(device_pages=pages[:1], host_pages=[0])
            await sim.advance(1e-4)
            device.pages.free(pages)
            again = device.pages.alloc(7).tolist()
            assert (int(pages[0]) in again) is early
            sim.compute(1e-6, writes=[(device, layer, again) for layer in range(4)])
            if early:
                with pytest.raises(RaceError):
                    await sim.run_until_idle()
            await sim.run_until_idle()
