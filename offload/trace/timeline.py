"""A snapshot of a recording, sorted by kind and joined: what reports, pictures and exports are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from offload.trace import records as r
from offload.trace.clock import Anchor
from offload.trace.joins import CopyLookup
from offload.trace.records import (
    Copy,
    Counter,
    Instant,
    Layer,
    Plan,
    Record,
    Request,
    Step,
    Tick,
    Wait,
)


@attrs.frozen
class Timeline:
    """Everything recorded, each kind sorted by (start, longest first)."""

    copies: tuple[Copy, ...] = ()
    plans: tuple[Plan, ...] = ()
    requests: tuple[Request, ...] = ()
    waits: tuple[Wait, ...] = ()
    steps: tuple[Step, ...] = ()
    layers: tuple[Layer, ...] = ()
    ticks: tuple[Tick, ...] = ()
    instants: tuple[Instant, ...] = ()
    counters: tuple[Counter, ...] = ()
    anchors: tuple[Anchor, ...] = (Anchor(0, 0),)
    """Instants known on both clocks, oldest first. The first one is the origin of exports."""
    rank: int = 0
    device: str = ""
    dropped: int = 0
    """Records lost because the ring was full."""
    ready: int = 0
    """Waits that found their layer landed."""
    unmeasured: int = 0
    """Waits of compute streams whose length nobody knows."""

    @classmethod
    def of(
        cls,
        ring: Iterable[Record],
        *,
        unsettled: Sequence[Request] = (),
        **facts: Any,
    ) -> Timeline:
        """Sort a ring's records, add the requests that have not settled, and split the waits."""
        kinds: tuple[list[Any], ...] = tuple([] for _ in r.KINDS)
        for record in ring:
            kinds[record[0]].append(r.KINDS[record[0]](*record[1:]))
        kinds[r.REQUEST].extend(unsettled)
        for kind in kinds:
            kind.sort(key=lambda one: (one[0], -one[1]))
        copies, plans, requests, waits, steps, layers, ticks, instants, counters = map(tuple, kinds)
        lookup = CopyLookup(copies, plans)
        return cls(
            copies=copies,
            plans=plans,
            requests=requests,
            waits=tuple(
                wait if wait.queued != r.UNKNOWN else wait._replace(queued=lookup.queued(wait))
                for wait in waits
            ),
            steps=steps,
            layers=layers,
            ticks=ticks,
            instants=instants,
            counters=counters,
            **facts,
        )

    @property
    def records(self) -> int:
        """How many records it holds."""
        return sum(map(len, self.kinds()))

    def kinds(self) -> tuple[tuple[Record, ...], ...]:
        """Return the records of every kind, in the order of `records.KINDS`."""
        return (
            self.copies,
            self.plans,
            self.requests,
            self.waits,
            self.steps,
            self.layers,
            self.ticks,
            self.instants,
            self.counters,
        )

    @property
    def first_ns(self) -> int:
        """When the oldest record begins; the tracer's start when there is none."""
        firsts = [one[0] for kind in self.kinds() for one in kind[:1]]
        firsts.extend(copy.issue for copy in self.copies if copy.issue)
        return min(firsts, default=self.anchors[0].perf_ns)

    @property
    def origin_ns(self) -> int:
        """The time that an export calls 0: the tracer's start, or the first record if that is older."""
        return min(self.anchors[0].perf_ns, self.first_ns)

    def unix_ns(self, perf_ns: int) -> int:
        """Return the wall clock at `perf_ns`, by the anchor nearest to it."""
        anchor = min(self.anchors, key=lambda one: abs(one.perf_ns - perf_ns))
        return anchor.unix_ns + (perf_ns - anchor.perf_ns)
