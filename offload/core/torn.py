"""Host pages that hold part of a backup: which, since when, and why nobody should read them.

A backup that fails or is cancelled half way leaves pages with some layers of the new content and some of
the old. Bytes cannot tell, so it is noted here until the page is written whole, or has a new owner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]


class Torn:
    """The torn pages of one pool. Costs nothing as long as there are none.

    Args:
        num_pages: Pages of the pool.
        lock: Held around every operation.
    """

    __slots__ = ("_by", "_lock", "_num_pages", "_why", "left")

    def __init__(self, num_pages: int, lock: AbstractContextManager[object]) -> None:
        self._num_pages = num_pages
        self._lock = lock
        self._by: Pages | None = None  # page -> who tore it; -1 for nobody
        self.left: dict[int, int] = {}
        """On how many pages, by who tore them. Empty is all whole."""
        self._why: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self.left)

    def __len__(self) -> int:
        return sum(self.left.values())

    def tear(self, pages: Pages, by: int, why: str) -> None:
        """Note that `pages` hold part of what a request wrote."""
        with self._lock:
            self._forget(pages)
            if self._by is None:
                self._by = np.full(self._num_pages, -1, np.int64)
            self._by[pages] = by
            self.left[by] = self.left.get(by, 0) + len(pages)
            self._why[by] = why

    def mend(self, pages: Pages) -> None:
        """Note that `pages` are whole again, or that what they hold is nobody's concern."""
        if self.left:
            with self._lock:
                self._forget(pages)

    def first(self, pages: Pages) -> tuple[int, int, str] | None:
        """Return the first of `pages` that is torn, who tore it, and why; None when all are whole."""
        if not self.left:
            return None
        with self._lock:
            if self._by is None:
                return None
            by = self._by[pages]
            found = np.flatnonzero(by >= 0)
            if not len(found):
                return None
            position = int(found[0])
            number = int(by[position])
            return int(pages[position]), number, self._why[number]

    def _forget(self, pages: Pages) -> None:
        if self._by is None or not self.left:
            return
        by = self._by[pages]
        torn = by >= 0
        self._by[pages[torn]] = -1
        who, counts = np.unique(by[torn], return_counts=True)
        for number, count in zip(who.tolist(), counts.tolist(), strict=True):
            self.left[number] -= count
            if not self.left[number]:
                del self.left[number], self._why[number]
