"""Shortcuts for the common case answer what the long way answers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.core import hazards, page_ids
from offload.core.batch import Limits
from offload.core.budget import Budget
from offload.core.hazards import HazardTable
from offload.core.page_ids import PagesLike, as_pages, as_pair
from offload.errors import RequestError

PAGES = 8


@pytest.mark.parametrize("seed", range(20))
def test_claims_in_steps_follow_the_same_holders(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of many pages is made piece by piece, and nobody can tell."""
    draw = random.Random(seed)
    whole, stepped = HazardTable(PAGES), HazardTable(PAGES)
    held: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]], bool]] = []
    for holder in range(30):
        if held and draw.random() < 0.4:  # the oldest: it has nobody ahead
            number, pages, write = held.pop(0)
            whole.release(number, pages, write=write)
            with monkeypatch.context() as patch:
                patch.setattr(hazards, "_STEP", 2)
                stepped.release(number, pages, write=write)
        pages = np.array(draw.sample(range(PAGES), draw.randrange(1, PAGES)), np.int64)
        write = draw.random() < 0.5
        expected = whole.claim(holder, pages, write=write)
        with monkeypatch.context() as patch:
            patch.setattr(hazards, "_STEP", 2)
            assert list(stepped.claim(holder, pages, write=write)) == list(expected)
        held.append((holder, pages, write))
        every = np.arange(PAGES)
        assert stepped.locked(every).tolist() == whole.locked(every).tolist()


def _array(*pages: int, dtype: type = np.int64) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(pages, dtype)


SIDES: dict[str, PagesLike] = {
    "list": [1, 2],
    "array": _array(1, 2),
    "other array": _array(3, 0),
    "int32": _array(1, 2, dtype=np.int32),
    "truths": [True, False],
    "truth array": np.array([True, False]),
    "a truth second": [1, True],
    "floats": [1.0, 2.0],  # type: ignore[list-item]
    "half": [1, 1.5],  # type: ignore[list-item]
    "range": range(2),
    "longer": [0, 1, 2],
    "empty": [],
    "empty array": _array(),
    "below": [0, -1],
    "beyond": [0, PAGES],
    "far beyond": [0, 1 << 70],
    "nested": [[0], [1]],  # type: ignore[list-item]
    "square": np.zeros((2, 2), np.int64),
    "words": ["a", "b"],  # type: ignore[list-item]
    "nothing": 5,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("few", [-1, page_ids._FEW])
@pytest.mark.parametrize("one", SIDES)
@pytest.mark.parametrize("other", SIDES)
def test_a_pair_is_what_both_sides_are_alone(
    one: str, other: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both sides are taken in one step, each is what it would have been alone; else that step refuses.

    With plain integers, and as an array.
    """
    monkeypatch.setattr(page_ids, "_FEW", few)
    bounds = np.array([[PAGES], [PAGES]], np.uint64)
    pair = as_pair(SIDES[one], SIDES[other], bounds)
    if pair is None:
        return
    for found, name in zip(pair, (one, other), strict=True):
        expected = as_pages(SIDES[name], PAGES)
        assert found.dtype == np.int64
        assert found.tolist() == expected.tolist()
    assert len(pair[0]) == len(pair[1])


@pytest.mark.parametrize("few", [-1, page_ids._FEW])
@pytest.mark.parametrize("kind", ["list", "array"])
def test_plain_pages_are_taken_in_one_step(
    kind: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is taken for what callers pass: lists of integers and int64 arrays; and makes copies."""
    monkeypatch.setattr(page_ids, "_FEW", few)
    side = SIDES[kind]
    pair = as_pair(side, side, np.array([[3], [PAGES]], np.uint64))
    assert pair is not None
    pair[0][0] = 7
    assert as_pages(side, PAGES).tolist() == [1, 2]
    assert as_pair(side, side, np.array([[PAGES], [2]], np.uint64)) is None


def test_a_million_pages_are_checked_by_their_largest() -> None:
    """Many pages are checked without a truth value for each, negative ones too."""
    bounds = np.array([[100_000], [100_000]], np.uint64)
    good = np.arange(70_000)
    assert as_pair(good, good, bounds) is not None
    for wrong in (-1, 100_000):
        bad = good.copy()
        bad[5] = wrong
        assert as_pair(good, bad, bounds) is None
        with pytest.raises(RequestError, match="5"):
            as_pages(bad, 100_000)


@pytest.mark.parametrize(
    ("requests", "inflight", "most"),
    [(4, None, 4), (None, 6, 6), (4, 6, 4), (9, 6, 6), (None, None, None)],
)
def test_requests_of_a_batch_are_bounded_by_both_limits(
    requests: int | None, inflight: int | None, most: int | None
) -> None:
    """A batch holds no more requests than may be merged, nor than may still be in flight."""
    limits = Limits(max_batch_requests=requests, max_inflight_requests=inflight)
    assert Budget(limits).of_batch()[2] == most
