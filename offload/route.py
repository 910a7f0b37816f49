"""How the bytes of a batch will move: the strategy of every member, resolved once per io backend."""

from __future__ import annotations

import attrs

from offload import registry
from offload.backend import make_backend
from offload.backend.base import Backend, LayerWork, Prepared
from offload.core.kinds import AUTO, Direction
from offload.core.plan import CopyPlan
from offload.core.strategy import Table
from offload.errors import UnsupportedPairError
from offload.group import Member, PoolGroup


@attrs.frozen(eq=False)
class Copies:
    """The copies of a batch, ready to go, for every layer of the model."""

    parts: tuple[tuple[tuple[int | None, ...], Prepared], ...]
    """(pool layer by model layer, prepared copies) of each member."""

    num_pages: int

    def work(self, layer: int) -> LayerWork:
        """Return the copies of one model layer; none where no member has it."""
        jobs = [
            (copies, pool_layer)
            for layers, copies in self.parts
            if (pool_layer := layers[layer]) is not None
        ]
        return LayerWork(jobs, sum(copies.nbytes(pool_layer) for copies, pool_layer in jobs))

    def size(self, layer: int) -> tuple[int, int, int]:
        """Return bytes, copies asked for, and copies made, of one model layer."""
        nbytes = asked = made = 0
        for layers, copies in self.parts:
            pool_layer = layers[layer]
            if pool_layer is not None:
                nbytes += copies.nbytes(pool_layer)
                asked += self.num_pages
                made += copies.num_ops(pool_layer)
        return nbytes, asked, made


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
    num_layers: int
    legs: tuple[Leg, ...]

    def prepare(self, plan: CopyPlan) -> Copies:
        """Make the copies of a plan ready, on the stream's own thread."""
        prepared: list[tuple[tuple[int | None, ...], Prepared]] = []
        for part in plan.parts:
            leg = self.legs[part.member]
            member = leg.member
            copies = leg.backend.prepare(member.device, member.host, self.direction, part.runs)
            prepared.append((member.pool_layers, copies))
        return Copies(tuple(prepared), plan.parts[0].num_pages)


@attrs.define(eq=False)
class Router:
    """Resolves io backends for the pools of one group, and keeps what it found."""

    group: PoolGroup
    default: str
    _table: Table
    _backends: dict[str, Backend] = attrs.field(factory=dict)
    _routes: dict[tuple[Direction, str], Route] = attrs.field(factory=dict)

    @classmethod
    def open(cls, group: PoolGroup, io_backend: str) -> Router:
        """Return the router of a scheduler.

        Raises:
            UnknownNameError: There is no such io backend.
            UnsupportedPairError: It copies these pools in neither direction.
        """
        on = "cuda" if group.anchor.device.device.type == "cuda" else "cpu"
        router = cls(group, registry.io_backend(io_backend), registry.table(on))
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
            found = Route(direction, self.group.num_layers, legs)
            self._routes[direction, name] = found
        return found

    def _leg(self, member: Member, direction: Direction, name: str) -> Leg:
        kind = member.device.spec.kind
        host, device = member.host.geometry, member.device.geometry
        if name == AUTO:
            name = self._table.choose(kind, direction, host, device).value
        strategy = self._table.resolve(kind, direction, name, host, device)
        backend = self._backends.get(name)
        if backend is None:
            backend = self._backends[name] = make_backend(name)
        return Leg(member, name, strategy, backend)
