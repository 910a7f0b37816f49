"""How full the host pools are, as a counter of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import attrs

if TYPE_CHECKING:
    from offload.core.pages import PageStatistics
    from offload.trace.tracer import Tracer


SPACING_NS: Final = 1_000_000
"""Turns are a few microseconds apart while a batch goes through, and a pool fills by whole requests."""


class Pages(Protocol):
    """A pool's allocator."""

    @property
    def num_free(self) -> int: ...
    def statistics(self) -> PageStatistics: ...


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
    """Watches pools, and records how many of their bytes are not free whenever that has changed.

    It is asked once per turn of the scheduler and looks once in a millisecond, one number per pool.
    """

    _pools: Sequence[Pool]
    _period: int = attrs.field(default=-1, init=False)
    _used: int = attrs.field(default=-1, init=False)
    _next_ns: int = attrs.field(default=0, init=False)
    _sizes: Sequence[tuple[Pages, int]] = attrs.field(init=False)
    _total: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        pools = [pool for pool in self._pools if pool.num_pages]
        self._sizes = [(pool.pages, pool.nbytes // pool.num_pages) for pool in pools]
        self._total = sum(
            pool.num_pages * page for pool, (_, page) in zip(pools, self._sizes, strict=True)
        )

    def sample(self, tracer: Tracer, ns: int) -> None:
        """Look at the pools, unless that was just done."""
        begins = tracer.period != self._period
        if ns < self._next_ns and not begins:
            return
        self._period, self._next_ns = tracer.period, ns + SPACING_NS
        used = self._total
        for pages, size in self._sizes:
            used -= pages.num_free * size
        if begins or used != self._used:
            self._used = used
            tracer.counter("host pool", ns, {"used": used})
