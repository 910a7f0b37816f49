"""Which flight goes next on a stream."""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs
import pytest

from offload.core.lane import Lane


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


def works(lane: Lane[Paper]) -> Iterator[object]:
    """Pick until nothing is handed out."""
    while (picked := lane.pick()) is not None:
        yield picked[2]


def lane_of(*flights: Paper) -> Lane[Paper]:
    lane: Lane[Paper] = Lane()
    for flight in flights:
        lane.add(flight)
    return lane


def test_an_empty_lane_picks_nothing() -> None:
    """A lane without flights hands out nothing, and has nothing to reap."""
    lane = lane_of()
    assert lane.pick() is None
    assert lane.reap() == []
    assert not lane.busy


def test_one_flight_goes_in_layer_order_and_leaves_once() -> None:
    """A flight alone hands out its layers in order; with the last it leaves, and is reaped once."""
    flight = Paper("a")
    lane = lane_of(flight)
    assert lane.busy
    assert list(works(lane)) == ["a0", "a1", "a2"]
    assert lane.busy  # it is still to be reaped
    assert lane.reap() == [flight]
    assert not lane.busy
    assert lane.reap() == []
    assert lane.pick() is None


def test_the_most_urgent_goes_first_and_ties_go_by_age() -> None:
    """Smaller urgency first; of equals the one added earlier, through all its layers."""
    lane = lane_of(Paper("a", 2, (1.0, 5.0)), Paper("b", 2, (0.0, 9.0)), Paper("c", 1, (1.0, 5.0)))
    assert list(works(lane)) == ["b0", "b1", "a0", "a1", "c0"]


def test_an_urgent_flight_overtakes_at_the_next_boundary() -> None:
    """A flight added between two layers of another goes before the rest of it."""
    lane = lane_of(Paper("a", 3, (1.0,)))
    assert lane.pick() is not None
    lane.add(Paper("b", 1, (0.0,)))
    assert list(works(lane)) == ["b0", "a1", "a2"]


def test_a_changed_urgency_counts_at_once() -> None:
    """Urgency is read at each boundary."""
    slow, other = Paper("a", 2, (5.0,)), Paper("b", 2, (1.0,))
    lane = lane_of(slow, other)
    assert next(works(lane)) == "b0"
    slow.urgency = (0.0,)
    assert list(works(lane)) == ["a0", "a1", "b1"]


def test_a_flight_that_may_not_go_on_is_passed_over_and_stays() -> None:
    """A flight without a next layer holds up nobody, and goes on when it may."""
    waiting = Paper("a", 2, (0.0,), allowed=1)
    lane = lane_of(waiting, Paper("b", 1, (1.0,)))
    assert list(works(lane)) == ["a0", "b0"]
    waiting.allowed = 2
    assert list(works(lane)) == ["a1"]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_stopped_flight_hands_out_nothing_more(others: int) -> None:
    """A stopped flight leaves at the next look; the others go on in the same look."""
    flight = Paper("a", 3, (0.0,))
    lane = lane_of(flight, *(Paper(f"o{i}_", 1, (1.0,)) for i in range(others)))
    assert lane.pick() is not None
    flight.stopped = True
    assert list(works(lane)) == [f"o{i}_0" for i in range(others)]
    assert flight.handed == 1
    assert flight in lane.reap()


def test_a_stop_seen_in_the_middle_of_a_look_costs_nobody_a_turn() -> None:
    """A flight stopped by another thread while the lane looks is passed over like one that waits."""
    victim = Paper("b", 2, (1.0,))

    class Stopper(Paper):
        def next_layer(self) -> tuple[int, str] | None:
            victim.stopped = True
            return None

    lane = lane_of(Stopper("a", 1, (0.0,)), victim, Paper("c", 1, (2.0,)))
    assert list(works(lane)) == ["c0"]
    assert victim in lane.reap()


def test_sweep_and_drop_take_flights_out_without_handing_out() -> None:
    """`sweep` removes what is stopped, `drop` what failed; neither reports a flight twice."""
    failed, stopped, rest = Paper("a"), Paper("b", stopped=True), Paper("c")
    lane = lane_of(failed, stopped, rest)
    lane.drop(failed)
    lane.drop(failed)
    lane.sweep()
    assert lane.reap() == [failed, stopped]
    assert lane.flights == [rest]
    assert rest.handed == 0
    assert repr(lane) == "<Lane 1 flights, 0 to reap>"


@pytest.mark.parametrize("seed", range(30))
def test_every_pick_is_the_least_of_those_that_may_go(seed: int) -> None:
    """Random flights, waits and stops: each pick is the minimum by (urgency, age), and all layers go."""
    rng = random.Random(seed)
    lane: Lane[Paper] = Lane()
    added: list[Paper] = []
    for _ in range(60):
        if rng.random() < 0.3:
            added.append(Paper(f"f{len(added)}_", rng.randint(1, 4), (float(rng.randint(0, 3)),)))
            lane.add(added[-1])
        for flight in added:
            flight.allowed = rng.randint(0, 4)
            flight.stopped = flight.stopped or rng.random() < 0.02
        ready = [
            flight
            for flight in added
            if not flight.stopped and flight.handed < min(flight.layers, flight.allowed)
        ]
        picked = lane.pick()
        best = min(ready, key=lambda flight: flight.urgency, default=None)
        assert (picked and picked[0]) is best
    for flight in added:
        flight.allowed = 1000
    assert all(isinstance(work, str) for work in works(lane))
    assert sorted(f.name for f in lane.reap()) == sorted(f.name for f in added)
    assert all(f.stopped or f.exhausted for f in added)


def test_layers_are_handed_out_by_their_numbers() -> None:
    """What `pick` returns is the flight, its layer and its work; until then the flight is to blame."""
    flight = Paper("a", 2, allowed=1)
    lane = lane_of(flight)
    assert lane.pick() == (flight, 0, "a0")
    assert lane.pick() is None
    assert lane.asked is flight
    flight.allowed = 2
    assert lane.pick() == (flight, 1, "a1")
    assert lane.asked is None
