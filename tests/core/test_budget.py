"""What is queued and what is in the air, against the limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offload.core.batch import Batch, Limits, Piece, Queue, share
from offload.core.budget import UNBOUNDED, Budget
from offload.core.kinds import Direction
from offload.core.request import Request
from offload.errors import RequestError


def piece(nbytes: int = 10, *, parent: Piece | None = None) -> Piece:
    """Return a load of one page over four layers, or one layer of a backup."""
    ids = np.zeros(1, np.int64)
    request = Request(1, Direction.LOAD, ((0, ids, ids),), None, nbytes, 1, 0.0)
    return Piece(1, request, 0, 4 if parent is None else 1, 0, parent=parent)


def batch(nbytes: int, count: int = 1) -> Batch:
    """Return a batch of so many pieces and bytes."""
    pieces = [piece() for _ in range(count)]
    return Batch(1, Direction.LOAD, None, pieces, 0, 4, 4, nbytes, 0.0, 0)


def in_air(nbytes: int, requests: int, **limits: int | None) -> Budget:
    """Return a budget with so much in the air."""
    budget = Budget(Limits(**limits))
    budget.inflight_bytes, budget.inflight_requests = nbytes, requests
    return budget


NO_BUDGET: dict[str, int | None] = {
    "max_batch_bytes": None,
    "max_batch_ops": None,
    "max_batch_requests": None,
}


def test_queued_requests_are_counted_once() -> None:
    """A request counts from submit until it leaves the queue; one that goes on alone was counted before."""
    budget, one, other = Budget(Limits()), piece(10), piece(7)
    budget.queue(one.request)
    budget.queue(other.request)
    assert (budget.queued_bytes, budget.queued_requests) == (17, 2)
    budget.dequeue(one)
    assert (budget.queued_bytes, budget.queued_requests) == (7, 1)
    one.alone = True
    budget.dequeue(one)
    assert (budget.queued_bytes, budget.queued_requests) == (7, 1)


def test_batches_are_counted_until_they_close() -> None:
    """Bytes and requests of a batch count from its issue until it has landed or drained."""
    budget, up = Budget(Limits()), batch(30, 3)
    budget.issue(batch(5))
    budget.issue(up)
    assert (budget.inflight_bytes, budget.inflight_requests) == (35, 4)
    budget.close(up)
    assert up.closed
    assert (budget.inflight_bytes, budget.inflight_requests) == (5, 1)


@pytest.mark.parametrize(
    ("limits", "bounded"),
    [
        ({}, False),
        ({"max_inflight_bytes": 9}, True),
        ({"max_inflight_requests": 9}, True),
        ({"max_queued_bytes": 9, "max_batch_ops": 9}, False),
    ],
)
def test_bounds_in_flight_are_known(limits: dict[str, Any], bounded: bool) -> None:
    """A bound on bytes or on requests in flight makes it bounded; other limits do not."""
    assert Budget(Limits(**limits)).bounded is bounded


@pytest.mark.parametrize(
    ("budget", "room"),
    [
        (in_air(1000, 1000), True),
        (in_air(90, 1, max_inflight_bytes=100), True),
        (in_air(91, 1, max_inflight_bytes=100), False),
        (in_air(0, 0, max_inflight_bytes=5), True),
        (in_air(1, 1, max_inflight_bytes=5), False),
        (in_air(0, 2, max_inflight_requests=3), True),
        (in_air(0, 3, max_inflight_requests=3), False),
        (in_air(99, 1, max_inflight_bytes=100, max_inflight_requests=9), False),
    ],
)
def test_there_is_room_up_to_the_bound(budget: Budget, room: bool) -> None:
    """What fills the bound exactly may go, what exceeds it waits, and with nothing in the air all may go."""
    assert budget.has_room(piece(10)) is room


def test_a_layer_counts_with_its_share() -> None:
    """One layer of a streaming backup needs room for a fourth of its request's bytes."""
    owner = piece(40)
    assert in_air(90, 1, max_inflight_bytes=100).has_room(piece(40, parent=owner))
    assert not in_air(91, 1, max_inflight_bytes=100).has_room(piece(40, parent=owner))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (in_air(7, 2, max_batch_bytes=50, max_batch_ops=6, max_batch_requests=4), (50, 6, 4)),
        (in_air(7, 2, **NO_BUDGET), (UNBOUNDED, UNBOUNDED, None)),
        (in_air(70, 2, max_inflight_bytes=100, **NO_BUDGET), (30, UNBOUNDED, None)),
        (in_air(70, 2, max_inflight_bytes=100, max_batch_bytes=20), (20, 65_536, 1024)),
        (in_air(200, 2, max_inflight_bytes=100), (1, 65_536, 1024)),
        (in_air(7, 2, max_inflight_requests=5, **NO_BUDGET), (UNBOUNDED, UNBOUNDED, 3)),
        (in_air(7, 2, max_inflight_requests=5, max_batch_requests=4), (256 << 20, 65_536, 3)),
        (in_air(7, 2, max_inflight_requests=9, max_batch_requests=4), (256 << 20, 65_536, 4)),
    ],
)
def test_a_batch_gets_its_own_budget_and_what_is_left(
    budget: Budget, expected: tuple[int, int, int | None]
) -> None:
    """Bytes and ops of one batch, cut to what may still be in flight, and never to nothing."""
    assert budget.of_batch() == expected


def test_layers_of_backups_fill_a_batch_by_their_shares() -> None:
    """Of a request of 43 bytes over four layers one layer counts 10, in whole bytes."""
    owner = piece(43)
    assert share(piece(43, parent=owner)) == 10
    assert isinstance(share(piece(43, parent=owner)), int)
    assert share(owner) == 43
    queue = Queue()
    layers = [Piece(n, owner.request, 0, 1, 0, parent=owner) for n in range(5)]
    for each in layers:
        queue.push(each)
    assert queue.take(29, UNBOUNDED, None) == layers[:2]
    assert queue.take(30, UNBOUNDED, None) == layers[2:]


@pytest.mark.parametrize("wrong", [0, -3, 1.5, "8"])
def test_a_limit_that_is_none_is_refused_in_full(wrong: object) -> None:
    """The error names the limit, the value, and what it may be."""
    with pytest.raises(RequestError) as caught:
        Limits(max_batch_ops=wrong)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"Limits.max_batch_ops is {wrong!r}; it must be an integer from 1 up, or None"
    )
    assert caught.value.value == wrong
