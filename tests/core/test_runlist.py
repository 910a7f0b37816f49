"""Which flight goes next on a stream."""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs
import pytest

from offload.core.runlist import Runlist


@attrs.define(eq=False)
class Paper:
    """A flight on paper: it hands out `layers` layers, as far as `allowed`."""

    name: str
    layers: int = 3
    urgency: tuple[float, ...] = (0.0,)
    stopped: bool = False
    allowed: int = 1000
    handed: int = 0

    @property
    def exhausted(self) -> bool:
        return self.handed == self.layers

    def next_layer(self) -> tuple[int, str] | None:
        if self.handed >= min(self.layers, self.allowed):
            return None
        self.handed += 1
        return self.handed - 1, f"{self.name}{self.handed - 1}"


def works(runlist: Runlist[Paper]) -> Iterator[object]:
    """Pick until nothing is handed out."""
    while (picked := runlist.pick()) is not None:
        yield picked[2]


def runlist_of(*flights: Paper) -> Runlist[Paper]:
    runlist: Runlist[Paper] = Runlist()
    for flight in flights:
        runlist.add(flight)
    return runlist


def test_an_empty_lane_picks_nothing() -> None:
    """A runlist without flights hands out nothing, and has nothing to reap."""
    runlist = runlist_of()
    assert runlist.pick() is None
    assert runlist.reap() == []
    assert not runlist.busy


def test_one_flight_goes_in_layer_order_and_leaves_once() -> None:
    """A flight alone hands out its layers in order; with the last it leaves, and is reaped once."""
    flight = Paper("a")
    runlist = runlist_of(flight)
    assert runlist.busy
    assert list(works(runlist)) == ["a0", "a1", "a2"]
    assert runlist.busy  # it is still to be reaped
    assert runlist.reap() == [flight]
    assert not runlist.busy
    assert runlist.reap() == []
    assert runlist.pick() is None


def test_the_most_urgent_goes_first_and_ties_go_by_age() -> None:
    """Smaller urgency first; of equals the one added earlier, through all its layers."""
    runlist = runlist_of(
        Paper("a", 2, (1.0, 5.0)), Paper("b", 2, (0.0, 9.0)), Paper("c", 1, (1.0, 5.0))
    )
    assert list(works(runlist)) == ["b0", "b1", "a0", "a1", "c0"]


def test_an_urgent_flight_overtakes_at_the_next_boundary() -> None:
    """A flight added between two layers of another goes before the rest of it."""
    runlist = runlist_of(Paper("a", 3, (1.0,)))
    assert runlist.pick() is not None
    runlist.add(Paper("b", 1, (0.0,)))
    assert list(works(runlist)) == ["b0", "a1", "a2"]


def test_a_changed_urgency_counts_at_once() -> None:
    """Urgency is read at each boundary."""
    slow, other = Paper("a", 2, (5.0,)), Paper("b", 2, (1.0,))
    runlist = runlist_of(slow, other)
    assert next(works(runlist)) == "b0"
    slow.urgency = (0.0,)
    assert list(works(runlist)) == ["a0", "a1", "b1"]


def test_a_flight_that_may_not_go_on_is_passed_over_and_stays() -> None:
    """A flight without a next layer holds up nobody, and goes on when it may."""
    waiting = Paper("a", 2, (0.0,), allowed=1)
    runlist = runlist_of(waiting, Paper("b", 1, (1.0,)))
    assert list(works(runlist)) == ["a0", "b0"]
    waiting.allowed = 2
    assert list(works(runlist)) == ["a1"]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_stopped_flight_hands_out_nothing_more(others: int) -> None:
    """A stopped flight leaves at the next look; the others go on in the same look."""
    flight = Paper("a", 3, (0.0,))
    runlist = runlist_of(flight, *(Paper(f"o{i}_", 1, (1.0,)) for i in range(others)))
    assert runlist.pick() is not None
    flight.stopped = True
    assert list(works(runlist)) == [f"o{i}_0" for i in range(others)]
    assert flight.handed == 1
    assert flight in runlist.reap()


def test_a_stop_seen_in_the_middle_of_a_look_costs_nobody_a_turn() -> None:
    """A flight stopped by another thread while the runlist looks is passed over like one that waits."""
    victim = Paper("b", 2, (1.0,))

    class Stopper(Paper):
        def next_layer(self) -> tuple[int, str] | None:
            victim.stopped = True
            return None

    runlist = runlist_of(Stopper("a", 1, (0.0,)), victim, Paper("c", 1, (2.0,)))
    assert list(works(runlist)) == ["c0"]
    assert victim in runlist.reap()


def test_sweep_and_drop_take_flights_out_without_handing_out() -> None:
    """`sweep` removes what is stopped, `drop` what failed; neither reports a flight twice."""
    failed, stopped, rest = Paper("a"), Paper("b", stopped=True), Paper("c")
    runlist = runlist_of(failed, stopped, rest)
    runlist.drop(failed)
    runlist.drop(failed)
    runlist.sweep()
    assert runlist.reap() == [failed, stopped]
    assert runlist.flights == [rest]
    assert rest.handed == 0
    assert repr(runlist) == "<Runlist 1 flights, 0 to reap>"


@pytest.mark.parametrize("seed", range(30))
def test_every_pick_is_the_least_of_those_that_may_go(seed: int) -> None:
    """Random flights, waits and stops: each pick is the minimum by (urgency, age), and all layers go."""
    rng = random.Random(seed)
    runlist: Runlist[Paper] = Runlist()
    added: list[Paper] = []
    for _ in range(60):
        if rng.random() < 0.3:
            added.append(Paper(f"f{len(added)}_", rng.randint(1, 4), (float(rng.randint(0, 3)),)))
            runlist.add(added[-1])
        for flight in added:
            flight.allowed = rng.randint(0, 4)
            flight.stopped = flight.stopped or rng.random() < 0.02
        ready = [
            flight
            for flight in added
            if not flight.stopped and flight.handed < min(flight.layers, flight.allowed)
        ]
        picked = runlist.pick()
        best = min(ready, key=lambda flight: flight.urgency, default=None)
        assert (picked and picked[0]) is best
    for flight in added:
        flight.allowed = 1000
    assert all(isinstance(work, str) for work in works(runlist))
    assert sorted(f.name for f in runlist.reap()) == sorted(f.name for f in added)
    assert all(f.stopped or f.exhausted for f in added)


def test_layers_are_handed_out_by_their_numbers() -> None:
    """What `pick` returns is the flight, its layer and its work; until then the flight is to blame."""
    flight = Paper("a", 2, allowed=1)
    runlist = runlist_of(flight)
    assert runlist.pick() == (flight, 0, "a0")
    assert runlist.pick() is None
    assert runlist.asked is flight
    flight.allowed = 2
    assert runlist.pick() == (flight, 1, "a1")
    assert runlist.asked is None
