"""How the bytes of a batch will move: the strategy of every member, resolved once per io backend."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from offload import registry
from offload.backend import make_backend
from offload.backend.base import Backend, LayerWork, Prepared
from offload.core.kinds import AUTO, Direction
from offload.core.plan import CopyPlan
from offload.errors import UnsupportedPairError
from offload.group import Member, PoolGroup
from offload.pool import DevicePool

Layers: TypeAlias = tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
"""By model layer, the members that have it; and of each of them, (member, its pool layer)."""


@attrs.define(eq=False)
class Copies:
    """The copies of a batch, ready to go, for every layer of the model."""

    _layers: Layers
    _prepared: list[Prepared | None]
    """By member; None where the batch moves none of its pages."""

    _pages: list[int]
    """By member, how many it moves."""

    _page_bytes: tuple[int, ...]
    """By member, bytes of one layer of one page."""

    _components: tuple[int, ...]
    """By member, of how many components that is: a page of one layer is one copy for each."""

    _totals: dict[tuple[int, ...], tuple[int, int]] = attrs.field(factory=dict)
    """(bytes, copies asked for) of one layer, by the members that have it: few, and many layers."""

    def work(self, layer: int) -> LayerWork:
        """Return the copies of one model layer; none where no member has it."""
        prepared = self._prepared
        members, jobs = self._layers[layer]
        if len(prepared) == 1 and jobs:  # a single pair of pools: the common case, once per layer
            only = prepared[0]
            assert only is not None
            nbytes = (self._totals.get(members) or self._total(members))[0]
            return LayerWork(((only, jobs[0][1]),), nbytes)
        ready = [
            (copies, pool_layer)
            for member, pool_layer in jobs
            if (copies := prepared[member]) is not None
        ]
        return LayerWork(ready, (self._totals.get(members) or self._total(members))[0])

    def size(self, layer: int) -> tuple[int, int, int]:
        """Return bytes, copies asked for, and copies made, of one model layer."""
        prepared = self._prepared
        members, jobs = self._layers[layer]
        made = 0
        for member, pool_layer in jobs:
            copies = prepared[member]
            if copies is not None:
                made += copies.num_ops(pool_layer)
        return *(self._totals.get(members) or self._total(members)), made

    def _total(self, members: tuple[int, ...]) -> tuple[int, int]:
        pages, each = self._pages, self._page_bytes
        nbytes = sum(pages[member] * each[member] for member in members)
        asked = sum(pages[member] * self._components[member] for member in members)
        total = self._totals[members] = nbytes, asked
        return total


@attrs.frozen(eq=False)
class Leg:
    """One member's share of a route."""

    member: Member
    io_backend: str
    strategy: str
    backend: Backend


@attrs.frozen(eq=False)
class Route:
    """A way to copy one direction. Requests of the same route may share a batch."""

    direction: Direction
    legs: tuple[Leg, ...]

    _layers: Layers
    _page_bytes: tuple[int, ...]
    _components: tuple[int, ...]

    @classmethod
    def over(cls, direction: Direction, legs: tuple[Leg, ...], num_layers: int) -> Route:
        """Return the route that takes these legs."""
        layers = []
        for layer in range(num_layers):
            jobs = tuple(
                (index, pool_layer)
                for index, leg in enumerate(legs)
                if (pool_layer := leg.member.pool_layers[layer]) is not None
            )
            layers.append((tuple(index for index, _ in jobs), jobs))
        each = tuple(leg.member.device.spec.layer_bytes for leg in legs)
        components = tuple(len(leg.member.device.spec.parts) for leg in legs)
        return cls(direction, legs, tuple(layers), each, components)

    def prepare(self, plan: CopyPlan) -> Copies:
        """Make the copies of a plan ready, on the stream's own thread."""
        prepared: list[Prepared | None] = [None] * len(self.legs)
        pages = [0] * len(self.legs)
        for part in plan.parts:
            if not part.num_pages:
                continue
            leg = self.legs[part.member]
            member = leg.member
            pages[part.member] = part.num_pages
            prepared[part.member] = leg.backend.prepare(
                member.device, member.host, self.direction, part.runs
            )
        return Copies(self._layers, prepared, pages, self._page_bytes, self._components)


@attrs.define(eq=False)
class Router:
    """Resolves io backends for the pools of one group, and keeps what it found."""

    group: PoolGroup
    default: str
    _backends: dict[str, Backend] = attrs.field(factory=dict)
    _routes: dict[tuple[Direction, str], Route] = attrs.field(factory=dict)

    @classmethod
    def open(cls, group: PoolGroup, io_backend: str) -> Router:
        """Return the router of a scheduler.

        Raises:
            UnknownNameError: There is no such io backend.
            UnsupportedPairError: It copies these pools in neither direction.
        """
        router = cls(group, registry.io_backend(io_backend))
        try:
            router.route(Direction.LOAD, None)
        except UnsupportedPairError as refused:
            try:
                router.route(Direction.BACKUP, None)
            except UnsupportedPairError:
                raise refused from None
        return router

    def route(self, direction: Direction, io_backend: str | None) -> Route:
        """Return how a request of this direction is copied.

        Raises:
            UnknownNameError: There is no such io backend.
            UnsupportedPairError: It cannot copy one of the pools.
        """
        name = self.default if io_backend is None else io_backend
        found = self._routes.get((direction, name))
        if found is None:
            name = registry.io_backend(name)
            legs = tuple(self._leg(member, direction, name) for member in self.group.members)
            found = Route.over(direction, legs, self.group.num_layers)
            self._routes[direction, name] = found
        return found

    def _leg(self, member: Member, direction: Direction, name: str) -> Leg:
        kind, pinned = member.device.spec.kind, member.host.pinned
        host, device = member.host.geometry, member.device.geometry
        table = attrs.evolve(registry.table(_place(member.device)), pinned=pinned)
        try:
            if name == AUTO:
                name = table.choose(kind, direction, host, device).value
            strategy = table.resolve(kind, direction, name, host, device)
        except UnsupportedPairError as refused:
            raise (refused if len(self.group.members) == 1 else refused.of(member.name)) from None
        backend = self._backends.get(name)
        if backend is None:
            try:
                backend = self._backends[name] = make_backend(name)
            except ImportError as error:
                reason = f"it needs {error.name or error}, which cannot be imported"
                raise table.refusal(kind, direction, name, host, device, reason) from error
        return Leg(member, name, strategy, backend)


def _place(device: DevicePool) -> str:
    return "cpu" if device.device.type == "cpu" else "cuda"
