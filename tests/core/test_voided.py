"""Claims that are void at the end of a scheduler: its own, whole or half made, and nobody else's."""

from __future__ import annotations

import numpy as np
import pytest

from offload.core.hazards import HazardTable


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return page ids."""
    return np.array(pages, np.int64)


@pytest.mark.parametrize("write", [False, True])
def test_what_was_claimed_since_is_void(write: bool) -> None:
    """After `restore` nobody holds what was claimed later, and who waits for pages looks again."""
    table = HazardTable(8)
    assert table.counts() is None
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
