"""Token slots become pages only when they name whole pages in order (K10)."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from offload.core.slots import pages_from_slots
from offload.errors import GeometryError, RequestError

SLOTS = [8, 9, 10, 11, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "slots",
    [SLOTS, np.array(SLOTS, np.int32), torch.tensor(SLOTS), torch.tensor(SLOTS, dtype=torch.int32)],
    ids=["list", "int32 array", "int64 tensor", "int32 tensor"],
)
def test_whole_pages_in_any_order(slots: list[int]) -> None:
    """Whole pages come back as int64 page ids, in the order of the slots."""
    pages = pages_from_slots(slots, 4)
    assert pages.dtype == np.int64
    assert pages.tolist() == [2, 0]


def test_ranges_and_nothing() -> None:
    """A range works, and no slots are no pages."""
    assert pages_from_slots(range(16), 4).tolist() == [0, 1, 2, 3]
    assert pages_from_slots([], 4).tolist() == []
    assert pages_from_slots([3, 1], 1).tolist() == [3, 1]


BAD = {
    "six slots": ([0, 1, 2, 3, 4, 5], 4, 4),
    "shifted by one": (list(range(1, 9)), 1, 0),
    "out of order": ([0, 1, 3, 2], 3, 2),
    "torn": ([0, 1, 4, 5], 4, 2),
    "negative": ([-4, -3, -2, -1], -4, 0),
    "beyond the pool": (list(range(28, 36)), 32, 4),
    "far beyond": ([2**40 + 16 + i for i in range(4)], 2**40 + 16, 0),
    "torn at the start": ([2], 2, 0),
}


@pytest.mark.parametrize(("slots", "value", "position"), BAD.values(), ids=BAD.keys())
def test_bad_slots_are_named(slots: list[int], value: int, position: int) -> None:
    """The first bad slot and its position are in the error and its text."""
    with pytest.raises(RequestError) as caught:
        pages_from_slots(slots, 4, num_pages=8)
    assert (caught.value.value, caught.value.position) == (value, position)
    assert re.search(rf"slot {value} at position {position}\b", str(caught.value))


def test_page_size_is_positive() -> None:
    """A page size of zero is refused with both numbers."""
    with pytest.raises(GeometryError, match="page_size is 0, expected at least 1"):
        pages_from_slots([0], 0)
