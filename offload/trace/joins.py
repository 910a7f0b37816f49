"""Who brought what to whom: from requests to batches, from waits and layers to the copies they needed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from offload.trace.records import UNKNOWN, Copy, Layer, Plan, Wait

if TYPE_CHECKING:
    from offload.trace.timeline import Timeline


class CopyLookup:
    """Finds the copy that brought a layer of a request."""

    def __init__(self, copies: Sequence[Copy], plans: Sequence[Plan]) -> None:
        self._copies = copies
        self._batches: dict[int, list[int]] = defaultdict(list)
        self._by_key: dict[tuple[int, int], list[int]] = defaultdict(list)
        for plan in plans:
            for request in plan.requests:
                self._batches[request].append(plan.batch)
        for index, copy in enumerate(copies):
            self._by_key[copy.batch, copy.layer].append(index)

    def known(self, request: int) -> bool:
        """Return whether the recording tells in which batch a request went."""
        return request in self._batches

    def last_before(self, request: int, layer: int, ns: int) -> int | None:
        """Return the index of the latest copy of that layer that had started by `ns`."""
        best: int | None = None
        for batch in self._batches.get(request, ()):
            indices = self._by_key.get((batch, layer), ())
            at = bisect_right(indices, ns, key=lambda index: self._copies[index].start)
            if at and (best is None or indices[at - 1] > best):
                best = indices[at - 1]
        return best

    def queued(self, wait: Wait) -> int:
        """Return how much of a wait had passed when its copy started; all of it when it never did."""
        if not self.known(wait.request) or wait.layer < 0:
            return UNKNOWN
        index = self.last_before(wait.request, wait.layer, wait.end)
        if index is None:
            return wait.end - wait.start
        return max(0, self._copies[index].start - wait.start)


def requests_of(plans: Iterable[Plan]) -> Mapping[int, tuple[int, ...]]:
    """Return which requests each batch carried."""
    return {plan.batch: plan.requests for plan in plans}


def readers_of(timeline: Timeline) -> Iterator[tuple[int, int, bool]]:
    """Yield `(copy, layer, whether it is the copy's first reader)`, in the order of the layers' start."""
    lookup = CopyLookup(timeline.copies, timeline.plans)
    seen: set[int] = set()
    for index, layer in enumerate(timeline.layers):
        for copy in _read_by(layer, lookup):
            yield _edge(copy, index, seen)


def _edge(copy: int, layer: int, seen: set[int]) -> tuple[int, int, bool]:
    """Return the edge, and remember that the copy has a reader."""
    first = copy not in seen
    seen.add(copy)
    return copy, layer, first


def _read_by(layer: Layer, lookup: CopyLookup) -> list[int]:
    found = {lookup.last_before(request, layer.layer, layer.start) for request in layer.requests}
    return sorted(index for index in found if index is not None)
