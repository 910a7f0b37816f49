"""Which prefix blocks the host holds, by vLLM's block hash: least recently used first to go, never a busy one.

Lives on the scheduler side, so it owns page ids and no memory. A page is *ready* once its bytes have landed on
every rank; before that nobody is offered it. A page with a job under way is locked: it may leave the index
at once (`clear`), and is handed out again only after its unlock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from offload import PageAllocator


@attrs.define(eq=False)
class _Entry:
    page: int
    ready: bool = False


@attrs.define(eq=False)
class HostIndex:
    """A cache of host pages. Each hash stands for a block and everything before it."""

    num_pages: int
    evictions: int = attrs.field(default=0, init=False)
    """Pages taken from one block for another, ever."""

    _pages: PageAllocator = attrs.field(init=False)
    _entries: OrderedDict[bytes, _Entry] = attrs.field(init=False, factory=OrderedDict)
    _jobs: Counter[int] = attrs.field(init=False, factory=Counter)
    """By page, its jobs under way; a page that stands here is locked."""

    def __attrs_post_init__(self) -> None:
        self._pages = PageAllocator(self.num_pages)

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is here, or on its way here."""
        return key in self._entries

    @property
    def num_used(self) -> int:
        """Pages that hold a block, or will."""
        return self.num_pages - self._pages.num_free

    def match(self, keys: Iterable[bytes]) -> int:
        """Return how many of these consecutive blocks are ready, from the first."""
        count = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.ready:
                break
            count += 1
        return count

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that a prefix is in use. Its tail counts as older than its head, and so goes first."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def read(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of blocks that are ready, each locked until `done`."""
        entries = [self._entries[key] for key in keys]
        assert all(entry.ready for entry in entries), "only ready blocks are read"
        pages = [entry.page for entry in entries]
        self._lock(pages)
        return pages

    def write(self, keys: Sequence[bytes], keep: Sequence[bytes] = ()) -> list[int]:
        """Return pages for blocks that are not here, each locked until `done`; as many as there is room for.

        Args:
            keys: From the head of a prefix: when room ends, its tail has none.
            keep: Blocks that are not evicted for these, such as their own prefix.
        """
        missing = len(keys) - self._pages.num_free
        if missing > 0:
            self._evict(missing, {*keys, *keep})
        pages: list[int] = self._pages.alloc(min(len(keys), self._pages.num_free)).tolist()
        for key, page in zip(keys, pages, strict=False):
            assert key not in self._entries, "a block is written once"
            self._entries[key] = _Entry(page)
        self.touch(keys[: len(pages)])
        self._lock(pages)
        return pages

    def done(self, keys: Sequence[bytes], pages: Sequence[int], *, keep: bool) -> None:
        """Say that a job on these pages has ended.

        Args:
            keep: Whether the bytes are right: a written block is offered from now on, a read one stays.
        """
        for key, page in zip(keys, pages, strict=True):
            entry = self._entries.get(key)
            if entry is None or entry.page != page:
                continue  # forgotten meanwhile, and perhaps written anew elsewhere
            if keep:
                entry.ready = True
            else:
                self._remove(key)
        self._unlock(pages)

    def forget(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Forget blocks that a job still writes, and wrongly: they may be written anew, to other pages."""
        for key, page in zip(keys, pages, strict=True):
            entry = self._entries.get(key)
            if entry is not None and entry.page == page:
                self._remove(key)

    def clear(self) -> None:
        """Forget everything. Pages with jobs under way come back when those have ended."""
        for key in list(self._entries):
            self._remove(key)

    def _lock(self, pages: Sequence[int]) -> None:
        self._pages.lock([page for page in set(pages) if page not in self._jobs])
        self._jobs.update(pages)

    def _unlock(self, pages: Sequence[int]) -> None:
        self._jobs.subtract(pages)
        over = [page for page in set(pages) if not self._jobs[page]]
        for page in over:
            del self._jobs[page]
        self._pages.unlock(over)

    def _evict(self, count: int, keep: set[bytes]) -> None:
        victims: list[bytes] = []
        for key, entry in self._entries.items():
            if len(victims) == count:
                break
            if entry.page not in self._jobs and key not in keep:
                victims.append(key)
        for key in victims:
            self._remove(key)
        self.evictions += len(victims)

    def _remove(self, key: bytes) -> None:
        self._pages.free([self._entries.pop(key).page])
