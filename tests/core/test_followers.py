"""Many who follow one: they hear of it a few per event, in order, and nobody runs ahead or is forgotten."""

from __future__ import annotations

from typing import cast

import pytest

from offload.core import chains, machine
from offload.core.batch import Limits, Piece, State
from offload.core.events import Cancel, Ended, Failed, Flush, Landed
from tests.core.test_machine import PAGES, Rig

FEW = 3
COUNT = 10


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one event tell few."""
    monkeypatch.setattr(machine, "TELL_AT_ONCE", FEW)


def behind_one(rig: Rig) -> tuple[int, list[int]]:
    """Submit a backup into a host page, in the air, and many loads of that page."""
    first = rig.backup([0], [5])
    rig.do(Flush())
    return first, [rig.load([5], [n + 1]) for n in range(COUNT)]


def ready(rig: Rig, followers: list[int]) -> list[int]:
    """Return those of the followers that are queued to be issued."""
    pieces = [rig.machine.find(number) for number in followers]
    return [p.id for p in pieces if p is not None and not p.waiting]


def test_a_layer_that_lands_lets_many_go_on_in_turn() -> None:
    """So many per event, the first submitted first, until all have heard; and there is always a next event."""
    rig = Rig()
    _, loads = behind_one(rig)
    rig.do(Landed(1, 1))
    heard = FEW
    assert ready(rig, loads) == loads[:heard]
    while heard < COUNT:
        assert rig.machine.flushable()
        assert rig.machine.waiting()
        rig.do(Flush())
        heard = min(COUNT, heard + FEW)
        assert ready(rig, loads) == loads[:heard]
    rig.finish()


def test_a_flush_is_worth_a_try_while_somebody_has_not_heard() -> None:
    """Also where nobody who hears can go on: it is over with the last who has heard."""
    rig = Rig()
    rig.backup([0], [5])
    rig.do(Flush())
    rig.backup([1], [6], blockers=1)
    for n in range(FEW + 1):
        rig.load([5, 6], [2 * n + 2, 2 * n + 3])
    rig.do(Landed(1, 1))
    assert (rig.machine.waiting(), rig.machine.flushable()) == (True, True)
    assert rig.do(Flush()) == []
    assert (rig.machine.waiting(), rig.machine.flushable()) == (False, False)
    queued = rig.load([7], [15])
    assert rig.do(Cancel(queued)) == [("settle", queued, "cancelled"), ("unlock", queued)]


def test_those_who_hear_leave_no_quicker_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled requests that leave because they have heard are no more per event than may leave in one."""
    monkeypatch.setattr(chains, "LEAVE_AT_ONCE", FEW - 1)
    rig = Rig()
    first, loads = behind_one(rig)
    for load in loads[
        FEW:
    ]:  # those who hear first stay, so that nobody stands in line when these hear
        rig.do(Cancel(load))
    rig.do(Landed(1, 3))
    assert rig.unlocked == [first]
    while rig.machine.waiting():
        before = len(rig.unlocked)
        rig.do(Flush())
        assert len(rig.unlocked) <= before + FEW - 1
    assert rig.unlocked == [first, *loads[FEW:]]
    rig.finish()


@pytest.mark.parametrize("how", ["done", "cancelled", "failed"])
def test_one_that_leaves_lets_many_go_on_in_turn(how: str) -> None:
    """However it ends: who relied on what it did not write fails, and the others go, all in order."""
    rig = Rig()
    first, loads = behind_one(rig)
    if how == "cancelled":
        rig.do(Cancel(first))
    elif how == "failed":
        rig.do(Failed(1, OSError()))
    rig.do(Landed(1, 3) if how == "done" else Ended(1))
    assert rig.machine.find(first) is None
    settled = [number for number in loads if number in rig.settled]
    assert settled == ([] if how == "done" else loads[:FEW])
    for _ in range(COUNT):
        rig.do(Flush())
    if how == "done":
        rig.finish()
        assert {rig.settled[number] for number in loads} == {State.DONE}
    else:
        assert {rig.settled[number] for number in loads} == {State.FAILED}
        assert rig.unlocked == [first, *loads]
    assert not rig.machine.pending()


def test_one_who_has_not_heard_yet_may_be_cancelled() -> None:
    """It stays until it has heard, as a ghost, and leaves then; nobody behind it is forgotten."""
    rig = Rig()
    first, loads = behind_one(rig)
    behind = rig.backup([COUNT], [6])
    rig.do(Landed(1, 3))
    rig.do(Cancel(loads[-1]))
    assert first in rig.unlocked
    assert loads[-1] not in rig.unlocked
    rig.finish()
    assert rig.settled[loads[-1]] is State.CANCELLED
    assert rig.settled[behind] is State.DONE


def test_who_comes_while_others_have_not_heard_finds_its_place() -> None:
    """A backup into the page that the loads still read follows them all, told or not."""
    rig = Rig()
    _, loads = behind_one(rig)
    rig.do(Landed(1, 3))
    late = rig.backup([0], [5])
    piece = rig.machine.find(late)
    assert piece is not None
    assert sorted(ahead.id for ahead in piece.follows) == loads
    rig.finish()
    assert rig.unlocked.index(late) == len(rig.unlocked) - 1


def test_several_with_many_behind_are_told_about_in_order() -> None:
    """Those behind the first all hear before those behind the second, however many there are."""
    rig = Rig()
    firsts = [rig.backup([n], [n]) for n in range(2)]
    rig.do(Flush())
    loads = [rig.load([n % 2], [n + 3]) for n in range(COUNT)]
    rig.do(Landed(1, 3))
    heard = [*loads[::2], *loads[1::2]]
    for events in range(1, 5):
        assert sorted(ready(rig, loads) + [n for n in loads if n in rig.settled]) == sorted(
            heard[: FEW * events]
        )
        rig.do(Flush())
    assert set(firsts) <= set(rig.unlocked)
    rig.finish()


@pytest.mark.parametrize("count", [20, 200])
def test_who_follows_many_does_not_look_at_all_of_them_whenever_one_leaves(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup behind many loads of a page asks a few of them how far they are, each time one has left."""
    looks = 0
    inner = cast("property", vars(Piece)["landed"])

    def landed(piece: Piece) -> object:
        nonlocal looks
        looks += 1
        return inner.__get__(piece)

    rig = Rig(Limits(max_batch_requests=1))
    loads = [rig.load([5], [n % PAGES]) for n in range(count)]
    rig.backup([0], [5])
    monkeypatch.setattr(Piece, "landed", property(landed))
    rig.finish()
    assert set(loads) < set(rig.unlocked)
    assert looks < 20 * count
