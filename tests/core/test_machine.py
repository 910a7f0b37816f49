"""The machine by event lists: what it answers, what it refuses, and what holds under any order of events."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from offload.core import chains
from offload.core.batch import Batch, Limits, State
from offload.core.events import (
    Cancel,
    Command,
    Ended,
    Event,
    Extend,
    Failed,
    Flush,
    Issue,
    Landed,
    Reorder,
    Settle,
    SettleLayer,
    Stop,
    Unblock,
    Unlock,
    Watch,
    Written,
)
from offload.core.hazards import HazardTable
from offload.core.in_flight import MAX_FLIGHTS
from offload.core.kinds import Direction
from offload.core.machine import Machine
from offload.core.request import PATIENCE, Request, due
from offload.core.transitions import TRANSITIONS, move
from offload.errors import InvalidTransitionError, RequestError

LAYERS = 3
PAGES = 20
BYTES = 30
"""Of one page over all layers."""


def told(command: Command) -> tuple[object, ...]:
    """Return a command as a row that reads well and compares by value."""
    match command:
        case Issue(batch):
            return ("issue", batch.id, [piece.id for piece in batch.pieces], batch.limit)
        case Extend(batch):
            return ("extend", batch.id, batch.limit)
        case Reorder(batch):
            return ("reorder", batch.id)
        case Stop(batch):
            return ("stop", batch.id)
        case Watch(batch):
            return ("watch", batch.id)
        case SettleLayer(batch):
            return ("layer", batch.id, batch.landed)
        case Settle(piece, state):
            return ("settle", piece.id, str(state))
        case Unlock(piece):
            return ("unlock", piece.id)


class Rig:
    """A machine over one pair of pools, driven by short calls."""

    def __init__(self, limits: Limits | None = None, layers: int = LAYERS) -> None:
        self.host, self.device = HazardTable(PAGES), HazardTable(PAGES)
        self.layers = layers
        self.machine = Machine(layers, [(self.host, self.device)], limits or Limits())
        self.batches: dict[int, Batch] = {}
        self.settled: dict[int, State] = {}
        self.causes: dict[int, str] = {}
        self.errors: dict[int, BaseException | None] = {}
        self.unlocked: list[int] = []
        self.submitted: list[int] = []

    def do(self, event: Event) -> list[tuple[object, ...]]:
        """Handle an event and return its commands as rows, `watch` left out: nobody reports here."""
        rows = []
        for command in self.machine.handle(event):
            match command:
                case Issue(batch):
                    assert batch.id not in self.batches
                    self.batches[batch.id] = batch
                case Settle(piece, state):
                    assert piece.id not in self.settled, "settled twice"
                    self.settled[piece.id] = state
                    self.causes[piece.id] = str(piece.error)
                    self.errors[piece.id] = piece.error
                case Unlock(piece):
                    assert piece.id not in self.unlocked, "unlocked twice"
                    self.unlocked.append(piece.id)
            if not isinstance(command, Watch):
                rows.append(told(command))
        return rows

    def request(
        self,
        direction: Direction,
        host: Sequence[int],
        device: Sequence[int],
        *,
        due: float = 0.0,
        streaming: bool = False,
        blockers: int = 0,
        route: str = "r",
    ) -> Request:
        """Return a request with the next id."""
        part = (0, np.array(host, np.int64), np.array(device, np.int64))
        return Request(
            id=self.machine.new_id(),
            direction=direction,
            parts=(part,),
            route=route,
            nbytes=BYTES * len(host),
            num_pages=len(host),
            due=due,
            streaming=streaming,
            blockers=blockers,
        )

    def submit(self, request: Request) -> int:
        assert self.do(request) == []
        self.submitted.append(request.id)
        return request.id

    def load(self, host: Sequence[int], device: Sequence[int], **more: object) -> int:
        """Submit a load; return its id."""
        return self.submit(self.request(Direction.LOAD, host, device, **more))  # type: ignore[arg-type]

    def backup(self, device: Sequence[int], host: Sequence[int], **more: object) -> int:
        """Submit a backup; return its id."""
        return self.submit(self.request(Direction.BACKUP, host, device, **more))  # type: ignore[arg-type]

    def written(self, request: int, layer: int, blockers: int = 0) -> int:
        """Say that a layer is written; return the id of its piece."""
        piece = self.machine.new_id()
        assert self.do(Written(request, layer, piece, blockers)) == []
        return piece

    def finish(self) -> None:
        """Land everything that goes, then check what must hold at the end of every test."""
        for _ in range(10_000):
            self.do(Flush())
            if not self.batches and not self.machine.flushable():
                break
            for number, batch in list(self.batches.items()):
                if not batch.failed and batch.limit > batch.landed:
                    self.do(Landed(number, batch.limit))
                wanted = any(p.owner.state in ("queued", "issued") for p in batch.pieces)
                if batch.landed == batch.last or batch.failed or not wanted:
                    del self.batches[number]
                    self.do(Ended(number))
        self.check_quiet()

    def check_quiet(self) -> None:
        """Check that nothing is left: the invariants of the end."""
        machine = self.machine
        assert not machine.pending()
        assert sorted(self.settled) == sorted(self.submitted)
        assert sorted(self.unlocked) == sorted(self.submitted)
        assert (machine.budget.queued_bytes, machine.budget.queued_requests) == (0, 0)
        assert (machine.budget.inflight_bytes, machine.budget.inflight_requests) == (0, 0)
        every = np.arange(PAGES)
        assert not self.host.busy(every)
        assert not self.device.busy(every)
        assert machine.live() == []


def state_of(rig: Rig, request: int) -> State:
    piece = rig.machine.find(request)
    assert piece is not None
    return piece.state


# One request ---------------------------------------------------------------------------------------


def test_a_request_is_issued_by_the_flush_and_settles_with_its_last_layer() -> None:
    """Submit commands nothing; a flush issues; layers settle; the last one settles and unlocks all."""
    rig = Rig()
    a = rig.load([0, 1], [2, 3])
    assert (rig.machine.budget.queued_bytes, rig.machine.budget.queued_requests) == (2 * BYTES, 1)
    assert rig.machine.flushable()
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    assert not rig.machine.flushable()
    assert (rig.machine.budget.queued_bytes, rig.machine.budget.inflight_bytes) == (0, 2 * BYTES)
    assert rig.do(Landed(1, 1)) == [("layer", 1, 1)]
    assert rig.do(Landed(1, 1)) == []
    assert rig.do(Landed(1, 3)) == [("layer", 1, 3), ("settle", a, "done"), ("unlock", a)]
    assert rig.machine.budget.inflight_bytes == 0
    assert rig.machine.pending()
    assert rig.do(Ended(1)) == []
    rig.batches.clear()
    rig.check_quiet()


def test_a_flush_of_nothing_is_nothing() -> None:
    """A flush with an empty queue commands nothing."""
    rig = Rig()
    assert not rig.machine.flushable()
    assert rig.do(Flush()) == []


@pytest.mark.parametrize("direction", Direction)
def test_a_flush_is_worth_a_try_while_something_is_queued(direction: Direction) -> None:
    """Whatever the direction: from the submit to the flush, and not while nothing is there or all is in the air."""
    rig = Rig()
    seen = [rig.machine.waiting()]
    rig.submit(rig.request(direction, [0], [0]))
    seen.append(rig.machine.waiting())
    rig.do(Flush())
    seen.append(rig.machine.waiting())
    assert seen == [False, True, False]


def test_requests_of_one_turn_are_one_batch() -> None:
    """Requests of one direction and route that follow nobody are issued together, in order of submission."""
    rig = Rig()
    ids = [rig.load([n], [n]) for n in range(4)]
    assert rig.do(Flush()) == [("issue", 1, ids, 3)]
    rig.finish()


def test_one_flush_issues_one_batch_of_each_direction_loads_first() -> None:
    """A load and a backup that were queued together are issued by one flush, the load first."""
    rig = Rig()
    b = rig.backup([0], [0])
    a = rig.load([5], [5])
    assert rig.do(Flush()) == [("issue", 1, [a], 3), ("issue", 2, [b], 3)]
    rig.finish()


def test_cancel_in_the_queue_settles_and_unlocks_at_once() -> None:
    """A queued request that is cancelled moves no byte and frees its pages at once."""
    rig = Rig()
    a, b = rig.load([0], [0]), rig.load([1], [1])
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled"), ("unlock", a)]
    assert rig.do(Cancel(a)) == []
    assert rig.do(Flush()) == [("issue", 1, [b], 3)]
    rig.finish()


def test_deadline_in_the_queue_fails() -> None:
    """A queued request whose deadline passes fails and frees its pages at once."""
    rig = Rig()
    a = rig.load([0], [0])
    assert rig.do(Cancel(a, TimeoutError())) == [("settle", a, "failed"), ("unlock", a)]
    assert rig.do(Flush()) == []
    rig.check_quiet()


def test_cancel_in_the_air_settles_now_and_unlocks_when_drained() -> None:
    """An issued request that is cancelled settles at once; its pages stay locked until its batch ended."""
    rig = Rig()
    a = rig.load([0], [0])
    rig.do(Flush())
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled"), ("stop", 1)]
    assert state_of(rig, a) is State.DRAINING
    assert rig.device.busy(np.array([0]))
    assert rig.machine.budget.inflight_bytes == BYTES
    assert rig.do(Landed(1, 1)) == [("layer", 1, 1)]
    assert rig.do(Ended(1)) == [("unlock", a)]
    rig.batches.clear()
    rig.check_quiet()


def test_names_are_of_all_that_hold_pages() -> None:
    """Requests that are queued, in the air or draining, and layers that were written; not who is through."""
    rig = Rig()
    a, b, c = rig.load([0], [0]), rig.load([1], [1]), rig.backup([2], [2], streaming=True)
    layer = rig.written(c, 0)
    assert rig.machine.names() == [a, b, c, layer]
    rig.do(Cancel(a))
    rig.do(Flush())
    rig.do(Cancel(b))
    assert rig.machine.names() == [b, c, layer]
    assert [piece.id for piece in rig.machine.live()] == [c]
    rig.do(Ended(1))
    assert rig.machine.names() == [c, layer]


def test_a_cancelled_request_that_lands_all_the_same_unlocks_once() -> None:
    """A cancel that comes too late to stop the copies changes nothing about when pages come back."""
    rig = Rig()
    a = rig.load([0], [0])
    rig.do(Flush())
    rig.do(Cancel(a))
    assert rig.do(Landed(1, 3)) == [("layer", 1, 3), ("unlock", a)]
    assert rig.do(Ended(1)) == []
    rig.batches.clear()
    rig.check_quiet()


def test_failure_alone_settles_now_and_unlocks_when_drained() -> None:
    """A batch of one that fails, fails its request at once; pages wait for the drain."""
    rig = Rig()
    a = rig.load([0], [0])
    rig.do(Flush())
    rig.do(Landed(1, 1))
    error = OSError("no")
    assert rig.do(Failed(1, error)) == [("settle", a, "failed")]
    piece = rig.machine.find(a)
    assert piece is not None
    assert (piece.state, piece.error) == (State.DRAINING, error)
    assert rig.do(Cancel(a)) == []
    assert rig.do(Ended(1)) == [("unlock", a)]
    rig.batches.clear()
    rig.check_quiet()


def test_a_batch_is_stopped_only_when_nobody_wants_it() -> None:
    """Cancelling one of a batch settles that one; the rest goes on, and unlocks it with itself."""
    rig = Rig()
    a, b = rig.load([0], [0]), rig.load([1], [1])
    rig.do(Flush())
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled")]
    assert rig.do(Landed(1, 3)) == [
        ("layer", 1, 3), ("unlock", a), ("settle", b, "done"), ("unlock", b),
    ]  # fmt: skip
    rig.finish()


def test_cancelling_all_of_a_batch_stops_it() -> None:
    """The last cancel of a batch stops it."""
    rig = Rig()
    a, b = rig.load([0], [0]), rig.load([1], [1])
    rig.do(Flush())
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled")]
    assert rig.do(Cancel(b)) == [("settle", b, "cancelled"), ("stop", 1)]
    assert rig.do(Ended(1)) == [("unlock", a), ("unlock", b)]
    rig.batches.clear()
    rig.check_quiet()


# Transitions -----------------------------------------------------------------------------------------

WORDS = sorted({word for _, word in TRANSITIONS})


@pytest.mark.parametrize(("state", "word"), TRANSITIONS)
def test_every_legal_transition_is_taken(state: State, word: str) -> None:
    """Each row of the table leads where it says."""
    rig = Rig()
    piece = rig.machine.find(rig.load([0], [0]))
    assert piece is not None
    piece.state = state
    move(piece, word)
    assert piece.state is TRANSITIONS[state, word]


@pytest.mark.parametrize(
    ("state", "word"),
    [pair for pair in itertools.product(State, WORDS) if pair not in TRANSITIONS],
)
def test_every_illegal_transition_is_refused(state: State, word: str) -> None:
    """A pair that is no row raises, tells the story and changes nothing."""
    rig = Rig()
    piece = rig.machine.find(rig.load([0], [0]))
    assert piece is not None
    piece.state = state
    with pytest.raises(InvalidTransitionError) as caught:
        move(piece, word)
    assert (caught.value.event, caught.value.state) == (word, state)
    assert "request 1 load" in caught.value.story[0]
    assert piece.state is state


@pytest.mark.parametrize(
    "event", [Landed(9, 1), Failed(9, OSError()), Ended(9)], ids=["landed", "failed", "ended"]
)
def test_news_of_an_unknown_batch_is_our_bug(event: Event) -> None:
    """Progress of a batch that is not in the air raises and changes nothing."""
    rig = Rig()
    a = rig.load([0], [0])
    with pytest.raises(InvalidTransitionError) as caught:
        rig.do(event)
    assert (caught.value.event, caught.value.state) == ("batch 9", "not in the air")
    assert state_of(rig, a) is State.QUEUED
    rig.finish()


def test_a_batch_that_ends_early_without_a_reason_is_our_bug() -> None:
    """A batch that ends with layers missing, neither failed nor stopped, raises."""
    rig = Rig()
    rig.load([0], [0])
    rig.do(Flush())
    rig.do(Landed(1, 2))
    with pytest.raises(InvalidTransitionError) as caught:
        rig.do(Ended(1))
    assert (caught.value.event, caught.value.state) == ("end", State.ISSUED)
    piece, batch = caught.value.story
    assert piece == "<request 1 load 2/3 layers, issued>"
    assert batch == repr(rig.batches[1])


@pytest.mark.parametrize("event", [Cancel(7), Unblock(7), Written(7, 0, 8)], ids=repr)
def test_events_for_requests_that_are_gone_are_nothing(event: Event) -> None:
    """A cancel, a mark or a written layer that comes after the end is ignored."""
    assert Rig().do(event) == []


# Hazards ------------------------------------------------------------------------------------------------

CLASHES = {
    "load after backup, host": (("backup", [0], [5]), ("load", [5], [1])),
    "backup after load, host": (("load", [5], [1]), ("backup", [0], [5])),
    "load after backup, device": (("backup", [0], [5]), ("load", [6], [0])),
    "backup after load, device": (("load", [6], [0]), ("backup", [0], [5])),
    "load after load, device": (("load", [5], [0]), ("load", [6], [0])),
    "backup after backup, host": (("backup", [0], [5]), ("backup", [1], [5])),
}


def submit(rig: Rig, what: tuple[str, list[int], list[int]], **more: object) -> int:
    direction, first, second = what
    return getattr(rig, direction)(first, second, **more)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("first", "second"), CLASHES.values(), ids=CLASHES)
def test_a_clash_runs_in_order_layer_by_layer(
    first: tuple[str, list[int], list[int]], second: tuple[str, list[int], list[int]]
) -> None:
    """Who clashes with an earlier request is issued when that one's first layer has landed, and follows it."""
    rig = Rig()
    a, b = submit(rig, first), submit(rig, second, due=-100.0)
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    assert rig.do(Flush()) == []
    assert rig.do(Landed(1, 1)) == [("layer", 1, 1)]
    assert rig.do(Flush()) == [("issue", 2, [b], 1)]
    assert rig.do(Landed(1, 2)) == [("layer", 1, 2), ("extend", 2, 2)]
    assert rig.do(Landed(1, 3)) == [
        ("layer", 1, 3), ("settle", a, "done"), ("extend", 2, 3), ("unlock", a),
    ]  # fmt: skip
    rig.do(Ended(1))
    del rig.batches[1]
    rig.finish()
    assert rig.settled == {a: State.DONE, b: State.DONE}


CALM = {
    "two loads of one host page": (("load", [5], [0]), ("load", [5], [1])),
    "two backups of one device page": (("backup", [0], [5]), ("backup", [0], [6])),
    "a load and a backup of other pages": (("load", [5], [0]), ("backup", [1], [6])),
}


@pytest.mark.parametrize(("first", "second"), CALM.values(), ids=CALM)
def test_readers_and_strangers_never_wait(
    first: tuple[str, list[int], list[int]], second: tuple[str, list[int], list[int]]
) -> None:
    """Requests that only read a page together, or share none, are issued by one flush."""
    rig = Rig()
    a, b = submit(rig, first), submit(rig, second)
    rows = rig.do(Flush())
    assert sorted(number for row in rows for number in row[2]) == [a, b]  # type: ignore[attr-defined]
    assert all(row[3] == LAYERS for row in rows)
    rig.finish()


def test_a_batch_in_the_air_is_watched_from_its_first_follower_on() -> None:
    """Who comes to follow a batch under way has it report each layer; one that has landed need not."""
    rig = Rig()
    rig.backup([0], [5])
    rig.do(Flush())
    follower = rig.request(Direction.LOAD, [5], [1])
    assert [told(command) for command in rig.machine.handle(follower)] == [("watch", 1)]
    rig.submitted.append(follower.id)
    rig.do(Landed(1, 3))
    late = rig.request(Direction.LOAD, [5], [2])
    assert rig.machine.handle(late) == []
    rig.submitted.append(late.id)
    rig.finish()


def test_a_clash_lets_disjoint_requests_pass() -> None:
    """Requests queued behind one that waits are issued before it."""
    rig = Rig()
    a, b, c = rig.backup([0], [5]), rig.load([5], [1]), rig.load([6], [2])
    assert rig.do(Flush()) == [("issue", 1, [c], 3), ("issue", 2, [a], 3)]
    rig.finish()
    assert rig.settled[b] is State.DONE


def test_a_writer_follows_all_readers() -> None:
    """A write waits for every earlier reader of the page, as far as the slowest."""
    rig = Rig()
    a, b = rig.load([5], [0]), rig.load([5], [1], route="other")
    c = rig.backup([7], [5])
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    assert rig.do(Flush()) == [("issue", 2, [b], 3)]
    assert rig.do(Landed(1, 3)) == [("layer", 1, 3), ("settle", a, "done"), ("unlock", a)]
    assert rig.do(Flush()) == []
    rig.do(Landed(2, 2))
    assert rig.do(Flush()) == [("issue", 3, [c], 2)]
    rig.finish()


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_ghost_keeps_its_place(how: str) -> None:
    """A queued request that goes while it follows another settles at once and holds its pages until then."""
    rig = Rig()
    a = rig.backup([0], [5])
    ghost = rig.load([5], [1])
    c = rig.backup([1], [6])
    rig.do(Flush())
    error = TimeoutError() if how == "fail" else None
    outcome = "failed" if how == "fail" else "cancelled"
    assert rig.do(Cancel(ghost, error)) == [("settle", ghost, outcome)]
    assert rig.device.busy(np.array([1]))
    assert rig.do(Flush()) == []
    rows = rig.do(Landed(1, 3))
    let_down = [("settle", c, "failed"), ("unlock", c)] if how == "fail" else []
    assert rows == [
        ("layer", 1, 3), ("settle", a, "done"), ("unlock", a), *let_down[:1], ("unlock", ghost),
        *let_down[1:],
    ]  # fmt: skip
    rig.do(Ended(1))
    del rig.batches[1]
    assert rig.do(Flush()) == ([] if let_down else [("issue", 2, [c], 3)])
    rig.finish()


def test_who_follows_a_ghost_follows_whom_it_followed() -> None:
    """A page handed on through a cancelled request is still not written before the first one is done."""
    rig = Rig()
    rig.backup([0], [5])
    ghost = rig.backup([1], [5])
    c = rig.backup([2], [5])
    rig.do(Flush())
    rig.do(Cancel(ghost))
    rig.do(Landed(1, 2))
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert rig.do(Flush()) == [("issue", 2, [c], 3)]
    rig.finish()


def test_a_draining_request_is_followed_as_far_as_it_landed() -> None:
    """A page is written again only when the cancelled copy of that layer has landed or drained."""
    rig = Rig()
    a, b = rig.load([5], [0]), rig.load([6], [0])
    rig.do(Flush())
    rig.do(Cancel(a))
    assert rig.do(Flush()) == []
    assert rig.do(Ended(1)) == [("unlock", a)]
    del rig.batches[1]
    assert rig.do(Flush()) == [("issue", 2, [b], 3)]
    rig.finish()


# Batches that fail --------------------------------------------------------------------------------------


def test_a_failed_batch_is_taken_apart() -> None:
    """Each request of a batch that failed goes on alone from the failing layer; only the guilty one fails."""
    rig = Rig()
    a, b, c = (rig.load([n], [n]) for n in range(3))
    rig.do(Flush())
    rig.do(Landed(1, 1))
    assert rig.do(Failed(1, OSError())) == []
    assert rig.do(Cancel(c)) == [("settle", c, "cancelled")]
    assert rig.machine.budget.inflight_requests == 3
    assert rig.do(Ended(1)) == [("unlock", c)]
    del rig.batches[1]
    assert (rig.machine.budget.inflight_requests, rig.machine.budget.queued_requests) == (0, 0)
    assert rig.do(Flush()) == [("issue", 2, [a], 3)]
    assert rig.batches[2].first == 1
    assert rig.do(Flush()) == [("issue", 3, [b], 3)]
    assert rig.do(Failed(2, OSError())) == [("settle", a, "failed")]
    assert rig.do(Landed(3, 3)) == [("layer", 3, 3), ("settle", b, "done"), ("unlock", b)]
    rig.finish()


def test_a_piece_of_a_failed_batch_can_be_cancelled_in_the_queue() -> None:
    """Cancelled between the failure and its own run, a request leaves at once and the counts stay right."""
    rig = Rig()
    a, b = rig.load([0], [0]), rig.load([1], [1])
    rig.do(Flush())
    rig.do(Failed(1, OSError()))
    rig.do(Ended(1))
    del rig.batches[1]
    assert state_of(rig, a) is State.QUEUED
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled"), ("unlock", a)]
    assert rig.do(Flush()) == [("issue", 2, [b], 3)]
    rig.finish()


def test_followers_of_a_failed_batch_wait_for_the_second_run() -> None:
    """A request behind a member of a failed batch follows it through its run alone."""
    rig = Rig()
    a, _, c = rig.load([5], [0]), rig.load([6], [1]), rig.backup([0], [7])
    rig.do(Flush())
    rig.do(Landed(1, 1))
    assert rig.do(Flush()) == [("issue", 2, [c], 1)]
    rig.do(Failed(1, OSError()))
    rig.do(Ended(1))
    del rig.batches[1]
    assert rig.do(Flush())[0] == ("issue", 3, [a], 3)
    assert rig.do(Landed(3, 2)) == [("layer", 3, 2), ("extend", 2, 2)]
    rig.finish()
    assert rig.settled[c] is State.DONE


# Blockers -------------------------------------------------------------------------------------------------


def test_blockers_hold_a_request_back() -> None:
    """A request with blockers is queued and not issued until each has gone."""
    rig = Rig()
    a = rig.load([0], [0], blockers=2)
    b = rig.load([1], [1])
    assert rig.do(Flush()) == [("issue", 1, [b], 3)]
    assert rig.do(Unblock(a)) == []
    assert not rig.machine.flushable()
    assert rig.do(Unblock(a)) == []
    assert rig.do(Flush()) == [("issue", 2, [a], 3)]
    rig.finish()


def test_a_blocked_request_can_be_cancelled() -> None:
    """A cancel does not wait for the blockers, and their late news is nothing."""
    rig = Rig()
    a = rig.load([0], [0], blockers=1)
    assert rig.do(Cancel(a)) == [("settle", a, "cancelled"), ("unlock", a)]
    assert rig.do(Unblock(a)) == []
    rig.check_quiet()


def test_others_wait_for_a_blocked_writer() -> None:
    """A blocked request keeps its place in the order of its pages."""
    rig = Rig()
    a, b = rig.load([5], [0], blockers=1), rig.load([6], [0])
    assert rig.do(Flush()) == []
    rig.do(Unblock(a))
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    rig.finish()
    assert rig.settled[b] is State.DONE


# Streaming --------------------------------------------------------------------------------------------------


def test_a_streaming_backup_is_issued_layer_by_layer_as_written() -> None:
    """Layers go when they are written, in any order; the request settles with the last one."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    assert rig.do(Flush()) == []
    one = rig.written(s, 1)
    assert rig.do(Flush()) == [("issue", 1, [one], 2)]
    assert (rig.batches[1].first, rig.batches[1].last) == (1, 2)
    assert rig.machine.budget.inflight_bytes == BYTES // LAYERS
    assert state_of(rig, s) is State.ISSUED
    two, zero = rig.written(s, 2), rig.written(s, 0)
    assert rig.do(Landed(1, 2)) == [("layer", 1, 2)]
    assert rig.do(Flush()) == [("issue", 2, [two], 3)]
    assert rig.do(Flush()) == [("issue", 3, [zero], 1)]
    assert rig.do(Landed(2, 3)) == [("layer", 2, 3)]
    rig.do(Ended(1))
    del rig.batches[1]
    assert rig.do(Landed(3, 1)) == [("layer", 3, 1), ("settle", s, "done"), ("unlock", s)]
    rig.finish()


def test_a_layer_is_written_once() -> None:
    """A second `Written` of a layer is refused and changes nothing."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    rig.written(s, 1)
    with pytest.raises(RequestError, match="written before"):
        rig.do(Written(s, 1, rig.machine.new_id()))
    rig.written(s, 0)
    rig.written(s, 2)
    rig.finish()


def test_only_streaming_backups_are_written() -> None:
    """`Written` of another request is refused."""
    rig = Rig()
    b = rig.backup([0], [5])
    with pytest.raises(RequestError, match="not a streaming backup"):
        rig.do(Written(b, 1, rig.machine.new_id()))
    rig.finish()


def test_an_unwritten_layer_holds_up_nobody_else() -> None:
    """A streaming backup that waits for its forward lets everybody else pass."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    b = rig.backup([0], [6])
    assert rig.do(Flush()) == [("issue", 1, [b], 3)]
    for layer in range(LAYERS):
        rig.written(s, layer)
    rig.finish()


def test_a_load_into_the_device_pages_before_the_layer_is_written_goes_first() -> None:
    """The device side takes its place when the layer is written: an earlier load goes before it, by layers."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    a = rig.load([7], [0])
    zero = rig.written(s, 0)
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    assert rig.do(Flush()) == []
    assert rig.do(Landed(1, 1)) == [("layer", 1, 1)]
    assert rig.do(Flush()) == [("issue", 2, [zero], 1)]
    two = rig.written(s, 2)
    rig.do(Landed(1, 2))
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert rig.do(Flush()) == [("issue", 3, [two], 3)]
    rig.written(s, 1)
    rig.finish()
    assert rig.settled == {s: State.DONE, a: State.DONE}


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_a_layer_that_has_landed_keeps_its_claims_until_those_ahead_have_gone(end: str) -> None:
    """Its pages are free when the load is that it follows; the backup goes on, whatever ends that load."""
    rig = Rig()
    a = rig.load([7], [0])
    s = rig.backup([0], [5], streaming=True)
    rig.written(s, 0)
    rig.do(Flush())
    rig.do(Landed(1, 1))
    rig.do(Flush())
    rig.do(Landed(2, 1))
    rig.do(Ended(2))
    del rig.batches[2]
    assert rig.machine.budget.inflight_requests == 1
    after = rig.load([8], [0])
    assert rig.do(Flush()) == [("issue", 3, [after], 1)]
    if end == "done":
        rig.do(Landed(1, 3))
    else:
        rig.do(Failed(1, OSError()) if end == "failed" else Cancel(a))
        rig.do(Landed(3, 1))
        rig.do(Ended(1))
        del rig.batches[1]
    assert rig.batches[3].limit == 3
    assert s not in rig.settled
    for layer in (1, 2):
        rig.written(s, layer)
    rig.finish()
    assert rig.settled == {a: State(end), s: State.DONE, after: State.DONE}


@pytest.mark.parametrize(
    "limits", [Limits(max_inflight_requests=4), Limits(max_inflight_bytes=999)]
)
def test_with_a_bound_a_layer_waits_for_the_whole_load(limits: Limits) -> None:
    """Where what is in flight is bounded, nothing is issued behind what has not ended."""
    rig = Rig(limits)
    a = rig.load([7], [0])
    s = rig.backup([0], [5], streaming=True)
    zero = rig.written(s, 0)
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    rig.do(Landed(1, 2))
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert rig.do(Flush()) == [("issue", 2, [zero], 1)]
    for layer in (1, 2):
        rig.written(s, layer)
    rig.finish()


def test_a_load_into_the_device_pages_after_the_layer_is_written_follows_that_layer() -> None:
    """A load submitted behind a written layer overwrites the page only when that layer has been read."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    zero = rig.written(s, 0)
    a = rig.load([7], [0])
    assert rig.do(Flush()) == [("issue", 1, [zero], 1)]
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 1))
    assert rig.do(Flush()) == [("issue", 2, [a], 3)]
    one, two = rig.written(s, 1), rig.written(s, 2)
    assert one < two
    rig.finish()


def test_a_load_from_the_host_pages_follows_layer_by_layer() -> None:
    """A load of what a streaming backup writes goes as far as its layers have landed without a gap."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    a = rig.load([5], [1])
    rig.written(s, 1)
    rig.do(Flush())
    rig.do(Landed(1, 2))
    assert rig.do(Flush()) == []
    rig.written(s, 0)
    rig.do(Flush())
    rig.do(Landed(2, 1))
    assert rig.do(Flush()) == [("issue", 3, [a], 2)]
    rig.written(s, 2)
    rig.finish()
    assert rig.settled == {s: State.DONE, a: State.DONE}


def test_cancelling_a_streaming_backup_drops_its_layers() -> None:
    """Queued layers go at once, issued ones drain, later `Written` is ignored."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    rig.written(s, 0)
    rig.do(Flush())
    rig.written(s, 1)
    assert rig.do(Cancel(s)) == [("settle", s, "cancelled"), ("stop", 1)]
    assert rig.do(Written(s, 2, rig.machine.new_id())) == []
    assert rig.do(Flush()) == []
    assert rig.do(Ended(1)) == [("unlock", s)]
    rig.batches.clear()
    rig.check_quiet()


def test_cancelling_an_unwritten_streaming_backup_frees_it_at_once() -> None:
    """With nothing in the air its host pages are free in the same breath."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    assert rig.do(Cancel(s)) == [("settle", s, "cancelled"), ("unlock", s)]
    rig.check_quiet()


def test_a_failing_layer_fails_the_streaming_backup() -> None:
    """One layer's failure settles the request; its other layers drain."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    rig.written(s, 0)
    rig.do(Flush())
    rig.written(s, 1)
    rig.do(Flush())
    assert rig.do(Failed(1, OSError())) == [("settle", s, "failed"), ("stop", 2)]
    assert rig.do(Ended(1)) == []
    assert rig.do(Ended(2)) == [("unlock", s)]
    rig.batches.clear()
    rig.check_quiet()


def test_layers_of_two_streaming_backups_share_a_batch_and_are_taken_apart() -> None:
    """The same layer of two requests is one batch; when that fails, each layer runs alone."""
    rig = Rig()
    s, t = rig.backup([0], [5], streaming=True), rig.backup([1], [6], streaming=True)
    p, q = rig.written(s, 0), rig.written(t, 0)
    assert rig.do(Flush()) == [("issue", 1, [p, q], 1)]
    rig.do(Failed(1, OSError()))
    rig.do(Ended(1))
    del rig.batches[1]
    assert rig.do(Flush()) == [("issue", 2, [p], 1)]
    assert rig.do(Flush()) == [("issue", 3, [q], 1)]
    assert rig.do(Failed(2, OSError())) == [("settle", s, "failed")]
    for layer in (1, 2):
        rig.written(t, layer)
    rig.finish()
    assert rig.settled == {s: State.FAILED, t: State.DONE}


# Endless waits ----------------------------------------------------------------------------------------------


def refused(rig: Rig, host: Sequence[int], device: Sequence[int]) -> bool:
    """Return whether a load is refused; one that is leaves no trace."""
    before = (rig.host._counter.copy(), rig.device._counter.copy())
    request = rig.request(Direction.LOAD, host, device)
    try:
        rig.do(request)
    except RequestError:
        assert np.array_equal(before[0], rig.host._counter)
        assert np.array_equal(before[1], rig.device._counter)
        assert rig.machine.find(request.id) is None
        return True
    rig.submitted.append(request.id)
    return False


def test_a_load_that_waits_for_the_stream_it_blocks_is_refused() -> None:
    """A load from the host pages of an unwritten backup into the pages that this has yet to read is refused."""
    rig = Rig()
    s = rig.backup([0, 1], [5, 6], streaming=True)
    assert refused(rig, [6], [0])
    assert not refused(rig, [6], [2])
    for layer in range(LAYERS):
        rig.written(s, layer)
    assert not refused(rig, [6], [0])
    rig.finish()


def test_a_load_that_waits_through_others_is_refused_too() -> None:
    """The wait may lead through other requests."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    rig.load([5], [1])
    rig.backup([1], [6])
    assert refused(rig, [6], [0])
    for layer in range(LAYERS):
        rig.written(s, layer)
    rig.finish()


@pytest.mark.parametrize("written", range(LAYERS + 1))
def test_two_streams_that_cross_are_refused(written: int) -> None:
    """Two streaming backups whose loads cross would wait for each other: the second load is refused."""
    rig = Rig()
    s, t = rig.backup([0], [5], streaming=True), rig.backup([1], [6], streaming=True)
    assert not refused(rig, [5], [1])  # t's layers will follow it, and it follows s
    for layer in range(written):
        rig.written(t, layer)
    assert refused(rig, [6], [0])  # s's layers would follow it, and it follows t
    for layer in range(written, LAYERS):
        rig.written(t, layer)
    for layer in range(LAYERS):
        rig.written(s, layer)
    rig.finish()


def test_a_cancelled_stream_refuses_nothing() -> None:
    """Once the streaming backup is cancelled, its pages may be loaded as everybody's."""
    rig = Rig()
    s = rig.backup([0], [5], streaming=True)
    rig.do(Cancel(s))
    assert not refused(rig, [5], [0])
    rig.finish()


# Limits -----------------------------------------------------------------------------------------------------


def test_in_flight_bytes_are_bounded() -> None:
    """No batch is issued that would exceed the bound, but one that exceeds it alone goes alone."""
    rig = Rig(Limits(max_inflight_bytes=2 * BYTES))
    ids = [rig.load([n], [n]) for n in range(3)]
    big = rig.load([3, 4, 5], [3, 4, 5])
    assert rig.do(Flush()) == [("issue", 1, ids[:2], 3)]
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert rig.do(Flush()) == [("issue", 2, ids[2:], 3)]
    assert rig.do(Flush()) == []
    rig.do(Landed(2, 3))
    assert rig.do(Flush()) == [("issue", 3, [big], 3)]
    assert rig.machine.budget.inflight_bytes == 3 * BYTES
    rig.finish()


def test_in_flight_requests_are_bounded() -> None:
    """No more requests are in flight than the bound says, over both directions."""
    rig = Rig(Limits(max_inflight_requests=2))
    ids = [rig.load([n], [n]) for n in range(3)]
    rig.backup([7], [7])
    assert rig.do(Flush()) == [("issue", 1, ids[:2], 3)]
    assert rig.machine.budget.inflight_requests == 2
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert [row[:1] for row in rig.do(Flush())] == [("issue",), ("issue",)]
    rig.finish()


def test_draining_counts_as_in_flight() -> None:
    """A cancelled request gives its permit back when it has drained."""
    rig = Rig(Limits(max_inflight_requests=1))
    a, b = rig.load([0], [0]), rig.load([1], [1])
    rig.do(Flush())
    rig.do(Cancel(a))
    assert rig.do(Flush()) == []
    rig.do(Ended(1))
    del rig.batches[1]
    assert rig.do(Flush()) == [("issue", 2, [b], 3)]
    rig.finish()


@pytest.mark.parametrize("limits", [Limits(max_inflight_requests=1), Limits(max_inflight_bytes=1)])
def test_a_bounded_machine_does_not_hold_what_others_need(limits: Limits) -> None:
    """With a bound in flight, a request that must follow another is issued only after that one."""
    rig = Rig(limits)
    a, b = rig.backup([0], [5]), rig.load([5], [1], due=-100.0)
    assert rig.do(Flush()) == [("issue", 1, [a], 3)]
    rig.do(Landed(1, 2))
    assert rig.do(Flush()) == []
    rig.do(Landed(1, 3))
    assert rig.do(Flush()) == [("issue", 2, [b], 3)]
    rig.finish()


def test_one_flush_issues_one_budget() -> None:
    """A long queue is issued one batch budget per flush, and says that there is more."""
    rig = Rig(Limits(max_batch_ops=2))
    ids = [rig.load([n], [n]) for n in range(5)]
    for first in (0, 2, 4):
        assert rig.machine.flushable()
        assert rig.do(Flush())[0][2] == ids[first : first + 2]
    assert not rig.machine.flushable()
    rig.finish()


def test_at_most_max_flights_are_in_the_air() -> None:
    """Disjoint batches beyond MAX_FLIGHTS wait; a more urgent one goes all the same, a less urgent not."""
    rig = Rig(Limits(max_batch_ops=1))
    for n in range(MAX_FLIGHTS + 2):
        rig.load([0], [n], due=1.0)
    count = 0
    while rig.machine.flushable():
        count += len(rig.do(Flush()))
    assert count == MAX_FLIGHTS
    rig.load([0], [PAGES - 2], due=2.0)
    assert not rig.machine.flushable()
    urgent = rig.load([0], [PAGES - 1], due=0.0)
    assert rig.do(Flush()) == [("issue", MAX_FLIGHTS + 1, [urgent], 3)]
    assert rig.do(Flush()) == []
    rig.finish()


# Order ------------------------------------------------------------------------------------------------------


def issue_order(rig: Rig) -> list[int]:
    """Issue and land one request after the other; return the order."""
    order: list[int] = []
    while rig.machine.flushable():
        for _, number, pieces, _ in rig.do(Flush()):
            assert isinstance(pieces, list)
            order += pieces
            rig.do(Landed(number, LAYERS))  # type: ignore[arg-type]
            rig.do(Ended(number))  # type: ignore[arg-type]
            del rig.batches[number]  # type: ignore[arg-type]
    return order


def test_priority_then_deadline_then_submission() -> None:
    """Within a direction the higher priority goes first, then the nearer deadline, then the older."""
    rig = Rig(Limits(max_batch_ops=1))
    given = [(0, None), (0, 5.0), (1, None), (0, None), (1, 5.0), (0, 4.0), (-1, 0.5)]
    ids = [
        rig.load([n], [n], due=due(0.0, priority, deadline))
        for n, (priority, deadline) in enumerate(given)
    ]
    assert [ids.index(number) for number in issue_order(rig)] == [4, 2, 5, 1, 0, 3, 6]
    rig.check_quiet()


def test_age_beats_priority_at_last() -> None:
    """A request is never overtaken by one of a higher priority that came a patience per step later."""
    rig = Rig(Limits(max_batch_ops=1))
    old = rig.load([0], [0], due=due(0.0, 0, None))
    young = rig.load([1], [1], due=due(PATIENCE - 0.1, 1, None))
    late = rig.load([2], [2], due=due(PATIENCE + 0.1, 1, None))
    assert issue_order(rig) == [young, old, late]
    rig.check_quiet()


def test_loads_go_before_backups_but_not_for_ever() -> None:
    """With room for one, a load goes before an older backup, until that has waited a patience."""
    for age, first in ((PATIENCE - 1, "load"), (PATIENCE + 1, "backup")):
        rig = Rig(Limits(max_inflight_requests=1))
        backup = rig.backup([0], [0], due=due(0.0, 0, None))
        load = rig.load([1], [1], due=due(age, 0, None))
        assert issue_order(rig)[0] == {"load": load, "backup": backup}[first]
        rig.check_quiet()


def test_streams_learn_the_urgency_of_a_batch() -> None:
    """A batch is as due as its most urgent request."""
    rig = Rig()
    rig.load([0], [0], due=5.0)
    rig.load([1], [1], due=-5.0)
    rig.do(Flush())
    assert rig.batches[1].due == -5.0
    rig.finish()


# Joining ------------------------------------------------------------------------------------------------------


def test_a_load_is_undisturbed_until_somebody_claims_its_pages_for_writing() -> None:
    """A load may be joined while it runs and nobody has claimed to write its pages since."""
    rig = Rig()
    request = rig.request(Direction.LOAD, [5], [0])
    rig.submit(request)
    assert rig.machine.undisturbed(request)
    rig.load([5], [1])
    rig.backup([0], [6])
    assert rig.machine.undisturbed(request)
    rig.backup([2], [5])
    assert not rig.machine.undisturbed(request)
    rig.finish()
    assert not rig.machine.undisturbed(request)


def test_a_load_whose_target_is_overwritten_cannot_be_joined() -> None:
    """A later load into the same device page disturbs."""
    rig = Rig()
    request = rig.request(Direction.LOAD, [5], [0])
    rig.submit(request)
    rig.load([6], [0])
    assert not rig.machine.undisturbed(request)
    rig.finish()


# Any order ----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Claim:
    """What the world knows of one request, or of one layer of a streaming one."""

    id: int
    owner: int
    reads: set[tuple[str, int]]
    writes: set[tuple[str, int]]
    layers: range
    landed: set[int] = attrs.field(factory=set)
    dead: bool = False

    def clashes(self, other: Claim) -> bool:
        return bool(
            self.writes & (other.reads | other.writes) or other.writes & (self.reads | self.writes)
        )


@attrs.define(eq=False)
class InFlight:
    """A batch on its stream, as an eager driver treats it."""

    batch: Batch
    enqueued: int
    passed: int
    stopped: bool = False
    broken: bool = False


class World:
    """Random submits, cancels, failures and landings, against everything that must hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        limits = Limits(
            max_inflight_bytes=draw.choice((None, None, 2 * BYTES)),
            max_inflight_requests=draw.choice((None, None, 1, 3)),
            max_batch_ops=draw.choice((2, 4, 100)),
        )
        self.rig = Rig(limits)
        self.claims: list[Claim] = []
        self.in_flight: dict[int, InFlight] = {}
        self.unwritten: dict[int, list[int]] = {}
        self.blocked: list[int] = []
        self.pages: dict[int, tuple[list[int], list[int]]] = {}
        self.content: dict[tuple[int, int], object] = {}
        """By host page and layer, whose backup it is; no number while that is being written, or half."""
        self.read: dict[int, dict[int, set[object]]] = {}
        """By load and host page, whose backups its layers were."""

    def handle(self, event: Event) -> None:
        for row in self.rig.do(event):
            self.carry_out(row)
        self.check()

    def carry_out(self, row: tuple[object, ...]) -> None:
        match row:
            case ("issue", int(number), *_):
                batch = self.rig.batches[number]
                self.in_flight[number] = InFlight(batch, batch.first, batch.first)
                assert len({piece.id for piece in batch.pieces}) == len(batch.pieces)
            case ("stop", int(number)):
                self.in_flight[number].stopped = True
            case ("settle", int(request), state) if state != "done":
                for claim in self.claims:
                    if claim.owner == request:
                        claim.dead = True
                self.unwritten.pop(request, None)
            case ("settle", int(request), _):
                mine = [claim for claim in self.claims if claim.owner == request]
                landed = [layer for claim in mine for layer in claim.landed]
                assert sorted(landed) == list(range(LAYERS)), "settled before it was there"
                for whose in self.read.get(request, {}).values():
                    assert len(whose) == 1, "a load is done, and has read a mixture"
                    assert whose <= {None, *self.rig.submitted}, "a load is done, and has read half"
            case ("unlock", int(request)):
                for flight in self.in_flight.values():
                    for piece in flight.batch.pieces:
                        assert piece.owner.id != request or flight.enqueued == flight.passed
                self.claims = [claim for claim in self.claims if claim.owner != request]

    def check(self) -> None:
        machine = self.rig.machine
        live = [flight.batch for flight in self.in_flight.values() if not flight.batch.closed]
        assert machine.budget.inflight_bytes == sum(batch.nbytes for batch in live)
        assert machine.budget.inflight_requests == sum(len(batch.pieces) for batch in live)
        limits = machine.limits
        if limits.max_inflight_requests is not None:
            assert machine.budget.inflight_requests <= limits.max_inflight_requests
        for claim in self.claims:
            for side, page in claim.reads | claim.writes:
                table = self.rig.host if side == "host" else self.rig.device
                over = claim.dead or claim.landed == set(claim.layers) != set()
                assert over or table.busy(np.array([page])), "unlocked too early"

    def step(self) -> None:
        acts = [self.submit, self.submit, self.flush, self.flush, self.enqueue, self.enqueue,
                self.land, self.land, self.end, self.end, self.write, self.unblock]  # fmt: skip
        acts += [self.cancel] if self.random.random() < 0.2 else []
        acts += [self.fail] if self.random.random() < 0.2 else []
        self.random.choice(acts)()

    def submit(self) -> None:
        if len(self.claims) > 12:
            return
        draw = self.random
        load = draw.random() < 0.5
        count = draw.randint(1, 3)
        host, device = draw.sample(range(6), count), draw.sample(range(6), count)
        streaming = not load and draw.random() < 0.4
        blockers = int(not streaming and draw.random() < 0.2)
        direction = Direction.LOAD if load else Direction.BACKUP
        request = self.rig.request(
            direction, host, device, due=draw.choice((0.0, 1.0, -1.0)), streaming=streaming,
            blockers=blockers, route=draw.choice("ab"),
        )  # fmt: skip
        try:
            rows = self.rig.do(request)
        except RequestError:
            assert load
            return
        self.rig.submitted.append(request.id)
        hosts, devices = {("host", page) for page in host}, {("device", page) for page in device}
        self.pages[request.id] = (host, device)
        if blockers:
            self.blocked.append(request.id)
        if streaming:
            self.unwritten[request.id] = list(range(LAYERS))
            self.claims.append(Claim(request.id, request.id, set(), hosts, range(0)))
        else:
            reads, writes = (hosts, devices) if load else (devices, hosts)
            self.claims.append(Claim(request.id, request.id, reads, writes, range(LAYERS)))
        for row in rows:
            self.carry_out(row)
        self.check()

    def write(self) -> None:
        if not self.unwritten:
            return
        request = self.random.choice(list(self.unwritten))
        layers = self.unwritten[request]
        layer = layers.pop(self.random.randrange(len(layers)))
        if not layers:
            del self.unwritten[request]
        blockers = int(self.random.random() < 0.2)
        piece = self.rig.written(request, layer, blockers)
        if blockers:
            self.blocked.append(piece)
        host, device = self.pages[request]
        # Its place in the order of host pages is its request's; of device pages, this moment.
        self.claims.append(
            Claim(
                piece,
                request,
                {("device", page) for page in device},
                {("host", page) for page in host},
                range(layer, layer + 1),
            )
        )

    def unblock(self) -> None:
        if self.blocked:
            index = self.random.randrange(len(self.blocked))
            self.handle(Unblock(self.blocked.pop(index)))

    def flush(self) -> None:
        self.handle(Flush())

    def pick(self) -> InFlight | None:
        return self.random.choice(list(self.in_flight.values())) if self.in_flight else None

    def enqueue(self) -> None:
        """A copy begins: nobody who goes before it may have anything left to do there."""
        flight = self.pick()
        if (
            flight is None
            or flight.stopped
            or flight.broken
            or flight.enqueued - flight.passed >= 2
        ):
            return
        if flight.enqueued < flight.batch.limit:
            for piece in flight.batch.pieces:
                self.check_may_copy(piece.id, flight.enqueued)
                if flight.batch.direction is Direction.BACKUP:
                    self.wrote(piece.owner.id, flight.enqueued, object())
            flight.enqueued += 1

    def wrote(self, backup: int, layer: int, what: object) -> None:
        for page in self.pages[backup][0]:
            self.content[page, layer] = what

    def check_may_copy(self, number: int, layer: int) -> None:
        me = next(claim for claim in self.claims if claim.id == number)
        if me.dead:
            return
        for other in self.claims:
            if other.owner == me.owner or not me.clashes(other):
                continue
            if self.goes_before(other, me) and layer in other.layers and not other.dead:
                assert layer in other.landed, (self.rig.settled, other, me, layer)
            for flight in self.in_flight.values():
                if any(piece.id == other.id for piece in flight.batch.pieces):
                    assert not flight.passed <= layer < flight.enqueued, (other, me, layer)

    def goes_before(self, other: Claim, me: Claim) -> bool:
        """Order is by submission; a written layer has its request's place on the host side."""
        shared_host = any(
            side == "host" for side, _ in other.writes & (me.reads | me.writes)
        ) or any(side == "host" for side, _ in me.writes & (other.reads | other.writes))
        shared_device = any(
            side == "device" for side, _ in other.writes & (me.reads | me.writes)
        ) or any(side == "device" for side, _ in me.writes & (other.reads | other.writes))
        return (shared_host and other.owner < me.owner) or (shared_device and other.id < me.id)

    def land(self) -> None:
        flight = self.pick()
        if flight is None or flight.passed == flight.enqueued:
            return
        layer, flight.passed = flight.passed, flight.passed + 1
        if flight.broken:
            return
        for piece in flight.batch.pieces:
            for claim in self.claims:
                if claim.id == piece.id:
                    claim.landed.add(layer)
            if flight.batch.direction is Direction.BACKUP:
                self.wrote(piece.owner.id, layer, piece.owner.id)
                continue
            for page in self.pages[piece.id][0]:
                whose = self.read.setdefault(piece.id, {}).setdefault(page, set())
                whose.add(self.content.get((page, layer)))
        self.handle(Landed(flight.batch.id, layer + 1))

    def fail(self) -> None:
        flight = self.pick()
        if flight is None or flight.passed == flight.enqueued or flight.broken:
            return
        flight.passed, flight.broken = flight.passed + 1, True
        self.handle(Failed(flight.batch.id, OSError()))

    def end(self) -> None:
        flight = self.pick()
        if flight is None or flight.passed != flight.enqueued:
            return
        if flight.stopped or flight.broken or flight.passed == flight.batch.last:
            del self.in_flight[flight.batch.id]
            self.handle(Ended(flight.batch.id, untouched=flight.enqueued == flight.batch.first))
            del self.rig.batches[flight.batch.id]

    def cancel(self) -> None:
        if self.claims:
            error = self.random.choice((None, TimeoutError()))
            self.handle(Cancel(self.random.choice(self.claims).owner, error))

    def wind_down(self) -> None:
        """Write what is unwritten, let everything go, and check that nothing is stuck."""
        for _ in range(20_000):
            if not self.rig.machine.pending():
                break
            self.random.choice(
                (self.write, self.unblock, self.flush, self.enqueue, self.land, self.end)
            )()
        self.rig.check_quiet()


@pytest.mark.parametrize("seed", range(150))
def test_any_order_of_events_keeps_every_promise(seed: int) -> None:
    """Whatever happens in which order: pages are safe, counts are right, and everything ends once."""
    world = World(seed)
    for _ in range(150):
        world.step()
    world.wind_down()


# Tables that were used before ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["load", "backup"])
def test_requests_are_younger_than_all_that_used_their_tables_before(first: str) -> None:
    """A machine on used tables keeps the order of readers and writers of a page that others wrote, or read."""
    used = Rig()
    for _ in range(9):
        used.backup([0], [5])
        used.load([5], [0])
    used.finish()
    rig = Rig()
    rig.host, rig.device = used.host, used.device
    rig.machine = Machine(LAYERS, [(rig.host, rig.device)])
    rig.machine.open()
    load = ("load", [5], [1])
    backup = ("backup", [2], [5])
    one, other = (load, backup) if first == "load" else (backup, load)
    a, b = submit(rig, one), submit(rig, other)
    assert a == 19
    rows = rig.do(Flush())
    assert [row[2] for row in rows] == [[a]]
    rig.finish()
    assert rig.settled == {a: State.DONE, b: State.DONE}


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("direction", ["load", "backup", "streaming"])
def test_pages_that_a_lost_scheduler_holds_are_refused(side: str, direction: str) -> None:
    """Claims that nobody will ever release are named at submit, and the pages beside them work."""
    lost = Rig()
    lost.load([5], [0])
    lost.do(Flush())
    rig = Rig()
    rig.host, rig.device = lost.host, lost.device
    rig.machine = Machine(LAYERS, [(rig.host, rig.device)])
    rig.machine.open()
    host, device = ([6, 5], [1, 2]) if side == "host" else ([6, 7], [1, 0])
    kind = Direction.LOAD if direction == "load" else Direction.BACKUP
    with pytest.raises(RequestError, match=f"the {side} pages of this request"):
        rig.do(rig.request(kind, host, device, streaming=direction == "streaming"))
    assert not rig.host.busy(np.array([6]))
    fine = rig.load([6], [1])
    rig.do(Flush())
    rig.do(Landed(1, LAYERS))
    assert rig.settled[fine] is State.DONE


def test_a_lost_holder_may_be_the_first_of_all() -> None:
    """Number 0 is a holder like any other."""
    rig = Rig()
    rig.device.claim(0, np.array([4]), write=True)
    rig.machine.open()
    with pytest.raises(RequestError, match="the device pages of this request"):
        rig.do(rig.request(Direction.LOAD, [0], [4]))
    rig.load([0], [5])


def test_those_who_leave_in_a_chain_leave_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled requests behind one that lands leave in as many flushes as it takes, in order."""
    monkeypatch.setattr(chains, "LEAVE_AT_ONCE", 2)
    rig = Rig()
    chain = [rig.load([page], [0]) for page in range(7)]
    rig.do(Flush())
    for request in chain[1:]:
        rig.do(Cancel(request))
    assert rig.unlocked == []
    rig.do(Landed(1, LAYERS))
    assert rig.unlocked == chain[:2]
    late = rig.load([0], [0])
    rig.do(Cancel(late))
    assert rig.unlocked == chain[:2]
    while rig.machine.flushable():
        assert rig.machine.waiting()
        before = len(rig.unlocked)
        rig.do(Flush())
        assert len(rig.unlocked) <= before + 2
    assert rig.unlocked == [*chain, late]
    rig.finish()
