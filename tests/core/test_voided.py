"""Claims that are void at the end of a scheduler: its own, whole or half made, and nobody else's."""

from __future__ import annotations

import numpy as np
import pytest

from offload.core.claims import Claims
from offload.core.hazards import HazardTable
from tests.core.test_machine import Rig


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return page ids."""
    return np.array(pages, np.int64)


@pytest.mark.parametrize("write", [False, True])
def test_what_was_claimed_since_is_void(write: bool) -> None:
    """After `restore` nobody holds what was claimed later, and who waits for pages looks again."""
    table = HazardTable(8)
    assert table.counts() is None
    for _ in range(2):
        table.claim(2, ids(6), write=write)
        table.release(2, ids(6), write=write)
    table.claim(3, ids(1, 2), write=write)
    table.claim(4, ids(2, 5), write=not write)
    before = table.releases
    table.restore(None, -1)
    assert not table.held()
    assert table.releases == before + 1
    assert table.claim(5, ids(1, 2, 5), write=True) == ()
    table.release(5, ids(1, 2, 5), write=True)
    assert not table.held()


def test_what_was_claimed_before_stays() -> None:
    """`restore` gives back what `counts` has seen: writers and readers, and who these are."""
    table = HazardTable(8)
    table.claim(3, ids(1), write=True)
    table.claim(4, ids(2), write=False)
    counts = table.counts()
    assert counts is not None
    table.claim(5, ids(2, 6), write=False)
    table.claim(6, ids(7), write=True)
    counter = table._counter
    table.restore(counts, 4)
    assert table._counter is counter
    assert table.locked(ids(0, 1, 2, 6, 7)).tolist() == [False, True, True, False, False]
    assert table._reading == {4: 1}


def test_a_claim_that_was_left_half_made_is_void() -> None:
    """Counted, and not yet by whom: that is no holder's, and goes all the same."""
    table = HazardTable(8)
    table._counter[ids(3, 4)] = 1
    table.restore(None, -1)
    assert not table.busy(ids(3, 4))


def test_claims_are_voided_in_tables_of_one_owner() -> None:
    """What was there when the tables were opened stays, and so does all in a table that is another's by now."""
    mine, other = object(), object()
    tables = [(HazardTable(8), HazardTable(8)) for _ in range(2)]
    (host, device), (host_1, device_1) = tables
    host.claim(3, ids(1), write=False)
    device.claim(4, ids(2), write=True)
    claims = Claims(tables)
    assert claims.open() == 4
    for table in (host, device, host_1, device_1):
        table.claim(5, ids(1, 6), write=False)
        table.owner = mine
    device_1.owner = other
    claims.forget(mine)
    held = [
        np.flatnonzero(table.locked(np.arange(8))).tolist()
        for table in (host, device, host_1, device_1)
    ]
    assert held == [[1], [2], [], [1, 6]]
    readers = [list(table._reading) for table in (host, device, host_1, device_1)]
    assert readers == [[3], [], [], [5]]


def test_a_machine_voids_what_its_owner_holds() -> None:
    """At the end of a scheduler its requests are gone, and its claims in tables that are its own."""
    rig, mine = Rig(), object()
    rig.host.owner = mine
    rig.load([0], [1])
    rig.backup([2], [3], streaming=True)
    rig.machine.forget(mine)
    assert not rig.machine.pending()
    assert not rig.host.held()
    assert rig.device.held()
