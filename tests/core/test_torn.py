"""Half-written pages: who fails for them, until when, and who does not."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from offload.core.batch import State
from offload.core.events import Cancel, Ended, Failed, Flush, Landed
from offload.core.kinds import Direction
from offload.core.pages import PageAllocator
from offload.core.torn import Torn
from offload.errors import TransferFailed
from tests.core.test_machine import LAYERS, Rig


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(pages, np.int64)


# The pages ------------------------------------------------------------------------------------------


def test_torn_pages_are_whole_once_all_is_mended() -> None:
    """Each page remembers who tore it last; nothing is remembered of who has torn nothing any more."""
    torn = Torn(10, nullcontext())
    assert not torn
    assert torn.first(ids(0, 1)) is None
    torn.mend(ids(0))
    torn.tear(ids(1, 2, 3), 7, "seven")
    torn.tear(ids(3, 4), 9, "nine")
    assert len(torn) == 4
    assert torn.first(ids(0, 3, 1)) == (3, 9, "nine")
    assert torn.first(ids(2, 3)) == (2, 7, "seven")
    torn.mend(ids(1, 2, 5))
    assert torn._why == {9: "nine"}
    assert torn.first(ids(1, 2)) is None
    torn.mend(ids(3, 4))
    assert not torn
    assert torn._why == {}


def test_a_page_that_is_handed_out_anew_is_nobodys_concern() -> None:
    """`alloc` mends what it hands out, `mend` what it is told, repeated or not."""
    pages = PageAllocator(4)
    taken = pages.alloc(2)
    pages.table.torn.tear(taken, 1, "one")
    pages.free(taken)
    assert len(pages.table.torn) == 2
    pages.alloc(1)
    assert len(pages.table.torn) == 1
    pages.mend([1, 1, 0])
    assert not pages.table.torn


# Whom it concerns -------------------------------------------------------------------------------------


def broken_backup(rig: Rig, how: str, *, streaming: bool, behind: list[int]) -> int:
    """Submit a backup and a load behind it; end the backup after one layer; add the load's id to `behind`."""
    backup = rig.backup([0], [5], streaming=streaming)
    behind.append(rig.load([5], [1]))
    if streaming:
        rig.written(backup, 0)
    rig.do(Flush())
    rig.do(Landed(1, 1))
    if not streaming:
        rig.do(Failed(1, OSError("no")) if how == "fail" else Cancel(backup))
    rig.do(Ended(1))
    del rig.batches[1]
    if streaming:
        rig.do(Cancel(backup, OSError("no") if how == "fail" else None))
    return backup


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_a_load_behind_half_a_backup_fails(how: str, streaming: bool) -> None:
    """A load that was submitted behind a backup fails when that one ends half way, and says why."""
    rig, behind = Rig(), list[int]()
    backup = broken_backup(rig, how, streaming=streaming, behind=behind)
    rig.finish()
    ended = State.FAILED if how == "fail" else State.CANCELLED
    assert rig.settled == {backup: ended, behind[0]: State.FAILED}
    why = "failed (OSError('no'))" if how == "fail" else "was cancelled"
    assert rig.causes[behind[0]] == (
        f"it was to read what comes from backup {backup}, which {why} when 1 of {LAYERS} layers "
        "had landed."
    )
    error = rig.errors[behind[0]]
    assert isinstance(error, TransferFailed)
    assert error.transfer == f"backup {backup}"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_a_load_of_half_a_backup_fails_until_a_backup_is_whole(how: str, streaming: bool) -> None:
    """Later loads of those pages fail at once; one behind a fresh backup is done, and so are all after it."""
    rig = Rig()
    backup = broken_backup(rig, how, streaming=streaming, behind=[])
    request = rig.request(Direction.LOAD, [6, 5], [1, 2])
    rig.submitted.append(request.id)
    assert rig.do(request) == [("settle", request.id, "failed"), ("unlock", request.id)]
    assert rig.causes[request.id].startswith(f"host page 5 holds part of backup {backup}, which ")
    other, again = rig.load([6], [3]), rig.backup([3], [5])
    behind = rig.load([5], [4])
    rig.finish()
    later = rig.load([5], [4])
    rig.finish()
    assert {rig.settled[each] for each in (other, again, behind, later)} == {State.DONE}


def test_a_fresh_backup_that_moves_nothing_mends_nothing() -> None:
    """A load waits for the backup that would make its page whole, and fails when that is withdrawn."""
    rig = Rig()
    broken_backup(rig, "fail", streaming=False, behind=[])
    again = rig.backup([3], [5], blockers=1)
    load = rig.load([5], [4])
    assert rig.do(Cancel(again)) == [
        ("settle", again, "cancelled"), ("settle", load, "failed"), ("unlock", again), ("unlock", load),
    ]  # fmt: skip
    rig.finish()


def test_a_backup_that_had_not_begun_leaves_its_pages_whole() -> None:
    """Cancelled before it began, a backup is as if it had never been; failed, it lets down whoever relied on it."""
    for error, behind_ends in ((None, State.DONE), (TimeoutError(), State.FAILED)):
        rig = Rig()
        backup = rig.backup([0], [5])
        behind = rig.load([5], [1])
        rig.do(Flush())
        rig.do(Cancel(backup, error))
        rig.do(Ended(1, untouched=True))
        del rig.batches[1]
        later = rig.load([5], [2])
        rig.finish()
        assert (rig.settled[behind], rig.settled[later]) == (behind_ends, State.DONE)


def test_a_cancelled_backup_that_lands_all_the_same_is_whole() -> None:
    """Its mates carry a cancelled backup along to its end: nothing is torn."""
    rig = Rig()
    backup, mate = rig.backup([0], [5]), rig.backup([1], [6])
    load = rig.load([5], [2])
    rig.do(Flush())
    rig.do(Landed(1, 1))
    rig.do(Cancel(backup))
    rig.finish()
    assert (rig.settled[mate], rig.settled[load]) == (State.DONE, State.DONE)


def test_a_load_of_other_pages_of_the_request_is_not_let_down() -> None:
    """A load follows a broken backup only for the device page it overwrites: its bytes are whole."""
    rig = Rig()
    rig.backup([0], [5])
    load = rig.load([6], [0])
    rig.do(Flush())
    rig.do(Failed(1, OSError()))
    rig.finish()
    assert rig.settled[load] is State.DONE


def test_who_reads_half_a_load_fails_and_who_comes_later_does_not() -> None:
    """A backup behind a broken load fails; one that is submitted after that trusts what compute has written."""
    rig = Rig()
    load, backup = rig.load([5], [0]), rig.backup([0], [6])
    behind = rig.load([6], [1])
    rig.do(Flush())
    rig.do(Landed(1, 1))
    rig.do(Failed(1, OSError("no")))
    late = rig.backup([0], [7])
    rig.finish()
    assert [rig.settled[each] for each in (load, backup, behind)] == [State.FAILED] * 3
    assert rig.settled[late] is State.DONE


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_a_broken_load_had_landed_may_be_backed_up(layer: int) -> None:
    """A streaming backup fails with a load that it follows only for layers that did not land."""
    rig = Rig()
    rig.load([5], [0])
    rig.do(Flush())
    rig.do(Landed(1, 2))
    backup = rig.backup([0], [6], streaming=True)
    rig.written(backup, layer)
    rig.do(Failed(1, OSError("no")))
    rig.do(Ended(1))
    del rig.batches[1]
    for each in range(LAYERS):
        if each != layer:
            rig.written(backup, each)
    rig.finish()
    assert rig.settled[backup] is (State.DONE if layer < 2 else State.FAILED)


def test_what_the_end_of_the_loop_leaves_half_written_is_torn() -> None:
    """`forget` keeps in mind which pages a backup was at when nobody could decide any more."""
    rig = Rig()
    rig.backup([0], [5])
    rig.load([6], [1])
    rig.do(Flush())
    queued = rig.backup([2], [7])
    rig.machine.forget()
    assert len(rig.host.torn) == 1
    assert rig.host.torn.first(ids(5, 7)) is not None
    assert rig.machine.find(queued) is None


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_chains_may_be_long(how: str) -> None:
    """Thousands that follow one another leave when the first does, without nesting."""
    rig = Rig()
    first = rig.load([0], [0])
    rig.do(Flush())
    for _ in range(1500):
        rig.backup([0], [1])
        rig.load([1], [0])
    if how == "cancel":
        for request in rig.submitted[1:]:
            rig.do(Cancel(request))
        rig.do(Landed(1, LAYERS))
    else:
        rig.do(Failed(1, OSError()))
    rig.finish()
    last = State.CANCELLED if how == "cancel" else State.FAILED
    assert rig.settled[first] is (State.DONE if how == "cancel" else State.FAILED)
    assert {rig.settled[each] for each in rig.submitted[1:]} == {last}
