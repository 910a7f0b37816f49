"""Who uses a page, and whom a new request must follow: one table per pool.

Theory of operation
-------------------
A *holder* is a number that grows from claim to claim: a request, or one layer of a streaming one. It
claims pages as a reader or as a writer when it is submitted and releases them when its last byte
has moved. Per page there are plain integers, never an object:

* `counter`: live readers plus live writers times 2**32. Not zero means locked, and a possible clash.
* `writer`, `reader`: the last holder that claimed the page so, alive or not.
* a chain of the readers before the last one, kept only where readers met on a page.

A claim without a clash is a gather, an addition and two scatters, whatever the number of pages.
Repeated pages in one claim count once: gather and scatter write the same number twice.

What makes two integers enough is one promise by the caller:

    A holder releases only after every holder that it was told to follow has released.

So the last writer of a page outlives all holders before it on that page. Following that writer is
following all of them, and a reader older than the last writer need not be remembered. Only the live
readers since the last writer are told one by one, and those are what the chain holds: a log of
(holder, previous entry) with one head per page. Nothing is removed from it on release; an entry is
skipped when its holder is gone, and a full log keeps only what can still matter.

All claims of one holder are released together. (Released one by one, the answer stays safe, but may
name a live holder that has let go of this very page.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.core.torn import Torn
from offload.errors import RequestError

Pages: TypeAlias = NDArray[np.int64]
"""Page ids, int64, below 2**31."""

_WRITER = 1 << 32
_READERS = _WRITER - 1
_ONE_READER, _ONE_WRITER = (
    np.array(1),
    np.array(_WRITER),
)  # arrays are quicker to scatter than integers
_NOBODY: Sequence[int] = ()
_STEP = 1 << 16
"""Pages claimed or released at once: the page faults of fresh temporaries for a million cost more than the rest."""
_FIRST_LOG = 1024  # entries; 16 KiB, doubled when more than half of it is still needed


class HazardTable:
    """Locks and order of one pool's pages.

    Args:
        num_pages: Pages of the pool.
        lock: Held around every operation. Give a real one when several threads claim or release.
    """

    def __init__(
        self, num_pages: int, *, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.num_pages = num_pages
        self.mutex: AbstractContextManager[object] = nullcontext() if lock is None else lock
        """Held around every operation; a caller that combines several holds it around them."""
        self.owner: object | None = None
        """Whose order this is: the scheduler that is open on the pool. A table has one at a time."""
        self.releases = 0
        """How often pages were released or unlocked: who waits for pages need not look before it grows."""
        self.torn = Torn(num_pages, self.mutex)
        """Pages that hold part of a write that did not complete."""
        self._counter = np.full(num_pages, 0)  # touched now, not under the first claims
        self._writer = np.full(num_pages, -1, np.int64)
        self._reader = np.full(num_pages, -1, np.int64)
        # The same memory: single items of a view cost half of an array's.
        self._one_counter = self._counter.data
        self._one_writer, self._one_reader = self._writer.data, self._reader.data
        self._reading: dict[int, int] = {}
        self._chain: _Chain | None = None
        self._pins: Pages | None = None

    def claim(self, holder: int, pages: Pages, *, write: bool) -> Sequence[int]:
        """Register `holder` on `pages` and return the live earlier holders that it must follow.

        A reader follows live writers; a writer follows live writers and live readers. A holder that
        one of the returned ones follows already may be left out.

        Args:
            holder: Not below any holder that claimed before; the same again to add pages.
            pages: In range. Repeated pages count once.

        Returns:
            Distinct holders in growing order; the shared empty tuple when there are none.
        """
        with self.mutex:
            if len(pages) == 1 and not self._one_counter[page := pages.item()]:
                self._one_counter[page] = _WRITER if write else 1
                (self._one_writer if write else self._one_reader)[page] = holder
                follow = _NOBODY
            elif len(pages) <= _STEP:
                follow = self._claim(holder, pages, write=write)
            else:
                found: set[int] = set()
                for some in _steps(pages):
                    found.update(self._claim(holder, some, write=write))
                follow = tuple(sorted(found))
            if not write:
                self._reading[holder] = self._reading.get(holder, 0) + 1
            return follow

    def peek(self, pages: Pages, *, write: bool) -> Sequence[int]:
        """Return whom a claim would have to follow, and claim nothing."""
        with self.mutex:
            before = self._counter[pages]
            if write:
                return self._before_write(-1, pages, before)
            return _others(-1, set(self._writer[pages[before >= _WRITER]].tolist()))

    def release(self, holder: int, pages: Pages, *, write: bool) -> None:
        """Take back one claim, with the arguments of that claim."""
        with self.mutex:
            amount = _WRITER if write else 1
            if len(pages) == 1:
                self._one_counter[pages.item()] -= amount
            else:
                for some in (pages,) if len(pages) <= _STEP else _steps(pages):
                    self._counter[some] -= amount
            self.releases += 1
            if not write:
                left = self._reading[holder] - 1
                if left:
                    self._reading[holder] = left
                else:
                    del self._reading[holder]

    def counts(self) -> Pages | None:
        """Return who holds what, for `restore`; None when nobody holds anything."""
        with self.mutex:
            return self._counter.copy() if self._counter.any() else None

    def restore(self, counts: Pages | None, youngest: int) -> None:
        """Void all claims since `counts` were taken, half-made ones too; `youngest` was the last holder then."""
        with self.mutex:
            self._counter[:] = 0 if counts is None else counts
            self._reading = {each: n for each, n in self._reading.items() if each <= youngest}
            self.releases += 1

    def youngest(self) -> int:
        """Return the last holder that claimed anything, alive or not; -1 for nobody. Looks at every page."""
        with self.mutex:
            return int(max(self._writer.max(initial=-1), self._reader.max(initial=-1)))

    def held(self) -> bool:
        """Return whether anybody holds any page."""
        return bool(self._counter.any())

    def last_writer(self, page: int) -> int:
        """Return who claimed a page for writing last, alive or not; -1 for nobody."""
        return int(self._writer[page])

    def last_writer_is(self, holder: int, pages: Pages) -> bool:
        """Return whether no other holder has claimed any of `pages` for writing since `holder` did."""
        with self.mutex:
            return bool((self._writer[pages] == holder).all())

    def written_since(self, holder: int, pages: Pages) -> bool:
        """Return whether a later holder has claimed any of `pages` for writing, alive or not."""
        with self.mutex:
            return bool((self._writer[pages] > holder).any())

    def lock(self, pages: Pages) -> None:
        """Lock `pages` without a place in any order. Locks count; repeated pages count once."""
        with self.mutex:
            if self._pins is None:
                self._pins = np.zeros(self.num_pages, np.int64)
            self._pins[pages] += 1

    def unlock(self, pages: Pages) -> None:
        """Take back one `lock` of `pages`.

        Raises:
            RequestError: A page has no such lock. Nothing was changed.
        """
        with self.mutex:
            if not len(pages):
                return
            pins = np.zeros(0, np.int64) if self._pins is None else self._pins
            held = pins[pages] if len(pins) else np.zeros(len(pages), np.int64)
            if not held.all():
                position = int(np.flatnonzero(held == 0)[0])
                page = int(pages[position])
                raise RequestError(
                    f"unlock of page {page} at position {position}, which is not locked. "
                    "Each lock can be taken back once.",
                    value=page,
                    position=position,
                )
            pins[pages] = held - 1
            self.releases += 1

    def locked(self, pages: Pages) -> NDArray[np.bool_]:
        """Return for each of `pages` whether somebody holds it."""
        with self.mutex:
            held: NDArray[np.bool_] = self._counter[pages] != 0
            if self._pins is not None:
                held |= self._pins[pages] != 0
            return held

    def busy(self, pages: Pages) -> bool:
        """Return whether somebody holds any of `pages`. Takes no lock: it may be asked in a forked child."""
        pins = self._pins
        held = bool(np.count_nonzero(self._counter[pages]))
        return held or (pins is not None and bool(np.count_nonzero(pins[pages])))

    def _claim(self, holder: int, pages: Pages, *, write: bool) -> Sequence[int]:
        """Claim pages whose temporaries fit into the cache."""
        counter, follow = self._counter, _NOBODY
        before = counter[pages]
        if np.count_nonzero(before):
            counter[pages] = before + (_WRITER if write else 1)
            look = self._before_write if write else self._before_read
            follow = look(holder, pages, before)
        else:  # the common case: nobody is there
            counter[pages] = _ONE_WRITER if write else _ONE_READER
        if write:
            self._writer[pages] = holder
        else:
            self._reader[pages] = holder
        return follow

    def _before_read(self, holder: int, pages: Pages, before: Pages) -> Sequence[int]:
        shared = pages[(before & _READERS) != 0]
        if len(shared):
            if self._chain is None:
                self._chain = _Chain(self.num_pages)
            self._chain.push(shared, self._reader[shared], self._writer, self._reading)
        written = pages[before >= _WRITER]
        return _others(holder, set(self._writer[written].tolist())) if len(written) else _NOBODY

    def _before_write(self, holder: int, pages: Pages, before: Pages) -> Sequence[int]:
        follow = set(self._writer[pages[before >= _WRITER]].tolist())
        readers = before & _READERS
        if np.count_nonzero(readers):
            follow |= self._readers_of(pages[readers != 0])
        return _others(holder, follow)

    def _readers_of(self, pages: Pages) -> set[int]:
        """Return the live readers since the last writer. Every page given has a live reader."""
        latest, written = self._reader[pages], self._writer[pages]
        found = set(latest[latest > written].tolist())
        if self._chain is not None:
            found |= self._chain.walk(pages, written)
        return found & self._reading.keys()


class _Chain:
    """Earlier readers of pages: a log of entries, linked per page from the youngest to the oldest."""

    def __init__(self, num_pages: int) -> None:
        self._head = np.full(num_pages, -1, np.int64)  # page -> number of its youngest entry
        self._base = 0  # number of the first entry that the log still has
        self._size = 0
        self._make_room(_FIRST_LOG)

    def push(self, pages: Pages, holders: Pages, writer: Pages, live: dict[int, int]) -> None:
        """Append one entry per page. `writer` and `live` tell what a full log may forget."""
        if self._size + len(pages) > len(self._page):
            self._compact(len(pages), writer, live)
        self._append(pages, holders, self._head[pages])

    def walk(self, pages: Pages, since: Pages) -> set[int]:
        """Return the holders in the chains of `pages` that are later than `since`, a bound per page."""
        found: set[int] = set()
        entry = self._head[pages]
        while True:
            keep = entry >= self._base
            entry, since = entry[keep] - self._base, since[keep]
            holders = self._holder[entry]
            keep = holders > since  # a chain only gets older
            entry, since = entry[keep], since[keep]
            if not len(entry):
                return found
            found.update(holders[keep].tolist())
            entry = self._previous[entry]

    def _append(self, pages: Pages, holders: Pages, previous: Pages) -> None:
        start, end = self._size, self._size + len(pages)
        self._page[start:end] = pages
        self._holder[start:end] = holders
        self._previous[start:end] = previous
        self._head[pages] = np.arange(self._base + start, self._base + end)
        self._size = end

    def _compact(self, extra: int, writer: Pages, live: dict[int, int]) -> None:
        """Keep live readers since the last writer; renumber, so that old heads and links are void."""
        page, holder = self._page[: self._size], self._holder[: self._size]
        alive = np.fromiter(live, np.int64, len(live))
        keep = np.flatnonzero((holder > writer[page]) & np.isin(holder, alive))
        keep = keep[np.argsort(page[keep], kind="stable")]
        page, holder = page[keep], holder[keep]
        self._base += self._size
        self._size = 0
        if 2 * (len(keep) + extra) > len(self._page):
            self._make_room(2 * (len(keep) + extra))
        previous = np.arange(self._base - 1, self._base - 1 + len(keep))
        previous[np.flatnonzero(page != np.concatenate(([-1], page[:-1])))] = -1
        self._append(page, holder, previous)

    def _make_room(self, entries: int) -> None:
        self._page = np.empty(entries, np.int64)
        self._holder = np.empty(entries, np.int64)
        self._previous = np.empty(entries, np.int64)


def _steps(pages: Pages) -> list[Pages]:
    return [pages[start : start + _STEP] for start in range(0, len(pages), _STEP)]


def _others(holder: int, holders: set[int]) -> Sequence[int]:
    holders.discard(holder)
    return tuple(sorted(holders)) if holders else _NOBODY
