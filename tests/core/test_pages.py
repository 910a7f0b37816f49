"""The page allocator: no page has two owners, and none is handed out while bytes may move."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from offload.core.hazards import HazardTable
from offload.core.page_ids import as_pages, as_pair, first_repeat
from offload.core.pages import PageAllocator, PageStatistics
from offload.errors import OutOfPagesError, RequestError


def test_alloc_returns_fresh_distinct_pages() -> None:
    """Eight single allocations are pairwise distinct, and the ninth fails."""
    allocator = PageAllocator(8)
    pages = [allocator.alloc(1) for _ in range(8)]
    assert sorted(int(page[0]) for page in pages) == list(range(8))
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(1)
    assert (caught.value.needed, caught.value.free, caught.value.locked) == (1, 0, 0)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_returned_array_is_the_callers_own(contiguous: bool) -> None:
    """Changing the returned array changes nothing in the allocator, and it keeps no bigger one alive."""
    allocator = PageAllocator(8)
    pages = allocator.alloc(3, contiguous=contiguous)
    assert pages.dtype == np.int64
    assert pages.base is None
    assert pages.tolist() == [0, 1, 2]
    pages[:] = 7
    assert sorted(allocator.alloc(5).tolist()) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("bad", "value", "position"),
    [
        ([2], 2, 0),
        ([0, 0], 0, 0),
        ([1, 0, 1], 1, 0),
        ([0, 2], 2, 1),
        ([0, 7], 7, 1),
        ([0, -1], -1, 1),
        ([0, 8], 8, 1),
        ([0, 1 << 40], 1 << 40, 1),
        ([0, 1 << 80], 1 << 80, 1),
        (np.array([0, 1 << 63], np.uint64), 1 << 63, 1),
    ],
    ids=str,
)
def test_a_bad_free_changes_nothing(bad: list[int], value: int, position: int) -> None:
    """Freed twice, named twice, never allocated or out of range: refused, and the others stay allocated."""
    allocator = PageAllocator(8)
    allocator.alloc(3)
    allocator.free([2])
    before = allocator.statistics()
    with pytest.raises(RequestError) as caught:
        allocator.free(bad)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.value, caught.value.position) == (value, position)
    assert allocator.statistics() == before == PageStatistics(8, 6, 0, 2)
    assert sorted(allocator.alloc(6).tolist()) == [2, 3, 4, 5, 6, 7]


def test_free_twice_is_refused_the_second_time() -> None:
    """The free count never passes the number of pages."""
    allocator = PageAllocator(8)
    pages = allocator.alloc(8)
    allocator.free(pages)
    with pytest.raises(RequestError):
        allocator.free(pages)
    assert allocator.num_free == 8
    assert sorted(allocator.alloc(8).tolist()) == list(range(8))


def test_alloc_is_all_or_nothing() -> None:
    """Seven of eight pages are locked: two cannot be had, the free one stays free, and after an unlock they can."""
    allocator = PageAllocator(8)
    pages = allocator.alloc(7)
    allocator.lock(pages)
    allocator.free(pages)
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(2)
    assert (caught.value.needed, caught.value.free, caught.value.locked) == (2, 1, 7)
    assert allocator.statistics() == PageStatistics(8, 1, 7, 0)
    allocator.unlock(pages[:2])
    assert sorted(allocator.alloc(2).tolist() + allocator.alloc(1).tolist()) == [0, 1, 7]


def test_owned_pages_that_are_locked_count_as_allocated() -> None:
    """A pool full of owned pages promises nothing: waiting for their copies frees none of them."""
    allocator = PageAllocator(8)
    pages = allocator.alloc(7)
    allocator.lock(pages)
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(2)
    assert (caught.value.needed, caught.value.free, caught.value.locked) == (2, 1, 0)
    allocator.unlock(pages)
    allocator.free(pages)
    assert allocator.num_free == 8


def test_a_freed_page_waits_for_the_holders_of_the_table() -> None:
    """A page that a request holds comes back when that request releases it."""
    allocator = PageAllocator(2)
    pages = allocator.alloc(2)
    allocator.table.claim(1, pages[:1], write=True)
    allocator.free(pages)
    assert allocator.num_free == 1
    assert allocator.num_locked == 1
    allocator.table.release(1, pages[:1], write=True)
    assert allocator.num_free == 2
    assert allocator.num_locked == 0


def test_a_freed_locked_page_cannot_be_freed_again() -> None:
    """A page on its way back has no owner."""
    allocator = PageAllocator(4)
    pages = allocator.alloc(1)
    allocator.lock(pages)
    allocator.free(pages)
    with pytest.raises(RequestError):
        allocator.free(pages)
    allocator.unlock(pages)
    with pytest.raises(RequestError):
        allocator.free(pages)
    assert allocator.num_free == 4


def test_unlock_without_lock_is_refused() -> None:
    """Unlocking a page that is not locked changes no other page's lock."""
    allocator = PageAllocator(4)
    with pytest.raises(RequestError):
        allocator.unlock([1])
    allocator.lock([0])
    with pytest.raises(RequestError) as caught:
        allocator.unlock([0, 1])
    assert (caught.value.value, caught.value.position) == (1, 1)
    allocator.unlock([0])
    allocator.unlock([])


def test_contiguous_alloc_takes_the_first_run_that_is_long_enough() -> None:
    """Scattered pages do not make a run, and the error says that pages are there."""
    allocator = PageAllocator(10)
    pages = allocator.alloc(10)
    allocator.free(pages[[1, 4, 5, 7, 8, 9]])
    assert allocator.alloc(2, contiguous=True).tolist() == [4, 5]
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(4, contiguous=True)
    assert (caught.value.needed, caught.value.free) == (4, 4)
    assert allocator.alloc(3, contiguous=True).tolist() == [7, 8, 9]
    assert allocator.alloc(0, contiguous=True).tolist() == []
    assert allocator.alloc(1).tolist() == [1]


def test_nothing_is_a_legal_amount() -> None:
    """Allocating and freeing no page works, on an empty pool too."""
    allocator = PageAllocator(0)
    assert allocator.alloc(0).tolist() == []
    allocator.free([])
    with pytest.raises(OutOfPagesError):
        allocator.alloc(1)
    with pytest.raises(RequestError):
        allocator.alloc(-1)


@pytest.mark.parametrize("num_pages", [-1, 1 << 31])
def test_page_ids_stay_below_two_to_the_31(num_pages: int) -> None:
    """A pool whose ids would not fit into half a sort key is refused."""
    with pytest.raises(RequestError):
        PageAllocator(num_pages)


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_give_each_page_to_one_owner(seed: int) -> None:
    """Against sets: free, locked and allocated pages are what they should be after every step."""
    draw = random.Random(seed)
    allocator = PageAllocator(11)
    owned: set[int] = set()
    leaving: set[int] = set()
    locks = [0] * 11
    for _ in range(60):
        match draw.choice(("alloc", "alloc", "run", "free", "free", "lock", "unlock", "bad")):
            case "alloc" | "run" as how:
                n = draw.randint(0, 5)
                free = set(range(11)) - owned - leaving
                try:
                    pages = allocator.alloc(n, contiguous=how == "run").tolist()
                except OutOfPagesError as error:
                    refused = (error.free, error.locked)
                    assert refused == (len(free), len(leaving))
                    starts = [p for p in range(12 - n) if free >= set(range(p, p + n))]
                    assert not starts if how == "run" else n > len(free)
                else:
                    assert len(set(pages)) == n
                    assert free >= set(pages)
                    assert not n or how == "alloc" or pages == list(range(pages[0], pages[0] + n))
                    owned |= set(pages)
            case "free":
                pages = draw.sample(sorted(owned), draw.randint(0, len(owned)))
                allocator.free(pages)
                owned -= set(pages)
                leaving |= {page for page in pages if locks[page]}
            case "lock":
                pages = draw.sample(range(11), draw.randint(0, 4))
                allocator.lock(pages)
                for page in pages:
                    locks[page] += 1
            case "unlock":
                held = [page for page in range(11) if locks[page]]
                pages = draw.sample(held, draw.randint(0, len(held)))
                allocator.unlock(pages)
                for page in pages:
                    locks[page] -= 1
                leaving -= {page for page in pages if not locks[page]}
            case "bad":
                unowned = [page for page in range(11) if page not in owned]
                if unowned:
                    with pytest.raises(RequestError):
                        allocator.free([*sorted(owned), draw.choice(unowned)])
        assert allocator.statistics() == PageStatistics(
            11, 11 - len(owned) - len(leaving), len(leaving), len(owned)
        )


@pytest.mark.parametrize(
    "pages",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], dtype=object),
        np.array([9, 1, 9, 2, 9, 3])[1::2],
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ],
    ids=lambda pages: f"{type(pages).__name__}-{getattr(pages, 'dtype', '')}",
)
def test_page_arguments_take_what_callers_have(pages: list[int]) -> None:
    """Lists, ranges, arrays and tensors of any integer type become one fresh int64 array."""
    ids = as_pages(pages, 4)
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2, 3]
    ids[:] = 0
    assert list(pages) == [1, 2, 3] or [int(page) for page in pages] == [1, 2, 3]


@pytest.mark.parametrize(
    "pages",
    [
        [1.0, 2.0],
        [True],
        ["1"],
        [[1, 2]],
        3,
        [1, None],
        {1, 2},
        (page for page in (1, 2)),
        torch.tensor([1.0]),
        [[1], [1, 2]],
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ],
    ids=lambda pages: f"{type(pages).__name__}-{pages}"[:24],
)
def test_page_arguments_that_are_no_page_ids_are_refused(pages: list[int]) -> None:
    """Floats, booleans, texts, tables and single numbers are no lists of pages."""
    with pytest.raises(RequestError):
        as_pages(pages, 4)


def test_page_arguments_name_the_first_bad_value() -> None:
    """The error names what, the value, its position and the bound."""
    with pytest.raises(RequestError) as caught:
        as_pages([0, 3, -4, 9], 4, what="device page")
    assert (caught.value.value, caught.value.position) == (-4, 2)
    assert "device page -4" in str(caught.value)


def test_empty_page_arguments_are_legal() -> None:
    """An empty list, which numpy takes for floats, is an empty list of pages."""
    assert as_pages([], 4).dtype == np.int64
    assert as_pages(torch.zeros(0), 0).tolist() == []


@pytest.mark.parametrize("name", ["set", "generator", "NoneType", "str", "int"])
def test_what_is_no_list_of_pages_is_named(name: str) -> None:
    """A type that has no order, or no pages, is named, with those that are taken."""
    wrong: dict[str, object] = {
        "set": {1},
        "generator": (page for page in [1]),
        "NoneType": None,
        "str": "12",
        "int": 1,
    }
    said = f"host pages are of type {name!r}. Pass a list, a range, a numpy array or an integer"
    with pytest.raises(RequestError, match=said):
        as_pages(wrong[name], 8, what="host page")  # type: ignore[arg-type]


def test_pages_come_back_in_the_order_in_which_they_were_freed() -> None:
    """The last pages that were freed are handed out first, in the same order."""
    pages = PageAllocator(8)
    pages.alloc(8)
    pages.free([3, 1, 2])
    assert pages.alloc(3).tolist() == [3, 1, 2]


def test_alloc_takes_scattered_pages_unless_asked() -> None:
    """Without `contiguous` any free pages will do."""
    pages = PageAllocator(4)
    pages.alloc(4)
    pages.free([0, 2])
    assert sorted(pages.alloc(2).tolist()) == [0, 2]


def test_a_table_and_a_lock_are_used_as_given() -> None:
    """A table that is passed is the allocator's own, with its lock; a lock that is passed is for both."""
    lock, other = threading.RLock(), threading.RLock()
    table = HazardTable(4, lock=lock)
    assert PageAllocator(4, table=table).table is table
    assert PageAllocator(4, table=table).mutex is lock
    assert PageAllocator(4, table=table, lock=other).mutex is other
    made = PageAllocator(4, lock=lock)
    assert made.mutex is lock
    assert made.table.mutex is lock


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 65_536, 65_537, 70_000])
def test_repeats_are_found_in_lists_of_any_length(count: int) -> None:
    """The first page that stands there again is named, and a list of distinct pages has none."""
    scratch = np.full(count + 7, -1, np.int64)
    pages = np.arange(count)[::-1].copy()
    assert first_repeat(pages, scratch) is None
    if count > 1:
        pages[-1] = pages[count // 2 - 1]
        assert first_repeat(pages, scratch) == count // 2 - 1


@pytest.mark.parametrize("pages", [[2**63, -1], [2**63, 1], [1.5, 2**70], [2**70]])
def test_integers_of_any_size_are_compared_exactly(pages: list[int]) -> None:
    """A list that numpy reads as floats or objects still names its first bad integer."""
    with pytest.raises(RequestError) as caught:
        as_pages(pages, 8)
    if all(isinstance(page, int) for page in pages):
        assert (caught.value.value, caught.value.position) == (pages[0], 0)


def test_the_last_unsigned_page_is_exact() -> None:
    """Unsigned ids around the bound of all pools are the same numbers as signed ones."""
    pages = np.array([2**31 - 1], np.uint64)
    assert as_pages(pages, 2**31).tolist() == [2**31 - 1]
    with pytest.raises(RequestError) as caught:
        as_pages(np.array([3, 2**31], np.uint64), 2**31)
    assert (caught.value.value, caught.value.position) == (2**31, 1)


BOUNDS = np.array([[8], [4]], np.uint64)
PLAIN: list[tuple[object, object]] = [
    ([7, 0], [3, 1]),
    (np.array([7, 0]), np.array([3, 1])),
    ([7, 0], np.array([3, 1])),
    ([7], [3]),
]
CLOSER: dict[str, tuple[object, object]] = {
    "first beyond": ([8], [3]),
    "second beyond": ([7], [4]),
    "negative": ([-1], [0]),
    "not equally long": ([1, 2], [3]),
    "nothing": ([], []),
    "nothing on one side": ([1], []),
    "truth values": ([True], [1]),
    "truth values second": ([1], [True]),
    "floats": ([1.0], [1]),
    "floats second": ([1], [1.0]),
    "a float behind": ([1, 2.0], [1, 2]),
    "narrow integers": (np.array([1], np.int32), [1]),
    "narrow integers second": ([1], np.array([1], np.int32)),
    "both narrow": (np.array([1], np.int32), np.array([1], np.int32)),
    "unsigned": (np.array([1], np.uint64), np.array([1], np.uint64)),
    "tables": (np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)),
    "a range": (range(2), [0, 1]),
    "a tuple": ((1,), (1,)),
    "huge": ([2**70], [1]),
}


@pytest.mark.parametrize(("one", "other"), PLAIN)
def test_a_plain_pair_is_read_in_one_look(one: list[int], other: list[int]) -> None:
    """Two right sides of integers become two fresh int64 arrays."""
    pair = as_pair(one, other, BOUNDS)
    assert pair is not None
    assert [side.tolist() for side in pair] == [list(one), list(other)]
    assert [side.dtype for side in pair] == [np.int64] * 2
    assert not any(
        np.shares_memory(side, np.asarray(given))
        for side, given in zip(pair, (one, other), strict=True)
    )


@pytest.mark.parametrize("name", CLOSER)
def test_any_other_pair_needs_a_closer_look(name: str) -> None:
    """Whatever is not plainly right is left to the check that names what is wrong."""
    one, other = CLOSER[name]
    assert as_pair(one, other, BOUNDS) is None  # type: ignore[arg-type]


def test_mended_pages_are_whole() -> None:
    """`mend` takes pages as they come, repeated ones too, and forgets that they were torn."""
    pages = PageAllocator(8)
    pages.table.torn.tear(np.array([1, 2, 5]), 7, "it failed")
    pages.mend([5, 1, 5])
    assert len(pages.table.torn) == 1
    assert pages.table.torn.first(np.array([1, 2, 5])) == (2, 7, "it failed")
    with pytest.raises(RequestError, match="page 8"):
        pages.mend([8])


@pytest.mark.parametrize("count", [65_535, 65_536, 65_537])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [None, -1, "bound"])
def test_a_long_pair_is_held_against_both_bounds(
    count: int, side: int, bad: int | str | None
) -> None:
    """Where one maximum a side is the quicker check, each side still meets its own bound and no other."""
    bounds = np.array([[count], [count + 9]], np.uint64)
    given = [np.arange(count), np.arange(9, count + 9)]
    if bad is not None:
        given[side][count // 2] = bad if isinstance(bad, int) else int(bounds[side, 0])
    pair = as_pair(given[0], given[1], bounds)
    assert (pair is None) is (bad is not None)
    if pair is not None:
        assert [side.tolist() for side in pair] == [side.tolist() for side in given]


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_refusal_says_what_kind_of_pages_was_asked_for(contiguous: bool) -> None:
    """The error of an allocation keeps the number, what was there, and whether one run was needed."""
    allocator = PageAllocator(4)
    allocator.free(allocator.alloc(4)[[0, 2]])
    allocator.alloc(1)
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(2, contiguous=contiguous)
    error = caught.value
    assert (error.needed, error.free, error.locked, error.contiguous) == (2, 1, 0, contiguous)


REFUSED: dict[str, tuple[Callable[[PageAllocator], object], str, object]] = {
    "free of a free page": (
        lambda pages: pages.free([0, 5]),
        (
            "free of page 5 at position 1, which is not allocated. Each page can be freed once after each "
            "alloc. Nothing was freed."
        ),
        5,
    ),
    "free of a page twice": (
        lambda pages: pages.free([0, 1, 0]),
        (
            "free of page 0 at position 0, which stands in the list again. Name each page once. "
            "Nothing was freed."
        ),
        0,
    ),
    "alloc of a text": (
        lambda pages: pages.alloc("2"),  # type: ignore[arg-type]
        "alloc of '2' pages: it takes an integer.",
        "2",
    ),
    "alloc of a negative number": (
        lambda pages: pages.alloc(-2),
        "alloc of -2 pages: the number must not be negative.",
        -2,
    ),
    "a pool too large": (
        lambda pages: PageAllocator(1 << 31),
        "num_pages is 2147483648 and must be 0 to 2147483647.",
        None,
    ),
    "a table of pages": (
        lambda pages: pages.lock([[1, 2]]),  # type: ignore[list-item]
        (
            "pages have 2 dimensions and need one. Pass a list, a range, a numpy array or an integer tensor "
            "in host memory."
        ),
        [[1, 2]],
    ),
    "a single number": (
        lambda pages: pages.lock(3),  # type: ignore[arg-type]
        (
            "pages are of type 'int'. Pass a list, a range, a numpy array or an integer tensor in host "
            "memory."
        ),
        3,
    ),
    "floats": (
        lambda pages: pages.lock([1.5]),  # type: ignore[list-item]
        "pages are float64, and page ids are integers.",
        [1.5],
    ),
    "truth values": (
        lambda pages: pages.lock([True]),
        "pages are bool, and page ids are integers.",
        [True],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_told_in_full(case: str) -> None:
    """Every refusal of the allocator says what was asked, what is wrong and what will do, and keeps the value."""
    call, text, value = REFUSED[case]
    allocator = PageAllocator(8)
    allocator.alloc(3)
    with pytest.raises(RequestError) as caught:
        call(allocator)
    assert str(caught.value) == text
    assert caught.value.value == value
    assert allocator.statistics() == PageStatistics(8, 5, 0, 3)


def test_pages_that_numpy_cannot_read_are_told_with_its_reason() -> None:
    """Lists of different lengths are refused in numpy's words, with numpy's error as the cause."""
    ragged = [[1], [1, 2]]
    with pytest.raises(RequestError, match=r"^host pages cannot be read as an array: ") as caught:
        as_pages(ragged, 8, what="host page")  # type: ignore[arg-type]
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert str(caught.value).endswith(str(cause))
    assert caught.value.value is ragged


def test_a_repr_tells_how_many_pages_are_free() -> None:
    """The allocator shows what it has left of what it began with."""
    allocator = PageAllocator(8)
    allocator.alloc(3)
    assert repr(allocator) == "<PageAllocator 5/8 free>"


def test_pages_that_are_handed_out_anew_are_whole() -> None:
    """An allocation forgets what tore its pages, and leaves those of others torn."""
    pages = PageAllocator(8)
    pages.table.torn.tear(np.array([1, 2, 5]), 7, "it failed")
    assert pages.alloc(3).tolist() == [0, 1, 2]
    assert pages.table.torn.first(np.arange(8)) == (5, 7, "it failed")
    assert len(pages.table.torn) == 1
