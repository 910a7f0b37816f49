"""What goes up next: the order of directions, and when enough is in the air."""

from __future__ import annotations

import numpy as np
import pytest

from offload.core.air import MAX_FLIGHTS, Air
from offload.core.batch import Batch, Limits, Piece
from offload.core.budget import Budget
from offload.core.kinds import Direction
from offload.core.request import PATIENCE, Request
from offload.errors import InvalidTransitionError

LOAD, BACKUP = Direction.LOAD, Direction.BACKUP


def piece(number: int, direction: Direction = LOAD, due: float = 0.0) -> Piece:
    """Return a piece of four layers on a route of its own: it shares no batch."""
    ids = np.zeros(1, np.int64)
    request = Request(number, direction, ((0, ids, ids),), number, 10, 1, due)
    return Piece(number, request, 0, 4, 0)


def air_with(count: int, direction: Direction = LOAD, due: float = 0.0) -> tuple[Air, list[Batch]]:
    """Return an air with so many batches up, each free to go."""
    air = Air(Budget(Limits()))
    batches = []
    for number in range(count):
        air.push(piece(number, direction, due))
        batches += up(air)
    return air, batches


def up(air: Air, limit: int = 4) -> list[Batch]:
    """Flush, and note what went up."""
    batches = []
    for batch in air.flush(lambda _: limit):
        for each in batch.pieces:
            each.batch = batch
        batches.append(batch)
    return batches


def test_batches_are_numbered_and_found() -> None:
    """A batch is in the air from its flush until it ends, and then no more."""
    air, batches = air_with(2)
    assert [batch.id for batch in batches] == [1, 2]
    assert air.batch(2) is batches[1]
    assert air.end(2) is batches[1]
    assert air
    assert air.end(1) is batches[0]
    assert not air
    with pytest.raises(InvalidTransitionError, match="batch 2"):
        air.batch(2)


def test_a_batch_is_what_its_most_urgent_piece_says() -> None:
    """Layers, limit, bytes and urgency of a batch are those of its pieces."""
    air = Air(Budget(Limits()))
    ids = np.zeros(1, np.int64)
    pieces = [Piece(n, Request(n, LOAD, ((0, ids, ids),), "r", 10, 1, -n), 1, 4, 0) for n in (1, 2)]
    for each in pieces:
        air.push(each)
    (batch,) = up(air, 3)
    assert batch.pieces == pieces[::-1]
    assert (batch.first, batch.last, batch.limit, batch.landed) == (1, 4, 3, 1)
    assert (batch.nbytes, batch.due, batch.route, batch.direction) == (20, -2, "r", LOAD)
    assert air.budget.inflight_bytes == 20


@pytest.mark.parametrize(
    ("ahead", "order"),
    [(0.0, [LOAD, BACKUP]), (PATIENCE, [LOAD, BACKUP]), (PATIENCE + 1e-6, [BACKUP, LOAD])],
)
def test_loads_go_first_unless_a_backup_is_late(ahead: float, order: list[Direction]) -> None:
    """A backup goes before a load when it is due more than a patience before it."""
    air = Air(Budget(Limits()))
    air.push(piece(1, BACKUP, due=100.0))
    air.push(piece(2, LOAD, due=100.0 + ahead))
    assert [batch.direction for batch in up(air)] == order


@pytest.mark.parametrize("direction", Direction)
def test_one_direction_alone_goes_up(direction: Direction) -> None:
    """With only one direction queued, one batch goes up, and then there is nothing to flush."""
    air = Air(Budget(Limits()))
    assert not air.flushable()
    assert up(air) == []
    air.push(piece(1, direction))
    assert air.flushable()
    assert [batch.direction for batch in up(air)] == [direction]
    assert not air.flushable()


def test_the_second_waits_where_the_first_took_the_room() -> None:
    """With room for one request, the load goes up and the backup stays."""
    air = Air(Budget(Limits(max_inflight_requests=1)))
    air.push(piece(1, BACKUP))
    air.push(piece(2, LOAD))
    assert [batch.direction for batch in up(air)] == [LOAD]
    assert up(air) == []


def test_enough_in_the_air_keeps_the_next_in_the_queue() -> None:
    """Behind `MAX_FLIGHTS` batches as urgent as itself, a batch waits; one fewer, and it goes."""
    air, _ = air_with(MAX_FLIGHTS - 1)
    air.push(piece(90))
    assert len(up(air)) == 1
    air.push(piece(91))
    assert up(air) == []


def test_a_more_urgent_batch_goes_all_the_same() -> None:
    """A batch that is due before all in the air goes up; one that is due as late as the earliest waits."""
    air, _ = air_with(MAX_FLIGHTS, due=5.0)
    air.push(piece(90, due=5.0))
    assert up(air) == []
    air.push(piece(91, due=4.0))
    assert [batch.pieces[0].id for batch in up(air)] == [91]


@pytest.mark.parametrize("spoil", ["closed", "held back", "the other way"])
def test_only_what_keeps_the_stream_busy_counts(spoil: str) -> None:
    """Batches that have landed, wait for others, or go the other way do not keep a batch in the queue."""
    air, batches = air_with(MAX_FLIGHTS, BACKUP if spoil == "the other way" else LOAD)
    if spoil == "closed":
        batches[3].closed = True
    elif spoil == "held back":
        batches[3].limit = 2
    air.push(piece(90))
    assert len(up(air)) == 1
