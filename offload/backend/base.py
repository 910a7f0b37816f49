"""How bytes move: the seam behind every io backend, and the work of one layer made of its copies.

A backend prepares the copies between one pair of pools once per batch, on the stream's own thread; then
each layer is one call. What it prepares owns its index tensors and descriptors until it is dropped. A backend
may also offer to copy several members (`JoinsMembers`) or several layers (`JoinsLayers`) in one go, and to get
ready before the first batch (`WarmsUp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol, Self, TypeAlias, runtime_checkable

import attrs
import torch

from offload.core.geometry import ComponentGeometry, matched
from offload.core.hazards import Pages
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.pool import DevicePool, HostPool, Pool


class Access:
    """One side of a copy: pages of one layer of a pool. The `Access` of a driver's race detector."""

    __slots__ = ("layer", "pages", "pool", "write")

    def __init__(self, pool: object, layer: int, pages: Sequence[int], write: bool) -> None:
        self.pool = pool
        self.layer = layer
        self.pages = pages
        self.write = write


class Prepared(Protocol):
    """The copies of a batch between one pair of pools, ready to go layer by layer."""

    def copy(self, layer: int) -> None:
        """Move the bytes of one pool layer, or enqueue that on the current stream."""

    def nbytes(self, layer: int) -> int:
        """Return the bytes that `copy(layer)` moves."""

    def num_ops(self, layer: int) -> int:
        """Return how many copies that is for whatever carries it out."""

    def poison(self, layer: int) -> None:
        """Fill the destination bytes of one pool layer with `POISON`."""

    def accesses(self, layer: int) -> Sequence[Access]:
        """Return what `copy(layer)` reads and writes."""


class Backend(Protocol):
    """One way to move bytes. One instance serves one scheduler; its streams' threads call it."""

    name: str
    """As in `io_backend=`."""

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> Prepared:
        """Make everything that does not depend on the layer.

        Args:
            runs: Source to destination in the sense of `direction`, destinations distinct.
        """


Jobs: TypeAlias = Sequence[tuple[Prepared, int]]
"""Prepared copies with one of their pool layers."""


@runtime_checkable
class JoinsMembers(Protocol):
    """A backend that copies one layer of several members of a group in one go."""

    def copy_members(self, jobs: Jobs) -> None:
        """Move the bytes of all of them, prepared by this backend, or enqueue that on the current stream."""


@runtime_checkable
class JoinsLayers(Protocol):
    """A backend that copies several layers of one member in one go."""

    def copy_layers(self, prepared: Prepared, layers: Sequence[int]) -> None:
        """Move the bytes of these pool layers, or enqueue that on the current stream."""


@runtime_checkable
class WarmsUp(Protocol):
    """A backend whose first copy would take longer than others."""

    def warm_up(self, device: DevicePool, host: HostPool, direction: Direction) -> None:
        """Do now, on the stream's own thread, what that copy would have to do first."""


POISON = 0xFF
"""Every float dtype, eight bits wide or more, reads these bytes as NaN."""


@attrs.define(eq=False)
class PoolCopy:
    """What the built-in backends' prepared copies share: two pools, and runs from one to the other."""

    source: Pool
    destination: Pool
    pairs: tuple[tuple[ComponentGeometry, ComponentGeometry], ...]
    """(source, destination) of each component that is copied."""

    runs: Runs
    layer_bytes: int
    """Bytes of one layer."""

    @classmethod
    def of(cls, device: DevicePool, host: HostPool, direction: Direction, runs: Runs) -> Self:
        """Return the copy of `runs` between two pools."""
        load = direction is Direction.LOAD
        pairs = host.matches.get(device)
        if pairs is None:
            pairs = host.matches[device] = matched(host.geometry, device.geometry)
        return cls(
            host if load else device,
            device if load else host,
            pairs if load else tuple((ours, theirs) for theirs, ours in pairs),
            runs,
            runs.num_pages * device.geometry.page_bytes,
        )

    @property
    def pages(self) -> tuple[Pages, Pages]:
        """Source and destination pages, one pair per page."""
        return self.runs.pages

    def nbytes(self, layer: int) -> int:
        """Return the bytes of one pool layer."""
        return self.layer_bytes

    def poison(self, layer: int) -> None:
        """Fill the destination bytes of one pool layer with `POISON`."""
        pages = torch.from_numpy(self.pages[1]).to(self.destination.device)
        for _, part in self.pairs:
            view = self.destination.view(part.name, layer)
            view.index_fill_(0, pages, -1 if view.dtype is not torch.uint8 else POISON)

    @cached_property
    def _sides(self) -> tuple[list[int], list[int]]:
        source, destination = self.pages
        return source.tolist(), destination.tolist()

    def accesses(self, layer: int) -> tuple[Access, Access]:
        """Return what the copy of one pool layer reads and writes."""
        source, destination = self._sides
        return (
            Access(self.source, layer, source, write=False),
            Access(self.destination, layer, destination, write=True),
        )


class LayerWork:
    """The copies of one model layer of one batch, or of several: a `Work` for a driver's stream.

    Args:
        jobs: Each member of the group that has the model layer.
        nbytes: Bytes of all of them.
        calls: What moves them, where that is not one call for each.
    """

    __slots__ = ("calls", "jobs", "nbytes")

    def __init__(
        self, jobs: Jobs, nbytes: int, calls: Sequence[Callable[[], None]] | None = None
    ) -> None:
        self.jobs = jobs
        self.nbytes = nbytes
        self.calls = calls

    def __call__(self) -> None:
        """Move the bytes, or enqueue that on the current stream."""
        if self.calls is not None:
            for call in self.calls:
                call()
            return
        for prepared, layer in self.jobs:
            prepared.copy(layer)

    def poison(self) -> None:
        """Overwrite the destination bytes, so that a reader that came too early fails by value."""
        for prepared, layer in self.jobs:
            prepared.poison(layer)

    def accesses(self) -> list[Access]:
        """Return what it reads and writes, for a race detector."""
        return [access for prepared, layer in self.jobs for access in prepared.accesses(layer)]
