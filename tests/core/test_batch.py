"""Queues and budgets: who shares a batch, in which order, and how large it becomes."""

from __future__ import annotations

import functools
import operator
import random

import numpy as np
import pytest

from offload.core import batch as batch_module
from offload.core.batch import SWEEP, Batch, Piece, Queue, State, StreamState, share
from offload.core.kinds import Direction
from offload.core.request import PATIENCE, Request, due

BYTES = 30
MANY = 1 << 60


def piece(
    number: int,
    *,
    urgency: float = 0.0,
    route: str = "r",
    pages: int = 1,
    layers: tuple[int, int] = (0, 3),
) -> Piece:
    """Return a piece that follows nobody."""
    ids = np.arange(pages)
    request = Request(
        number, Direction.LOAD, ((0, ids, ids),), route, BYTES * pages, pages, urgency
    )
    return Piece(number, request, *layers, 0)


def take_all(
    queue: Queue, nbytes: int = MANY, ops: int = MANY, requests: int | None = None
) -> list[list[int]]:
    """Take batches until the queue is empty; return their ids."""
    batches = []
    while queue.head() is not None:
        taken = queue.take(nbytes, ops, requests)
        assert taken
        batches.append([each.id for each in taken])
    assert queue.take(nbytes, ops, requests) == []
    return batches


def queue_of(pieces: list[Piece]) -> Queue:
    """Return a queue with these pieces, pushed in order."""
    queue = Queue()
    for each in pieces:
        queue.push(each)
        assert not each.waiting
    return queue


def test_what_shares_a_route_and_layers_is_one_batch_by_urgency() -> None:
    """Pieces of one kind are taken together, the most urgent first and then as submitted."""
    pieces = [piece(n, urgency=u) for n, u in enumerate((5.0, 1.0, 5.0, 0.0))]
    assert take_all(queue_of(pieces)) == [[3, 1, 0, 2]]


def test_routes_layers_and_loners_keep_apart() -> None:
    """Another route, other layers, a piece that follows somebody, or one that failed, is a batch of its own."""
    pieces = [piece(0), piece(1, route="s"), piece(2, layers=(1, 3)), piece(3), piece(4), piece(5)]
    pieces[3].alone = True
    pieces[4].follows = {pieces[0]}
    assert take_all(queue_of(pieces)) == [[0, 5], [1], [2], [3], [4]]


def test_loners_stand_in_one_line() -> None:
    """However many go alone, they are taken one by one, by urgency, and a look at the head asks one heap."""
    pieces = [piece(n, urgency=float(-n % 7)) for n in range(50)]
    for each in pieces:
        each.alone = True
    queue = queue_of(pieces)
    assert len(queue.heaps) == 1
    order = sorted(pieces, key=lambda each: (each.request.due, each.id))
    assert take_all(queue, requests=None) == [[each.id] for each in order]


def test_what_was_cancelled_in_the_queue_is_dropped() -> None:
    """Pieces that nobody wants any more are neither head nor taken."""
    pieces = [piece(n) for n in range(4)]
    queue = queue_of(pieces)
    for each in (pieces[0], pieces[2], piece(7)):
        queue.drop(each)
    head = queue.head()
    assert head is not None
    assert head.id == 1
    assert take_all(queue) == [[1, 3]]


@pytest.mark.parametrize("order", ["as submitted", "backwards", "mixed"])
@pytest.mark.parametrize("kept", [0, 1, 7])
def test_many_that_are_cancelled_are_taken_out_a_few_at_a_time(order: str, kept: int) -> None:
    """Whatever is dropped in whatever order, few places of it stay: no look at the head has many to pass."""
    count = 8 * SWEEP
    pieces = [piece(n, urgency=float(n % 5)) for n in range(count)]
    queue = queue_of(pieces)
    dropped = pieces[kept:]
    if order == "backwards":
        dropped.reverse()
    elif order == "mixed":
        random.Random(1).shuffle(dropped)
    for number, each in enumerate(dropped, 1):
        queue.drop(each)
        queue.drop(each)
        places, left = sum(map(len, queue.heaps.values())), count - number
        assert places - left <= max(SWEEP, left // 8)
    assert sorted(functools.reduce(operator.iadd, take_all(queue), [])) == list(range(kept))
    assert queue.heaps == {}


@pytest.mark.parametrize("seed", range(20))
def test_places_of_nobody_are_swept_before_they_pile_up(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep comes with the first drop, or new place, that makes them more than the bound and an eighth of the rest."""
    monkeypatch.setattr(batch_module, "SWEEP", 3)
    draw = random.Random(seed)
    queue, queued, dropped = Queue(), list[Piece](), 0

    def places() -> int:
        return sum(map(len, queue.heaps.values())) - len(queued)

    for number in range(400):
        act = draw.random()
        if act < 0.55 or not queued:
            queued.append(piece(number, urgency=draw.random(), route=draw.choice("ab")))
            queued[-1].alone = draw.random() < 0.2
            queue.push(queued[-1])
        elif act < 0.95:
            spared = queued[draw.randrange(len(queued))]
            if act < 0.75:
                spared.request.due -= draw.random() + 0.1
                queue.hasten(spared)
            else:
                queued.remove(spared)
                queue.drop(spared)
            dropped += 1
            if dropped > 3 and 8 * dropped > len(queued):
                dropped = 0
            if spared not in queued and draw.random() < 0.5:  # it is not here any more
                queue.drop(spared)
                queue.hasten(spared)
        else:
            taken = queue.take(MANY, MANY, draw.randint(1, 5))
            assert taken
            queued = [each for each in queued if each not in taken]
            dropped = places()
        assert places() == dropped
    rest = sorted(queued, key=lambda each: (each.request.due, each.id))
    assert [number for batch in take_all(queue, requests=1) for number in batch] == [
        each.id for each in rest
    ]


@pytest.mark.parametrize("seed", range(50))
def test_batches_keep_to_every_budget(seed: int) -> None:
    """No batch exceeds bytes, pages or requests unless one piece alone does; all are taken once, in order."""
    draw = random.Random(seed)
    pieces = [
        piece(n, urgency=float(draw.randrange(3)), pages=draw.randint(1, 6)) for n in range(20)
    ]
    nbytes, ops = BYTES * draw.randint(1, 9), draw.randint(1, 9)
    requests = draw.choice((None, 1, 3))
    batches = take_all(queue_of(pieces), nbytes, ops, requests)
    assert functools.reduce(operator.iadd, batches, []) == [
        p.id for p in sorted(pieces, key=lambda p: (p.request.due, p.id))
    ]
    for batch in batches:
        taken = [pieces[n].request for n in batch]
        if len(taken) > 1:
            assert sum(r.nbytes for r in taken) <= nbytes
            assert sum(r.num_pages for r in taken) <= ops
            assert requests is None or len(taken) <= requests


def test_a_layer_of_a_streaming_backup_counts_its_share() -> None:
    """A layer counts its part of the request's bytes; a whole request counts all."""
    owner = piece(0)
    layer = Piece(1, owner.request, 1, 2, 0, parent=owner)
    assert (share(owner), share(layer)) == (BYTES, BYTES // 3)


@pytest.mark.parametrize("state", State)
def test_a_request_is_unissued_while_it_is_queued(state: State) -> None:
    """An ordinary request has something to issue in its first state and in no other."""
    request = piece(0)
    request.state = state
    assert request.unissued is (state is State.QUEUED)


@pytest.mark.parametrize("written", [0, 1, 2, 3])
@pytest.mark.parametrize("queued", [0, 1])
@pytest.mark.parametrize("flying", [0, 1])
def test_a_streaming_backup_is_unissued_while_a_layer_is(
    written: int, queued: int, flying: int
) -> None:
    """It has something to issue until every layer is written, and none of those waits for its batch."""
    owner = piece(0)
    owner.state = State.ISSUED
    owner.stream = StreamState(written=set(range(written)))
    for number in range(queued + flying):
        layer = Piece(number + 1, owner.request, number, number + 1, 0, parent=owner)
        if number >= queued:
            layer.batch = Batch(1, Direction.LOAD, "r", [layer], 0, 1, 1, BYTES, 0.0, 0)
        owner.stream.pieces.add(layer)
    assert owner.unissued is (written < 3 or queued > 0)


def test_the_prefix_of_landed_layers_has_no_gap() -> None:
    """Layers that land out of order count once those before them are there."""
    stream = StreamState()
    for layer, prefix in ((2, 0), (0, 1), (3, 1), (1, 4)):
        stream.land(layer)
        assert stream.prefix == prefix


def test_an_end_counts_layers_that_landed_in_any_order() -> None:
    """Who reads what a backup left is told how many of its layers are there, with or without a gap before."""
    owner = piece(7)
    owner.stream = StreamState()
    owner.stream.land(2)
    assert owner.end() == "load 7, which was cancelled when 1 of 3 layers had landed"
    owner.error = ValueError("no")
    owner.stream.land(0)
    assert owner.end() == "load 7, which failed (ValueError('no')) when 2 of 3 layers had landed"


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ((0, 1, None), (0, 0, None)),
        ((0, 0, 5.0), (0, 0, None)),
        ((0, 1, None), (0, 0, 0.1)),
        ((0, 0, None), (PATIENCE + 0.1, 1, None)),
        ((0, 0, None), (0.1, 0, None)),
        ((0, 0, None), (0, 0, PATIENCE + 1)),
    ],
)
def test_due_orders_by_priority_then_deadline_and_age_beats_both(
    earlier: tuple[float, float, float | None], later: tuple[float, float, float | None]
) -> None:
    """Given (submitted, priority, deadline), the first of each pair does not go after the second."""
    assert due(*earlier) <= due(*later)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((5.0, 0.0, None), 5.0 + PATIENCE),
        ((5.0, 2.0, None), 5.0 - PATIENCE),
        ((5.0, 0.0, 6.0), 6.0),
        ((5.0, 0.0, 500.0), 5.0 + PATIENCE),
        ((5.0, 0.5, 6.0), 6.0 - PATIENCE / 2),
    ],
)
def test_due_is_the_nearer_of_deadline_and_patience(
    given: tuple[float, float, float | None], expected: float
) -> None:
    """A request is due at its deadline or a patience after submit, a patience earlier per priority."""
    assert due(*given) == expected


def test_what_has_become_more_urgent_is_taken_earlier_and_once() -> None:
    """Its new place counts, its old one does not; what is not queued, or no more, gets none."""
    pieces = [piece(n, urgency=float(n), route="rs"[n % 2]) for n in range(4)]
    queue = queue_of(pieces)
    pieces[3].request.due = -1.0
    queue.hasten(pieces[3])
    assert queue.head() is pieces[3]
    queue.drop(pieces[2])
    for gone in (pieces[2], piece(9)):
        queue.hasten(gone)
    assert take_all(queue) == [[3, 1], [0]]
    assert queue.heaps == {}


def test_the_old_place_of_one_that_comes_back_is_nobodys() -> None:
    """A piece that was hastened, taken, and queued again alone, is taken from its own place only."""
    pieces = [piece(0, urgency=1.0), piece(1, urgency=5.0), piece(2, urgency=9.0)]
    queue = queue_of(pieces)
    pieces[1].request.due = 0.0
    queue.hasten(pieces[1])
    assert queue.take(MANY, MANY, 1) == [pieces[1]]
    pieces[1].alone = True
    pieces[1].request.due = -1.0  # somebody even more urgent
    queue.push(pieces[1])
    assert take_all(queue) == [[1], [0, 2]]


@pytest.mark.parametrize("steps", [1, 8 * SWEEP])
def test_places_of_the_hastened_are_swept_before_they_pile_up(steps: int) -> None:
    """However often pieces become more urgent, few old places stay, and the order is that of the new ones."""
    pieces = [piece(n, urgency=0.0) for n in range(10)]
    queue = queue_of(pieces)
    for step in range(steps):
        one = pieces[step * 7 % 10]
        one.request.due = -1.0 - step
        queue.hasten(one)
        assert sum(map(len, queue.heaps.values())) <= len(pieces) + SWEEP + 1
    order = sorted(pieces, key=lambda each: (each.request.due, each.id))
    assert take_all(queue) == [[each.id for each in order]]
    assert queue.heaps == {}
    assert queue._dropped == 0
