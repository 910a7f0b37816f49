"""The copies of a batch, layer by layer: of every member of the group, in as few calls as its backends allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import attrs

from offload.backend.base import JoinsMembers, LayerWork, Prepared

if TYPE_CHECKING:
    from offload.route import Route

Layers: TypeAlias = tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
"""By model layer, the members that have it; and of each of them, (member, its pool layer)."""

SPAN_BYTES = 32 << 20
"""Bytes of the layers that go as one work, at most. A stream keeps two works enqueued; two of these are as much
as it enqueues ahead anyhow, so an urgent batch waits no longer for spans than for single layers."""


@attrs.define(eq=False)
class Copies:
    """The copies of a batch, ready to go, for every layer of the model."""

    _route: Route
    _prepared: list[Prepared | None]
    """By member; None where the batch moves none of its pages."""

    _pages: list[int]
    """By member, how many it moves."""

    _only: Prepared | None = attrs.field(init=False)
    """Those of the only member, where there is no other."""

    _each: int = attrs.field(init=False)
    """Bytes of a layer of the first member."""

    _totals: dict[tuple[int, ...], tuple[int, int]] = attrs.field(factory=dict)
    """(bytes, copies asked for) of one layer, by the members that have it: few, and many layers."""

    uncounted: Exception | None = None
    """What a backend raised when it was asked how many copies it makes."""

    def __attrs_post_init__(self) -> None:
        self._only = self._prepared[0] if len(self._prepared) == 1 else None
        self._each = self._pages[0] * self._route.page_bytes[0]

    def work(self, layer: int) -> LayerWork:
        """Return the copies of one model layer; none where no member has it."""
        # A single pair of pools is the common case, and this runs once per layer.
        if self._only is not None and (jobs := self._route.layers[layer][1]):
            return LayerWork(((self._only, jobs[0][1]),), self._each)
        calls = self._calls(layer, layer + 1) if self._route.joins else None
        return LayerWork(self._jobs(layer), self._nbytes(layer), calls)

    def span(self, first: int, end: int) -> LayerWork:
        """Return the copies of several model layers as one work."""
        layers = range(first, end)
        jobs = [job for layer in layers for job in self._jobs(layer)]
        return LayerWork(jobs, sum(map(self._nbytes, layers)), self._calls(first, end))

    def reach(self, first: int, end: int) -> int:
        """Return up to which layer a span from `first` may go; `end` at most."""
        nbytes = self._nbytes(first)
        layer = first + 1
        while layer < end and (nbytes := nbytes + self._nbytes(layer)) <= SPAN_BYTES:
            layer += 1
        return layer

    def size(self, layer: int) -> tuple[int, int, int]:
        """Return bytes, copies asked for, and copies made, of one model layer."""
        members, jobs = self._route.layers[layer]
        nbytes, asked = self._totals.get(members) or self._total(members)
        made = 0
        try:
            for member, pool_layer in jobs:
                copies = self._prepared[member]
                if copies is not None:
                    made += copies.num_ops(pool_layer)
        except Exception as error:  # noqa: BLE001 - somebody else's code; the bytes have landed all the same
            self.uncounted = error
        return nbytes, asked, made

    def span_size(self, first: int, end: int) -> tuple[int, int, int]:
        """Return the same of several layers that went as one work."""
        sizes = [self.size(layer) for layer in range(first, end)]
        made = 0
        try:
            for member, copies, layers in self._by_member(first, end):
                each = [copies.num_ops(layer) for layer in layers]
                made += sum(each) if self._route.spanners[member] is None else max(each)
        except Exception as error:  # noqa: BLE001 - the same
            self.uncounted = error
        return sum(size[0] for size in sizes), sum(size[1] for size in sizes), made

    def _jobs(self, layer: int) -> list[tuple[Prepared, int]]:
        prepared = self._prepared
        return [
            (copies, pool_layer)
            for member, pool_layer in self._route.layers[layer][1]
            if (copies := prepared[member]) is not None
        ]

    def _calls(self, first: int, end: int) -> list[Callable[[], None]]:
        """Return what moves these layers: one call for what a backend copies in one go."""
        calls: list[Callable[[], None]] = []
        together: dict[JoinsMembers, list[tuple[Prepared, int]]] = {}
        for member, copies, layers in self._by_member(first, end):
            spanner, joiner = self._route.spanners[member], self._route.joiners[member]
            if spanner is not None and end > first + 1:
                calls.append(partial(spanner.copy_layers, copies, layers))
            elif joiner is not None:
                together.setdefault(joiner, []).extend((copies, layer) for layer in layers)
            else:
                calls += [partial(copies.copy, layer) for layer in layers]
        calls += [partial(backend.copy_members, jobs) for backend, jobs in together.items()]
        return calls

    def _by_member(self, first: int, end: int) -> Iterator[tuple[int, Prepared, list[int]]]:
        """Yield each member that has any of these layers, its copies, and its own layers."""
        for member, (leg, copies) in enumerate(zip(self._route.legs, self._prepared, strict=True)):
            mapped = leg.member.pool_layers[first:end]
            layers = [layer for layer in mapped if layer is not None]
            if copies is not None and layers:
                yield member, copies, layers

    def _nbytes(self, layer: int) -> int:
        members = self._route.layers[layer][0]
        return (self._totals.get(members) or self._total(members))[0]

    def _total(self, members: tuple[int, ...]) -> tuple[int, int]:
        route = self._route
        nbytes = asked = 0
        for member in members:
            nbytes += self._pages[member] * route.page_bytes[member]
            asked += self._pages[member] * route.components[member]
        total = self._totals[members] = nbytes, asked
        return total
