"""Page ids: checked arguments, and who owns which page of a pool.

The allocator knows three states of a page: free, allocated, and *locked*, which here means freed by its
owner while bytes may still move. It asks the hazard table, and never hands out a page that the table
holds. Pages are integers in arrays; there is no object per page.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import SupportsIndex, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from offload.core.hazards import HazardTable, Pages
from offload.errors import OutOfPagesError, RequestError, shown

MAX_PAGES = 1 << 31
"""Page ids are below this: two of them fit into one sortable 64-bit key."""

_ORDER = np.arange(1024)
"""The start of every `arange`: making one for a small request costs a third of its check."""

_INT64 = np.dtype(np.int64)

_MANY = 65_536
"""Pages from which a map of one byte a page is the quicker check, as it mostly finds nothing."""

_FREE, _ALLOCATED, _LEAVING = 0, 1, 2


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


def _plain(pages: PagesLike) -> bool:
    """Return whether these are an int64 array, or a list that begins with an integer.

    Beside integers numpy takes truth values for 0 and 1, but a list of them is no list of pages.
    """
    if type(pages) is np.ndarray:
        return pages.dtype is _INT64
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


@attrs.frozen
class PageStatistics:
    """Where the pages of an allocator are. The last three add up to the first."""

    num_pages: int
    """All pages."""

    num_free: int
    """Pages that `alloc` can hand out now."""

    num_locked: int
    """Pages that were freed while bytes may still move; they become free by themselves."""

    num_allocated: int
    """Pages that somebody owns, whether bytes move there or not."""


class PageAllocator:
    """Page ids of one pool: all or nothing, each to one owner at a time.

    Args:
        num_pages: Pages of the pool.
        lock: Held around every operation, and around those of a table that is made here.
        table: The pool's hazard table; None makes one.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        lock: AbstractContextManager[object] | None = None,
        table: HazardTable | None = None,
    ) -> None:
        if not 0 <= num_pages < MAX_PAGES:
            raise RequestError(f"num_pages is {num_pages} and must be 0 to {MAX_PAGES - 1}.")
        self.table = HazardTable(num_pages, lock=lock) if table is None else table
        self.mutex = self.table.mutex if lock is None else lock
        """Held around every operation; a caller that combines several holds it around them."""
        self._state = np.zeros(num_pages, np.uint8)
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._scratch = np.empty(num_pages, np.int64)
        self._free = num_pages
        self._leaving: list[Pages] = []
        self._looked = 0

    @property
    def num_pages(self) -> int:
        """All pages of the pool."""
        return len(self._state)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        with self.mutex:
            self._collect()
            return self._free

    @property
    def num_locked(self) -> int:
        """Pages that were freed while bytes may still move."""
        return self.statistics().num_locked

    def alloc(self, n: int, contiguous: bool = False) -> Pages:
        """Take `n` pages.

        Args:
            contiguous: Only ids `p, p + 1, ...` will do.

        Returns:
            A fresh int64 array. The caller owns these pages until `free`.

        Raises:
            OutOfPagesError: There are not so many. None was taken.
        """
        try:
            n = operator.index(n)
        except TypeError:
            raise RequestError(
                f"alloc of {shown(n)} pages: it takes an integer.", value=n
            ) from None
        if n < 0:
            raise RequestError(f"alloc of {n} pages: the number must not be negative.", value=n)
        with self.mutex:
            if n > self._free or contiguous:
                self._collect()
            pages = self._take_run(n) if contiguous else self._take(n)
            self._state[pages] = _ALLOCATED
            if self.table.torn:
                self.table.torn.mend(pages)  # what they held is nobody's concern
            return pages

    def free(self, pages: PagesLike) -> None:
        """Give pages back. Those that are locked are handed out again only after their unlock.

        Raises:
            RequestError: A page is not allocated, or is given twice. No page was freed.
        """
        with self.mutex:
            ids = self.check_owned(pages)
            held = self.table.locked(ids)
            if np.count_nonzero(held):
                self._leaving.append(ids[held])
                self._looked = -1
                self._state[ids[held]] = _LEAVING
                ids = ids[~held]
            self._put(ids)

    def check_owned(self, pages: PagesLike) -> Pages:
        """Return page ids that `free` would take, as a fresh int64 array. Hold `mutex` until then.

        Raises:
            RequestError: A page is not allocated, or is given twice.
        """
        ids = as_pages(pages, self.num_pages)
        wrong = self._state[ids] != _ALLOCATED
        if np.count_nonzero(wrong):
            position = int(np.flatnonzero(wrong)[0])
            why = "is not allocated. Each page can be freed once after each alloc."
        else:
            repeat = first_repeat(ids, self._scratch)
            if repeat is None:
                return ids
            position, why = repeat, "stands in the list again. Name each page once."
        page = int(ids[position])
        raise RequestError(
            f"free of page {page} at position {position}, which {why} Nothing was freed.",
            value=page,
            position=position,
        )

    def lock(self, pages: PagesLike) -> None:
        """Keep pages from being handed out again after `free`, until `unlock`. Locks count."""
        self.table.lock(as_pages(pages, self.num_pages))

    def unlock(self, pages: PagesLike) -> None:
        """Take back one `lock`.

        Raises:
            RequestError: A page has no such lock. Nothing was changed.
        """
        self.table.unlock(as_pages(pages, self.num_pages))

    def mend(self, pages: PagesLike) -> None:
        """Say that pages were written whole by other means than a backup.

        A backup that fails or is cancelled half way leaves its host pages torn, and every load of them
        fails until another backup has written them, `alloc` has handed them out anew, or this was called.
        """
        self.table.torn.mend(np.unique(as_pages(pages, self.num_pages)))

    def statistics(self) -> PageStatistics:
        """Return where the pages are now."""
        with self.mutex:
            self._collect()
            locked = sum(map(len, self._leaving))
            return PageStatistics(
                num_pages=self.num_pages,
                num_free=self._free,
                num_locked=locked,
                num_allocated=self.num_pages - self._free - locked,
            )

    def __repr__(self) -> str:
        return f"<PageAllocator {self.num_free}/{self.num_pages} free>"

    def _take(self, n: int) -> Pages:
        if n > self._free:
            raise self._out_of_pages(n, contiguous=False)
        self._free -= n
        return self._stack[self._free : self._free + n][::-1].copy()

    def _take_run(self, n: int) -> Pages:
        """Take the first run of free pages that is long enough. Looks at every page's state."""
        edges = np.flatnonzero(np.diff(self._state == _FREE, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        enough = np.flatnonzero(ends - starts >= n)
        if n and not len(enough):
            raise self._out_of_pages(n, contiguous=True)
        start = int(starts[enough[0]]) if n else 0
        stack = self._stack[: self._free]
        stack = stack[(stack < start) | (stack >= start + n)]
        self._free = len(stack)
        self._stack[: self._free] = stack
        return np.arange(start, start + n)

    def _put(self, pages: Pages) -> None:
        """Push pages so that they come back in the order in which they were freed."""
        self._state[pages] = _FREE
        self._stack[self._free : self._free + len(pages)] = pages[::-1]
        self._free += len(pages)

    def _collect(self) -> None:
        """Take back freed pages whose locks are gone; nothing to do when none was released since."""
        if not self._leaving or self._looked == self.table.releases:
            return
        self._looked = self.table.releases
        leaving = np.concatenate(self._leaving)
        held = self.table.locked(leaving)
        self._put(leaving[~held])
        self._leaving = [leaving[held]] if np.count_nonzero(held) else []

    def _out_of_pages(self, n: int, *, contiguous: bool) -> OutOfPagesError:
        locked = sum(map(len, self._leaving))
        return OutOfPagesError(needed=n, free=self._free, locked=locked, contiguous=contiguous)
