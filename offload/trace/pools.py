"""How full the host pools are, as a counter of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from offload.trace.tracer import Tracer


class PageCounts(Protocol):
    """What a pool's allocator tells of itself."""

    @property
    def num_free(self) -> int: ...


class Pages(Protocol):
    """A pool's allocator."""

    def statistics(self) -> PageCounts: ...


class Pool(Protocol):
    """A host pool."""

    @property
    def num_pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pages(self) -> Pages: ...


@attrs.define(eq=False)
class PoolUse:
    """Watches pools, and records how many of their bytes are not free whenever that has changed."""

    _pools: Sequence[Pool]
    _last: tuple[int, int] = attrs.field(default=(-1, -1), init=False)

    def sample(self, tracer: Tracer, ns: int) -> None:
        """Look at the pools now."""
        used = sum(map(_used, self._pools))
        if (tracer.period, used) != self._last:
            self._last = tracer.period, used
            tracer.counter("host pool", ns, {"used": used})


def _used(pool: Pool) -> int:
    pages = pool.num_pages - pool.pages.statistics().num_free
    return pages * (pool.nbytes // max(1, pool.num_pages))
