"""What pieces claim and rely on, and what the machine says of those who wait for several."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from offload.core.batch import Piece, StreamState
from offload.core.claims import Claims
from offload.core.events import Flush, Landed
from offload.core.hazards import HazardTable
from offload.core.kinds import Direction
from offload.core.request import Pages, Request
from offload.core.torn import Torn
from offload.errors import RequestError
from tests.core.test_machine import LAYERS, Rig


def ids(*pages: int) -> Pages:
    """Return page ids."""
    return np.array(pages, np.int64)


def piece(number: int, direction: Direction, host: Pages, device: Pages, member: int = 0) -> Piece:
    """Return a whole request."""
    request = Request(number, direction, ((member, host, device),), "r", 1, len(host), 0.0)
    return Piece(number, request, 0, LAYERS, 0)


def claims() -> Claims:
    """Return claims over two members of eight pages on each side."""
    return Claims([(HazardTable(8), HazardTable(8)) for _ in range(2)])


def test_a_repr_says_how_far_it_is() -> None:
    """Stories tell a request by number, direction, layers and state."""
    assert repr(piece(7, Direction.LOAD, ids(1), ids(2))) == ("<request 7 load 0/3 layers, queued>")


@pytest.mark.parametrize(
    ("ahead", "told"),
    [
        (piece(1, Direction.LOAD, ids(5), ids(0)), True),
        (piece(1, Direction.BACKUP, ids(5), ids(0)), False),
        (piece(1, Direction.BACKUP, ids(6), ids(0)), True),
        (piece(1, Direction.BACKUP, ids(5), ids(0), member=1), True),
    ],
    ids=["a load", "the backup that writes it", "another backup", "another member's"],
)
def test_a_torn_page_is_waited_for_only_behind_who_writes_it(ahead: Piece, told: bool) -> None:
    """A load that follows the next backup of a torn page may read it; behind anybody else it may not."""
    mine = claims()
    mine.tables[0][0].torn.tear(ids(5), 9, "a failed backup")
    load = piece(2, Direction.LOAD, ids(5), ids(0))
    load.follows = {ahead}
    error = mine.torn(load)
    assert (error is not None) is told
    if error is not None:
        assert "host page 5 holds part of a failed backup" in str(error.__cause__ or error)


def test_one_layer_of_a_backup_is_no_writer_of_the_host_page() -> None:
    """Only the backup itself claims host pages; a layer of it is not what a load waits for."""
    mine = claims()
    mine.tables[0][0].torn.tear(ids(5), 9, "a failed backup")
    owner = piece(1, Direction.BACKUP, ids(5), ids(0))
    layer = Piece(3, owner.request, 0, 1, 0, parent=owner)
    load = piece(2, Direction.LOAD, ids(5), ids(0))
    load.follows = {layer}
    assert mine.torn(load) is not None


def test_claims_are_of_both_sides() -> None:
    """A load reads host and writes device pages; whom it follows, and on whose bytes it relies, are told apart."""
    mine = claims()
    backup = piece(1, Direction.BACKUP, ids(3), ids(0))
    assert mine.take(backup) == ([], [])
    load = piece(2, Direction.LOAD, ids(3), ids(0))
    assert mine.ahead_of(load.request) == {1}
    assert mine.take(load) == ([1], [1])
    assert mine.undisturbed(load.request)
    other = piece(3, Direction.BACKUP, ids(4), ids(0))
    assert mine.take(other) == ([], [2])
    assert mine.undisturbed(load.request)
    overwritten = piece(4, Direction.BACKUP, ids(3), ids(1))
    assert mine.take(overwritten) == ([1, 2], [])
    assert not mine.undisturbed(load.request)
    for each in (overwritten, other, load, backup):
        mine.release(each)
    assert not any(table.held() for pair in mine.tables for table in pair)


def test_layers_of_a_backup_follow_writers_alone() -> None:
    """What is written into a device page goes before a layer that reads it; other readers do not matter."""
    mine = claims()
    mine.take(piece(1, Direction.LOAD, ids(3), ids(0)))
    mine.take(piece(2, Direction.BACKUP, ids(4), ids(0)))
    assert mine.ahead_of_layers(piece(3, Direction.BACKUP, ids(5), ids(0))) == {1}
    assert mine.ahead_of_layers(piece(3, Direction.BACKUP, ids(5), ids(1))) == set()


def test_an_endless_wait_is_told() -> None:
    """The refusal names the page, the backup and both ways out."""
    rig = Rig()
    stream = rig.backup([0, 4], [5, 6], streaming=True)
    with pytest.raises(RequestError) as caught:
        rig.do(rig.request(Direction.LOAD, [6, 7], [4, 0]))
    assert str(caught.value) == (
        "load writes device page 0, and waits for the streaming backup "
        f"{stream}, which has yet to read that page: neither could go first. Load into other pages, "
        "or submit it after the forward's last layer_written."
    )


@pytest.mark.parametrize("side", ["host", "device"])
def test_pages_of_a_lost_device_are_refused_for_ever(side: str) -> None:
    """What a scheduler before left claimed is refused by side; free pages and later claims are not."""
    mine = claims()
    assert mine.open() == -1
    mine.refuse_orphans(piece(1, Direction.LOAD, ids(3), ids(0)).request)
    mine.take(piece(4, Direction.LOAD, ids(3), ids(0)))
    after = Claims(mine.tables)
    assert after.open() == 4
    after.refuse_orphans(piece(5, Direction.LOAD, ids(2), ids(1)).request)
    taken = piece(6, Direction.BACKUP, ids(2), ids(1))
    after.take(taken)
    after.refuse_orphans(piece(7, Direction.LOAD, ids(2), ids(1)).request)
    bad = piece(
        8, Direction.LOAD, ids(3 if side == "host" else 2), ids(0 if side == "device" else 1)
    )
    with pytest.raises(RequestError, match=f"the {side} pages of this request include some"):
        after.refuse_orphans(bad.request)


def test_torn_pages_are_counted_by_who_tore_them() -> None:
    """Somebody who tears more pages is told of all of them; holder 0 is somebody, too."""
    torn = Torn(10, nullcontext())
    torn.tear(ids(1, 2), 0, "zero")
    torn.tear(ids(3), 0, "zero")
    assert len(torn) == 3
    assert torn.first(ids(5, 2)) == (2, 0, "zero")
    torn.mend(ids(1, 2))
    assert len(torn) == 1


def test_a_batch_behind_two_is_extended_only_when_both_go_on() -> None:
    """A load behind two others goes as far as the slower one, and hears nothing while that stands still."""
    rig = Rig()
    first = rig.backup([0], [5], route="a")
    second = rig.backup([1], [6], route="b")
    rig.do(Flush())
    rig.do(Flush())
    behind = rig.load([7, 8], [0, 1])
    assert rig.do(Flush()) == []
    assert rig.do(Landed(1, 1)) == [("layer", 1, 1)]
    assert rig.do(Landed(2, 1)) == [("layer", 2, 1)]
    assert rig.do(Flush()) == [("issue", 3, [behind], 1)]
    assert rig.do(Landed(1, 2)) == [("layer", 1, 2)]
    assert rig.do(Landed(2, 2)) == [("layer", 2, 2), ("extend", 3, 2)]
    rig.finish()
    assert [first, second, behind] == rig.submitted


@pytest.mark.parametrize("layers", [0, 1])
def test_a_backup_that_had_begun_is_torn_when_all_is_forgotten(layers: int) -> None:
    """A streaming backup between two layers has written something; one without a layer has not."""
    rig = Rig()
    backup = rig.backup([0], [5], streaming=True)
    for layer in range(layers):
        rig.written(backup, layer)
        rig.do(Flush())
        rig.do(Landed(layer + 1, layer + 1))
    rig.machine.forget()
    assert len(rig.host.torn) == layers


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("member", [0, 1])
def test_a_page_that_is_never_free_again_is_told_in_full(side: str, member: int) -> None:
    """The refusal names the side in every member, and says what to do; holder 0 may be who is lost."""
    mine = claims()
    mine.take(piece(0, Direction.LOAD, ids(3), ids(4), member))
    after = Claims(mine.tables)
    assert after.open() == 0
    host, device = (ids(2, 3), ids(0, 1)) if side == "host" else (ids(2, 5), ids(0, 4))
    after.refuse_orphans(piece(1, Direction.BACKUP, host, device, 1 - member).request)
    with pytest.raises(RequestError) as caught:
        after.refuse_orphans(piece(1, Direction.BACKUP, host, device, member).request)
    assert str(caught.value) == (
        f"the {side} pages of this request include some that a scheduler with a lost device had in the "
        "air: they are never free again. Use others."
    )


def group(number: int, direction: Direction, *, streaming: bool = False) -> Piece:
    """Return a request on two page pairs in each of two members, none of them alike."""
    parts = ((0, ids(1, 2), ids(3, 4)), (1, ids(5, 6), ids(7, 0)))
    request = Request(number, direction, parts, "r", 1, 4, 0.0, streaming=streaming)
    return Piece(number, request, 0, LAYERS, 0)


def held(mine: Claims) -> list[list[list[int]]]:
    """Return the locked pages of each member, as (host, device)."""
    every = np.arange(8)
    return [
        [np.flatnonzero(table.locked(every)).tolist() for table in pair] for pair in mine.tables
    ]


@pytest.mark.parametrize("direction", Direction)
def test_a_request_claims_both_sides_of_every_member(direction: Direction) -> None:
    """All its pages in all members are locked, those alone, and none when it has released."""
    mine = claims()
    whole = group(1, direction)
    assert mine.take(whole) == ([], [])
    assert held(mine) == [[[1, 2], [3, 4]], [[5, 6], [0, 7]]]
    mine.release(whole)
    assert held(mine) == [[[], []], [[], []]]


def test_a_streaming_backup_claims_host_pages_and_its_layers_device_pages() -> None:
    """The backup locks one side of every member when it is submitted, and each layer the other when written."""
    mine = claims()
    stream = group(1, Direction.BACKUP, streaming=True)
    stream.stream = StreamState()
    assert mine.take(stream) == ([], [])
    assert held(mine) == [[[1, 2], []], [[5, 6], []]]
    layer = Piece(2, stream.request, 1, 2, 0, parent=stream)
    assert mine.take(layer) == ([], [])
    assert held(mine) == [[[1, 2], [3, 4]], [[5, 6], [0, 7]]]
    mine.release(layer)
    assert held(mine) == [[[1, 2], []], [[5, 6], []]]
    mine.release(stream)
    assert held(mine) == [[[], []], [[], []]]


def crowded(member: int) -> Claims:
    """Return claims where 1 writes and 4 reads a host page, 2 writes and 3 reads a device page of a member."""
    mine = claims()
    host, device = ((1, 4), (5, 7))[member]
    mine.take(piece(1, Direction.BACKUP, ids(host), ids(2), member))
    mine.take(piece(2, Direction.LOAD, ids(0), ids(device), member))
    mine.take(piece(3, Direction.BACKUP, ids(7), ids(device), member))
    mine.take(piece(4, Direction.LOAD, ids(host), ids(1), member))
    return mine


@pytest.mark.parametrize("member", [0, 1])
def test_whoever_is_in_the_way_of_one_member_is_in_the_way_of_the_request(member: int) -> None:
    """Whom a request follows is gathered from both sides of all members, and a look tells the same."""
    mine, load = crowded(member), group(5, Direction.LOAD)
    assert mine.ahead_of(load.request) == {1, 2, 3}
    assert mine.take(load) == ([2, 3], [1])
    mine, backup = crowded(member), group(5, Direction.BACKUP)
    assert mine.ahead_of_layers(backup) == {2}
    assert mine.take(backup) == ([1, 4], [2])


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("direction", Direction)
def test_a_later_writer_of_any_side_disturbs_a_load(member: int, direction: Direction) -> None:
    """A backup over a host page or a load into a device page ends it, in any member; readers of either do not."""
    mine = claims()
    load = group(1, Direction.LOAD)
    mine.take(load)
    host, device = ((1, 4), (5, 7))[member]
    reading = (ids(host), ids(2)) if direction is Direction.LOAD else (ids(7), ids(device))
    mine.take(piece(2, direction, *reading, member))
    assert mine.undisturbed(load.request)
    writing = (ids(0), ids(device)) if direction is Direction.LOAD else (ids(host), ids(2))
    mine.take(piece(3, direction, *writing, member))
    assert not mine.undisturbed(load.request)


@pytest.mark.parametrize("member", [0, 1])
def test_host_pages_are_torn_and_mended_in_every_member(member: int) -> None:
    """A torn backup is told by number and reason whichever member is loaded, until another has written it."""
    mine = claims()
    mine.tear(group(4, Direction.BACKUP), "a backup that failed")
    load = piece(5, Direction.LOAD, ids(0, (2, 6)[member]), ids(1, 2), member)
    error = mine.torn(load)
    assert error is not None
    assert str(error.__cause__ or error).endswith(
        f"host page {(2, 6)[member]} holds part of a backup that failed. "
        "Back that page up again, or free it."
    )
    assert error.transfer == "backup 4"
    assert mine.torn(piece(5, Direction.LOAD, ids(0, 3), ids(1, 2), member)) is None
    mine.mend(piece(6, Direction.BACKUP, ids(0, (2, 6)[member]), ids(1, 2), member))
    assert mine.torn(load) is None
    assert [len(host.torn) for host, _ in mine.tables] == ([1, 2], [2, 1])[member]
    mine.mend(group(7, Direction.BACKUP))
    assert [len(host.torn) for host, _ in mine.tables] == [0, 0]
