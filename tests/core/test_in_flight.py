"""What goes up next: the order of directions, and when enough is in the air."""

from __future__ import annotations

import numpy as np
import pytest

from offload.core.batch import Batch, Limits, Piece
from offload.core.budget import Budget
from offload.core.in_flight import MAX_FLIGHTS, InFlight
from offload.core.kinds import Direction
from offload.core.request import PATIENCE, Request
from offload.errors import InvalidTransitionError

LOAD, BACKUP = Direction.LOAD, Direction.BACKUP


def piece(number: int, direction: Direction = LOAD, due: float = 0.0) -> Piece:
    """Return a piece of four layers on a route of its own: it shares no batch."""
    ids = np.zeros(1, np.int64)
    request = Request(number, direction, ((0, ids, ids),), number, 10, 1, due)
    return Piece(number, request, 0, 4, 0)


def in_flight_with(
    count: int, direction: Direction = LOAD, due: float = 0.0
) -> tuple[InFlight, list[Batch]]:
    """Return so many batches in flight, each free to go to its end."""
    in_flight = InFlight(Budget(Limits()))
    batches = []
    for number in range(count):
        in_flight.push(piece(number, direction, due))
        batches += up(in_flight)
    return in_flight, batches


def up(in_flight: InFlight, limit: int = 4) -> list[Batch]:
    """Flush, and note what went up."""
    batches = []
    for batch in in_flight.flush(lambda _: limit):
        for each in batch.pieces:
            each.batch = batch
        batches.append(batch)
    return batches


def test_batches_are_numbered_and_found() -> None:
    """A batch is in the air from its flush until it ends, and then no more."""
    in_flight, batches = in_flight_with(2)
    assert [batch.id for batch in batches] == [1, 2]
    assert in_flight.batch(2) is batches[1]
    assert in_flight.end(2) is batches[1]
    assert in_flight
    assert in_flight.end(1) is batches[0]
    assert not in_flight
    with pytest.raises(InvalidTransitionError, match="batch 2"):
        in_flight.batch(2)


def test_a_batch_is_what_its_most_urgent_piece_says() -> None:
    """Layers, limit, bytes and urgency of a batch are those of its pieces."""
    in_flight = InFlight(Budget(Limits()))
    ids = np.zeros(1, np.int64)
    pieces = [Piece(n, Request(n, LOAD, ((0, ids, ids),), "r", 10, 1, -n), 1, 4, 0) for n in (1, 2)]
    for each in pieces:
        in_flight.push(each)
    (batch,) = up(in_flight, 3)
    assert batch.pieces == pieces[::-1]
    assert (batch.first, batch.last, batch.limit, batch.landed) == (1, 4, 3, 1)
    assert (batch.nbytes, batch.due, batch.route, batch.direction) == (20, -2, "r", LOAD)
    assert in_flight.budget.inflight_bytes == 20


@pytest.mark.parametrize(
    ("ahead", "order"),
    [(0.0, [LOAD, BACKUP]), (PATIENCE, [LOAD, BACKUP]), (PATIENCE + 1e-6, [BACKUP, LOAD])],
)
def test_loads_go_first_unless_a_backup_is_late(ahead: float, order: list[Direction]) -> None:
    """A backup goes before a load when it is due more than a patience before it."""
    in_flight = InFlight(Budget(Limits()))
    in_flight.push(piece(1, BACKUP, due=100.0))
    in_flight.push(piece(2, LOAD, due=100.0 + ahead))
    assert [batch.direction for batch in up(in_flight)] == order


@pytest.mark.parametrize("direction", Direction)
def test_one_direction_alone_goes_up(direction: Direction) -> None:
    """With only one direction queued, one batch goes up, and then there is nothing to flush."""
    in_flight = InFlight(Budget(Limits()))
    assert not in_flight.flushable()
    assert up(in_flight) == []
    in_flight.push(piece(1, direction))
    assert in_flight.flushable()
    assert [batch.direction for batch in up(in_flight)] == [direction]
    assert not in_flight.flushable()


def test_the_second_waits_where_the_first_took_the_room() -> None:
    """With room for one request, the load goes up and the backup stays."""
    in_flight = InFlight(Budget(Limits(max_inflight_requests=1)))
    in_flight.push(piece(1, BACKUP))
    in_flight.push(piece(2, LOAD))
    assert [batch.direction for batch in up(in_flight)] == [LOAD]
    assert up(in_flight) == []


def test_enough_in_the_air_keeps_the_next_in_the_queue() -> None:
    """Behind `MAX_FLIGHTS` batches as urgent as itself, a batch waits; one fewer, and it goes."""
    in_flight, _ = in_flight_with(MAX_FLIGHTS - 1)
    in_flight.push(piece(90))
    assert len(up(in_flight)) == 1
    in_flight.push(piece(91))
    assert up(in_flight) == []


def test_a_more_urgent_batch_goes_all_the_same() -> None:
    """A batch that is due before all in the air goes up; one that is due as late as the earliest waits."""
    in_flight, _ = in_flight_with(MAX_FLIGHTS, due=5.0)
    in_flight.push(piece(90, due=5.0))
    assert up(in_flight) == []
    in_flight.push(piece(91, due=4.0))
    assert [batch.pieces[0].id for batch in up(in_flight)] == [91]


@pytest.mark.parametrize("spoil", ["closed", "held back", "the other way"])
def test_only_what_keeps_the_stream_busy_counts(spoil: str) -> None:
    """Batches that have landed, wait for others, or go the other way do not keep a batch in the queue."""
    in_flight, batches = in_flight_with(MAX_FLIGHTS, BACKUP if spoil == "the other way" else LOAD)
    if spoil == "closed":
        batches[3].closed = True
    elif spoil == "held back":
        batches[3].limit = 2
    in_flight.push(piece(90))
    assert len(up(in_flight)) == 1
