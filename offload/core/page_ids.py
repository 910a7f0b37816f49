"""Page ids as callers pass them: read as arrays of integers, and checked against a pool's number of pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from offload.core.hazards import Pages
from offload.errors import RequestError

MAX_PAGES = 1 << 31
"""Page ids are below this: two of them fit into one sortable 64-bit key."""

_ORDER = np.arange(1024)
"""The start of every `arange`: making one for a small request costs a third of its check."""

_INT64 = np.dtype(np.int64)

_MANY = 65_536
"""Pages from which a map of one byte a page is the quicker check, as it mostly finds nothing."""

_FEW = 8
"""Pages up to which a loop in Python costs half of what numpy does, or less."""

_Plain: TypeAlias = "list[int] | Pages"

Bounds: TypeAlias = NDArray[np.uint64]

PagesLike = Iterable[SupportsIndex]
"""Lists, ranges, numpy arrays or integer tensors in host memory."""


def as_pages(pages: PagesLike, num_pages: int, *, what: str = "page") -> Pages:
    """Return page ids as a fresh int64 array.

    Args:
        num_pages: Ids are 0 to `num_pages - 1`.
        what: How errors call one of them, such as `device page`.

    Raises:
        RequestError: An id is out of range, or these are no page ids at all.
    """
    if type(pages) is np.ndarray and pages.dtype == np.int64 and pages.ndim == 1:
        array = pages.copy()
    else:
        array = _integers(pages, what)
    if array.dtype == object or np.count_nonzero(array.view(np.uint64) >= num_pages):
        wrong = np.flatnonzero((array < 0) | (array >= num_pages))
        if not len(wrong):
            return array.astype(np.int64)
        position = int(wrong[0])
        raise RequestError.out_of_range(
            what, value=int(array[position]), position=position, bound=num_pages
        )
    return array


def as_pair(one: PagesLike, other: PagesLike, bounds: Bounds) -> tuple[Pages, Pages] | None:
    """Return two equally long sides as fresh int64 arrays, where one look at both finds them right.

    Half the price of two `as_pages` for a small request. None means only that a closer look is needed.

    Args:
        bounds: Pages of either pool, as a column.
    """
    if not (_plain(one) and _plain(other)):
        return None
    if len(one) <= _FEW:
        return _few(one, other, bounds.item(0), bounds.item(1))
    try:
        both = np.array((one, other))
    except ValueError:  # not equally long, to begin with
        return None
    if both.dtype is not _INT64 or both.ndim != 2:
        return None
    ids = both.view(np.uint64)
    if both.shape[1] > _MANY:  # no temporary of two million truth values
        ids = ids.max(axis=1, keepdims=True)
    return None if np.count_nonzero(ids >= bounds) else (both[0], both[1])


def _few(one: _Plain, other: _Plain, bound: int, other_bound: int) -> tuple[Pages, Pages] | None:
    """Do the same with so few pages that plain integers are the quicker way."""
    if len(one) != len(other):
        return None
    for pages, most in ((one, bound), (other, other_bound)):
        for page in pages if isinstance(pages, list) else pages.tolist():
            if type(page) is not int or not 0 <= page < most:
                return None
    return np.array(one, np.int64), np.array(other, np.int64)


def _plain(pages: PagesLike) -> TypeGuard[_Plain]:
    """Return whether these are an int64 array, or a list that begins with an integer.

    Beside integers numpy takes truth values for 0 and 1, but a list of them is no list of pages.
    """
    if type(pages) is np.ndarray:
        return pages.dtype is _INT64 and pages.ndim == 1
    return type(pages) is list and bool(pages) and type(pages[0]) is int


def _integers(pages: PagesLike, what: str) -> Pages:
    """Return a fresh int64 array, or one of Python integers when they are too big for that."""
    try:
        array = np.asarray(pages)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RequestError(f"{what}s cannot be read as an array: {error}", value=pages) from error
    if array.ndim == 0:
        raise RequestError(
            f"{what}s are of type {type(pages).__name__!r}. Pass a list, a range, a numpy array or "
            "an integer tensor in host memory.",
            value=pages,
        )
    if array.ndim != 1:
        raise RequestError(
            f"{what}s have {array.ndim} dimensions and need one. Pass a list, a range, a numpy "
            "array or an integer tensor in host memory.",
            value=pages,
        )
    if not len(array):
        return np.zeros(0, np.int64)
    if array.dtype.kind == "i":
        return array.astype(np.int64)
    if array.dtype.kind == "u":
        return array.astype(np.int64) if array.max() < MAX_PAGES else array.astype(object)
    if array.dtype.kind in "fO":
        # Lists with integers from 2**63 on become floats or objects.
        exact = np.asarray(array if hasattr(pages, "dtype") else list(pages), dtype=object)
        if all(isinstance(page, int) for page in exact.tolist()):
            return exact
    raise RequestError(f"{what}s are {array.dtype}, and page ids are integers.", value=pages)


def first_repeat(pages: Pages, scratch: Pages) -> int | None:
    """Return the position of a page that stands at a later position too, or None.

    Args:
        scratch: One number per page of the pool; overwritten at `pages`.
    """
    n = len(pages)
    if n > _MANY:
        seen = np.zeros(len(scratch), np.bool_)
        seen[pages] = True
        if np.count_nonzero(seen) == n:
            return None
    order = _ORDER[:n] if n <= len(_ORDER) else np.arange(n)
    scratch[pages] = order
    lost = scratch[pages] != order
    return int(np.flatnonzero(lost)[0]) if np.count_nonzero(lost) else None
