"""How the bytes of a batch will move: the strategy of every member, resolved once per io backend."""

from __future__ import annotations

from contextlib import suppress

import attrs

from offload import registry
from offload.backend import make_backend, missing
from offload.backend.base import Backend, JoinsLayers, JoinsMembers, Prepared, WarmsUp
from offload.core.kinds import AUTO, Direction
from offload.core.plan import Plan, Runs
from offload.core.table import Rejection
from offload.errors import UnsupportedPairError, shown, told
from offload.group import Member, PoolGroup
from offload.pool import DevicePool
from offload.route_copies import Copies, Layers


@attrs.frozen(eq=False)
class Leg:
    """One member's share of a route."""

    member: Member
    io_backend: str
    strategy: str
    backend: Backend

    def prepare(self, direction: Direction, runs: Runs) -> Prepared:
        """Make the copies of these runs ready."""
        member = self.member
        copies: Prepared | None = self.backend.prepare(member.device, member.host, direction, runs)
        if copies is None:  # taken for a member that moves no pages, it would move none
            raise TypeError(f"io backend {self.io_backend!r} prepared None")
        return copies


@attrs.frozen(eq=False)
class Route:
    """A way to copy one direction. Requests of the same route may share a batch."""

    direction: Direction
    legs: tuple[Leg, ...]
    layers: Layers

    page_bytes: tuple[int, ...]
    """By member, bytes of one layer of one page."""

    components: tuple[int, ...]
    """By member, of how many components that is: a page of one layer is one copy for each."""

    joiners: tuple[JoinsMembers | None, ...]
    """By member, its backend where that copies layers of several members in one go."""

    spanners: tuple[JoinsLayers | None, ...]
    """By member, its backend where that copies several layers in one go."""

    joins: bool
    """Whether two members share a joiner."""

    spans: bool
    """Whether there is a spanner, and this is a backup: a load is waited for layer by layer."""

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
        specs = [leg.member.device.spec for leg in legs]
        backends = [leg.backend for leg in legs]
        joiners = tuple(each if isinstance(each, JoinsMembers) else None for each in backends)
        spanners = tuple(each if isinstance(each, JoinsLayers) else None for each in backends)
        joining = [id(each) for each in joiners if each is not None]
        return cls(
            direction,
            legs,
            tuple(layers),
            page_bytes=tuple(spec.layer_bytes for spec in specs),
            components=tuple(len(spec.parts) for spec in specs),
            joiners=joiners,
            spanners=spanners,
            joins=len(set(joining)) < len(joining),
            spans=direction is Direction.BACKUP and any(spanners),
        )

    def prepare(self, plan: Plan) -> Copies:
        """Make the copies of a plan ready, on the stream's own thread."""
        prepared: list[Prepared | None] = [None] * len(self.legs)
        pages = [0] * len(self.legs)
        for member, runs in plan.items():
            if runs.num_pages:
                pages[member] = runs.num_pages
                prepared[member] = self.legs[member].prepare(self.direction, runs)
        return Copies(self, prepared, pages)

    def warm_up(self) -> None:
        """Let backends get ready for their first copy, on the stream's own thread."""
        for leg in self.legs:
            if isinstance(leg.backend, WarmsUp):
                leg.backend.warm_up(leg.member.device, leg.member.host, self.direction)

    @property
    def cold(self) -> bool:
        """Whether `warm_up` would do anything."""
        return any(isinstance(leg.backend, WarmsUp) for leg in self.legs)


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
                raise refused from refused.__cause__
        return router

    def route(self, direction: Direction, io_backend: str | None) -> Route:
        """Return how a request of this direction is copied.

        Raises:
            UnknownNameError: There is no such io backend.
            UnsupportedPairError: It cannot copy one of the pools.
        """
        name = self.default if io_backend is None else io_backend
        given: object = name
        found = self._routes.get((direction, name)) if isinstance(given, str) else None
        if found is None:
            name = registry.io_backend(name)
            legs = tuple(self._leg(member, direction, name) for member in self.group.members)
            found = Route.over(direction, legs, self.group.num_layers)
            self._routes[direction, name] = found
        return found

    def cold(self) -> list[Route]:
        """Return those of the default routes whose backends want to be warmed up."""
        found = []
        for direction in Direction:
            with suppress(UnsupportedPairError):  # a scheduler may be open for one direction alone
                found.append(self.route(direction, None))
        return [route for route in found if route.cold]

    def _leg(self, member: Member, direction: Direction, name: str) -> Leg:
        kind, pinned = member.device.spec.kind, member.host.pinned
        host, device = member.host.geometry, member.device.geometry
        table = attrs.evolve(
            registry.table(_place(member.device)), pinned=pinned, missing=missing()
        )
        try:
            if name == AUTO:
                name = table.choose(kind, direction, host, device).value
            strategy = table.resolve(kind, direction, name, host, device)
            backend = self._backend(name)
            if isinstance(backend, Rejection):
                rest = table.without(name, backend)
                refused = rest.refusal(kind, direction, name, host, device, backend.reason)
                raise refused from backend.error
        except UnsupportedPairError as refused:
            alone = len(self.group.members) == 1
            raise (refused if alone else refused.of(member.name)) from refused.__cause__
        return Leg(member, name, strategy, backend)

    def _backend(self, name: str) -> Backend | Rejection:
        """Return the one of this name, made once; or why it cannot be had."""
        backend = self._backends.get(name)
        if backend is None:
            try:
                backend = make_backend(name)
            except ImportError as error:
                return Rejection(f"it needs {error.name or error}, which cannot be imported", error)
            except Exception as error:  # noqa: BLE001 - somebody else's code
                return Rejection(f"it could not be made ({told(error)})", error)
            if isinstance(backend, type) or not callable(getattr(backend, "prepare", None)):
                return Rejection(
                    f"its factory made {shown(backend)}, which has no method 'prepare'"
                )
            self._backends[name] = backend
        return backend


def _place(device: DevicePool) -> str:
    return "cpu" if device.device.type == "cpu" else "cuda"
