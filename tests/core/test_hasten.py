"""Somebody more urgent shares a request: it goes earlier, wherever it is by then, and never ahead of its hazards."""

from __future__ import annotations

import pytest

from offload.core.batch import Limits
from offload.core.events import Cancel, Command, Ended, Failed, Flush, Hasten, Landed, Reorder
from offload.core.kinds import Direction
from tests.core.test_machine import Rig


def hastened(rig: Rig, request: int, due: float) -> list[Command]:
    """Return what is to be done when somebody shares a request who is due then."""
    return rig.machine.handle(Hasten(request, due))


def issued(rig: Rig) -> list[int]:
    """Return whom the next flush issues, first batch first."""
    before = set(rig.batches)
    rig.do(Flush())
    return [p.id for n in rig.batches if n not in before for p in rig.batches[n].pieces]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("due", [-1.0, 5.0])
def test_a_queued_request_takes_the_place_of_who_shares_it(
    due: float, direction: Direction
) -> None:
    """It goes before those that are less urgent, and keeps its place when it was as urgent already."""
    rig = Rig(Limits(max_batch_requests=1))
    first, last = (
        rig.submit(rig.request(direction, [page], [page], due=3.0 * page)) for page in range(2)
    )
    assert hastened(rig, last, due) == []
    assert issued(rig) == ([last] if due < 0 else [first])
    rig.finish()


def test_who_is_no_more_urgent_keeps_its_one_place() -> None:
    """A request that is shared by many who are due when it is, stands in the queue once."""
    rig = Rig()
    load = rig.load([0], [0], due=4.0)
    for due in (4.0, 4.0, 5.0):
        assert hastened(rig, load, due) == []
    assert [len(heap) for heap in rig.machine.in_flight.loads.heaps.values()] == [1]
    rig.finish()


def test_a_blocked_request_takes_its_place_when_it_is_let_go() -> None:
    """What is held back from outside is queued as urgent as it has become meanwhile."""
    rig = Rig(Limits(max_batch_requests=1))
    held = rig.load([1], [1], due=3.0, blockers=1)
    rig.load([0], [0], due=0.0)
    assert hastened(rig, held, -1.0) == []
    unblocked = rig.machine.find(held)
    assert unblocked is not None
    unblocked.blockers -= 1
    rig.machine._advance(unblocked)
    assert issued(rig) == [held]
    rig.finish()


def test_who_follows_another_still_follows() -> None:
    """However urgent, it is not issued before the one whose page it overwrites has landed."""
    rig = Rig()
    backup = rig.backup([0], [5], due=0.0)
    load = rig.load([1], [0], due=9.0)
    hastened(rig, load, -9.0)
    assert issued(rig) == [backup]
    rig.do(Landed(1, 1))
    assert issued(rig) == [load]
    rig.finish()


def test_a_batch_in_the_air_becomes_more_urgent() -> None:
    """Its stream is told once; less urgent ones that share it change nothing."""
    rig = Rig()
    load = rig.load([0], [0], due=4.0)
    rig.do(Flush())
    batch = rig.batches[1]
    assert hastened(rig, load, 6.0) == []
    assert hastened(rig, load, 2.0) == [Reorder(batch)]
    assert batch.due == 2.0
    assert hastened(rig, load, 2.0) == []
    rig.finish()


@pytest.mark.parametrize("due", [2.0, 1.0])
def test_a_mate_of_a_more_urgent_one_changes_nothing(due: float) -> None:
    """A batch is as urgent as its most urgent request, and a mate that is now as urgent makes it no more so."""
    rig = Rig()
    rig.load([0], [0], due=1.0)
    mate = rig.load([1], [1], due=4.0)
    rig.do(Flush())
    assert hastened(rig, mate, due) == []
    assert rig.batches[1].due == 1.0
    rig.finish()


def test_who_goes_again_alone_is_as_urgent_as_it_has_become() -> None:
    """A piece of a broken batch is queued at the place of who shares it, once."""
    rig = Rig()
    early, late = rig.load([0], [0], due=1.0), rig.load([1], [1], due=4.0)
    hastened(rig, late, 0.0)
    rig.do(Flush())
    rig.do(Failed(1, OSError()))
    rig.do(Ended(rig.batches.pop(1).id))
    assert issued(rig) == [late]
    assert issued(rig) == [early]
    rig.finish()


def test_one_that_has_left_is_not_hastened() -> None:
    """Nobody is queued again who was cancelled, or has landed."""
    rig = Rig()
    gone, queued = rig.load([0], [0]), rig.load([1], [1])
    rig.do(Cancel(gone))
    assert hastened(rig, gone, -1.0) == []
    assert hastened(rig, 99, -1.0) == []
    assert issued(rig) == [queued]
    rig.finish()
