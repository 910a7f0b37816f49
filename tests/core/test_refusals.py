"""What core says when it refuses: every text in full, with the value and the position it carries."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np
import pytest

from offload.core.axes import Axes, require
from offload.core.geometry import Array, Component
from offload.core.kinds import Layout, PoolKind, parse
from offload.core.layout import host_geometry, read_array
from offload.core.page_ids import as_pages
from offload.core.pages import PageAllocator
from offload.core.slots import pages_from_slots
from offload.errors import OffloadError, OutOfPagesError, RequestError


class Colour(StrEnum):
    """Words that have no name of their own among the arguments."""

    RED = "red"


class Unreadable:
    """What numpy cannot make an array of."""

    def __array__(self, *_: object, **__: object) -> object:
        raise ValueError("no array here")


MHA = (Component("k", 64, 8, 128, 2), Component("v", 64, 8, 128, 2))
UNREADABLE = Unreadable()
TABLE = np.zeros((2, 2), np.int64)
FLOATS = np.zeros(2)


def owned() -> PageAllocator:
    """Return an allocator of eight pages, of which 0 to 2 are owned."""
    pages = PageAllocator(8)
    pages.alloc(3)
    return pages


def unlocked_twice() -> None:
    """Lock a page and unlock it beside another."""
    pages = PageAllocator(8)
    pages.lock([4])
    pages.unlock([4, 2])


def host(axes: str | Layout, **sizes: int) -> object:
    """Lay a pool of 64 tokens, 8 heads and 128 elements out."""
    order = axes if isinstance(axes, Layout) else Axes(axes)
    return host_geometry(PoolKind.MHA, MHA, order, num_layers=2, num_pages=3, **sizes)


def overlapping() -> object:
    """Read an array whose tokens share bytes."""
    part = Component("k", tokens=2, heads=1, dim=4, itemsize=2)
    array = Array("k", (3, 2, 4), (16, 4, 2), 48, separate=True)
    return read_array((part,), Axes("p t d"), array, num_layers=1, num_pages=3)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "page size": (
        lambda: pages_from_slots([0], 0),
        "pages_from_slots: page_size is 0, expected at least 1.",
    ),
    "slot in the middle of a page": (
        lambda: pages_from_slots([4, 5, 6, 7, 9], 4),
        (
            "slot 9 at position 4 starts a page, but is token 1 of page 2. "
            "Pass whole pages of 4 slots, each in ascending order."
        ),
    ),
    "slot that does not follow": (
        lambda: pages_from_slots([8, 9, 11, 10], 4),
        (
            "slot 11 at position 2 follows slot 9, so page 2 is torn or out of order. "
            "Pass whole pages of 4 slots, each in ascending order."
        ),
    ),
    "page cut short": (
        lambda: pages_from_slots([4, 5, 6, 7, 8, 9, 10], 4),
        (
            "slot 8 at position 4 starts page 2, of which only 3 of 4 slots are given. "
            "Pass whole pages."
        ),
    ),
    "unreadable": (
        lambda: as_pages(UNREADABLE, 8),  # type: ignore[arg-type]
        "pages cannot be read as an array: no array here",
    ),
    "single number": (
        lambda: as_pages(7, 8, what="host page"),  # type: ignore[arg-type]
        (
            "host pages are of type 'int'. Pass a list, a range, a numpy array or an integer tensor in "
            "host memory."
        ),
    ),
    "two dimensions": (
        lambda: as_pages(TABLE, 8),
        (
            "pages have 2 dimensions and need one. Pass a list, a range, a numpy array or an integer "
            "tensor in host memory."
        ),
    ),
    "floats": (
        lambda: as_pages(FLOATS, 8),
        "pages are float64, and page ids are integers.",
    ),
    "pool too large": (
        lambda: PageAllocator(1 << 31),
        "num_pages is 2147483648 and must be 0 to 2147483647.",
    ),
    "pool of no integer": (
        lambda: PageAllocator("8"),  # type: ignore[arg-type]
        "num_pages is '8' and must be an integer.",
    ),
    "pool of a truth value": (
        lambda: PageAllocator(True),
        "num_pages is True and must be an integer.",
    ),
    "alloc of no integer": (
        lambda: PageAllocator(8).alloc(1.5),  # type: ignore[arg-type]
        "alloc of 1.5 pages: it takes an integer.",
    ),
    "negative alloc": (
        lambda: PageAllocator(8).alloc(-2),
        "alloc of -2 pages: the number must not be negative.",
    ),
    "free of a free page": (
        lambda: owned().free([1, 5]),
        (
            "free of page 5 at position 1, which is not allocated. Each page can be freed once after "
            "each alloc. Nothing was freed."
        ),
    ),
    "page named twice": (
        lambda: owned().free([2, 0, 2]),
        (
            "free of page 2 at position 0, which stands in the list again. Name each page once. "
            "Nothing was freed."
        ),
    ),
    "unlock of what was never locked": (
        lambda: PageAllocator(8).unlock([4, 2]),
        ("unlock of page 4 at position 0, which is not locked. Each lock can be taken back once."),
    ),
    "unlock once too often": (
        unlocked_twice,
        ("unlock of page 2 at position 1, which is not locked. Each lock can be taken back once."),
    ),
    "k and v in one host array": (
        lambda: host("p l 2 t h d"),
        (
            "axes 'p l 2 t h d' of a host pool: axes are a '2', by which k and v share one, expected "
            "one array per component."
        ),
    ),
    "aligned pages inside": (
        lambda: host(Layout.LAYER_FIRST, page_align=2),
        (
            "page_align=2 of layout 'layer_first': outermost axis is l, expected p. Use "
            "'page_first', 'page_first_direct', 'page_head' or 'page_first_kv_split'."
        ),
    ),
    "aligned pages of an unnamed order": (
        lambda: host("l t p h d", page_align=512),
        (
            "page_align=512 of layout 'l t p h d': outermost axis is l, expected p. Use "
            "'page_first', 'page_first_direct', 'page_head' or 'page_first_kv_split'."
        ),
    ),
    "axes that are no text": (
        lambda: Axes(["p", "t", "d"]),  # type: ignore[arg-type]
        "axes: type is list, expected a string such as 'p l t h d'.",
    ),
    "missing axes": (
        lambda: require(Axes("p d"), {"p": 3, "l": 9, "2": 2, "t": 2, "h": 1, "d": 4}),
        "axes 'p d': t is absent, with size 2, expected among the axes, or of size 1.",
    ),
    "wrong letters": (
        lambda: Axes("p x d d"),
        (
            "axes 'p x d d': letter 'x' is unknown, expected one of 'p l 2 t h d'; "
            "letter 'd' is there 2 times, expected once."
        ),
    ),
    "overlapping strides": (
        overlapping,
        (
            "array 'k' of shape (3, 2, 4): byte strides are (16, 4, 2), expected such "
            "that no two elements share a byte."
        ),
    ),
    "unknown word without an argument's name": (
        lambda: parse(Colour, "blue"),
        "unknown colour 'blue'. Choices: 'red'.",
    ),
    "unknown kind": (
        lambda: parse(PoolKind, "gqa"),
        "unknown kind 'gqa'. Choices: 'mha', 'mla', 'rows', 'state'.",
    ),
    "unknown layout": (
        lambda: parse(Layout, "page_frist"),
        (
            "unknown layout 'page_frist'; did you mean 'page_first'? Choices: 'layer_first', "
            "'page_first', 'page_first_direct', 'page_head', 'page_first_kv_split'."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_in_full(name: str) -> None:
    """The text says what was wrong, where, and what to do."""
    act, text = REFUSALS[name]
    with pytest.raises(OffloadError) as caught:
        act()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("act", "value"),
    [
        (REFUSALS["unreadable"][0], UNREADABLE),
        (REFUSALS["single number"][0], 7),
        (REFUSALS["two dimensions"][0], TABLE),
        (REFUSALS["floats"][0], FLOATS),
        (REFUSALS["pool of no integer"][0], "8"),
        (REFUSALS["alloc of no integer"][0], 1.5),
        (REFUSALS["negative alloc"][0], -2),
    ],
)
def test_a_refusal_carries_the_value(act: Callable[[], object], value: object) -> None:
    """What was refused is in the error, for a caller that wants to look."""
    with pytest.raises(RequestError) as caught:
        act()
    assert caught.value.value is value or caught.value.value == value


@pytest.mark.parametrize("contiguous", [False, True])
def test_out_of_pages_says_what_was_asked(contiguous: bool) -> None:
    """The error tells a run that is missing from pages that are missing."""
    with pytest.raises(OutOfPagesError) as caught:
        PageAllocator(8).alloc(9, contiguous=contiguous)
    assert caught.value.contiguous is contiguous
