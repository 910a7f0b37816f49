"""Pages of a whole group at once: taken from every allocator concerned, or from none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import attrs

from offload.core.page_ids import PagesLike
from offload.core.pages import PageAllocator
from offload.core.request import Pages
from offload.errors import OutOfPagesError


@attrs.frozen(eq=False, kw_only=True)
class PagePair:
    """The pages of one member that has its own; by keyword, as the sides are easily confused."""

    host_pages: PagesLike
    device_pages: PagesLike


@attrs.frozen(eq=False)
class GroupPages:
    """Pages on one side of a group, host or device: what `PoolGroup.alloc` gives and `free` takes."""

    anchor: Pages
    """The anchor's; members that follow it use the same ids, or those that their rule makes of them."""

    own: Mapping[str, Pages]
    """By name, those of members that have pages of their own."""

    def paired(self, device: GroupPages) -> dict[str, PagePair]:
        """Return the `members=` of a request between these host pages and those device pages."""
        return {
            name: PagePair(host_pages=pages, device_pages=device.own[name])
            for name, pages in self.own.items()
        }


Wanted = Sequence[tuple[str, PageAllocator, int]]
Held = Sequence[tuple[PageAllocator, Pages]]


def take_all(wanted: Wanted, *, contiguous: bool = False) -> list[Pages]:
    """Take so many pages of each allocator, in one run each if `contiguous`.

    Raises:
        OutOfPagesError: One has too few; names its member. None was taken.
    """
    with _locked([allocator for _, allocator, _ in wanted]):
        taken: list[tuple[PageAllocator, Pages]] = []
        try:
            for name, allocator, count in wanted:
                with _naming(name):
                    taken.append((allocator, allocator.alloc(count, contiguous=contiguous)))
        except Exception:
            for allocator, pages in taken:
                allocator.free(pages)
            raise
        return [pages for _, pages in taken]


def give_all(held: Held) -> None:
    """Give pages back to each allocator.

    Raises:
        RequestError: A page is not allocated, or is given twice. No page was freed.
    """
    with _locked([allocator for allocator, _ in held]):
        for allocator, pages in held:
            allocator.check_owned(pages)
        for allocator, pages in held:
            allocator.free(pages)


@contextmanager
def _locked(allocators: Sequence[PageAllocator]) -> Iterator[None]:
    """Hold all allocators, in one order for everybody, so that two groups cannot block each other."""
    with ExitStack() as stack:
        for allocator in sorted(allocators, key=id):
            stack.enter_context(allocator.mutex)
        yield


@contextmanager
def _naming(member: str) -> Iterator[None]:
    try:
        yield
    except OutOfPagesError as error:
        raise OutOfPagesError(
            needed=error.needed,
            free=error.free,
            locked=error.locked,
            contiguous=error.contiguous,
            pool=member,
        ) from None
