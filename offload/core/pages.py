"""Who owns which page of a pool.

The allocator knows three states of a page: free, allocated, and *locked*, which here means freed by its
owner while bytes may still move. It asks the hazard table, and never hands out a page that the table
holds. Pages are integers in arrays; there is no object per page.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager

import attrs
import numpy as np

from offload.core.hazards import HazardTable, Pages
from offload.core.page_ids import MAX_PAGES, PagesLike, as_pages, first_repeat
from offload.errors import OutOfPagesError, RequestError, shown

_FREE, _ALLOCATED, _LEAVING = 0, 1, 2


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
        given: object = num_pages
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
            raise RequestError(f"num_pages is {shown(given)} and must be an integer.", value=given)
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
