"""A third party's package: an io backend, a driver and a layout, registered by entry points."""

from __future__ import annotations

from collections.abc import Sequence

import offload
from offload.backend.base import Access, Jobs, PoolCopy
from offload.core.geometry import Geometry
from offload.core.kinds import Direction, PoolKind
from offload.core.plan import Runs
from offload.core.table import Rejection
from offload.testing import ThreadsDriver


class Backwards:
    """Copies page by page, the last one first; several members of a group in one go."""

    name = "backwards"
    joined = 0
    """How often it was given several members."""

    def prepare(
        self,
        device: offload.DevicePool,
        host: offload.HostPool,
        direction: Direction,
        runs: Runs,
    ) -> Copy:
        """Return the copies of a batch."""
        return Copy(PoolCopy.of(device, host, direction, runs))

    def copy_members(self, jobs: Jobs) -> None:
        """Copy a layer of all of them."""
        Backwards.joined += 1
        for prepared, layer in reversed(jobs):
            prepared.copy(layer)


class Copy:
    """Prepared copies of `backwards`."""

    def __init__(self, both: PoolCopy) -> None:
        self.both = both

    def copy(self, layer: int) -> None:
        """Copy one pool layer."""
        sources, destinations = self.both.pages
        for ours, theirs in self.both.pairs:
            source = self.both.source.view(ours.name, layer)
            destination = self.both.destination.view(theirs.name, layer)
            for there, here in zip(
                sources[::-1].tolist(), destinations[::-1].tolist(), strict=True
            ):
                destination[here].copy_(source[there])

    def nbytes(self, layer: int) -> int:
        """Return the bytes of one pool layer."""
        return self.both.layer_bytes

    def num_ops(self, layer: int) -> int:
        """Return one for each page of each component."""
        return self.both.runs.num_pages * len(self.both.pairs)

    def poison(self, layer: int) -> None:
        """Fill the destination."""
        self.both.poison(layer)

    def accesses(self, layer: int) -> Sequence[Access]:
        """Return what is read and written."""
        return self.both.accesses(layer)


class Loud(ThreadsDriver):
    """The threads driver under another name."""

    name = "loud"


def column(
    kind: PoolKind, direction: Direction, host: Geometry, device: Geometry
) -> str | Rejection:
    """Copy everything but rows."""
    return Rejection("'backwards' knows no rows") if kind is PoolKind.ROWS else "one_by_one"


def register_backend() -> None:
    """Entry point of `offload.backends`."""
    offload.register_backend("backwards", Backwards, column=column)


def register_driver() -> None:
    """Entry point of `offload.drivers`."""
    offload.register_driver("loud", lambda *, device, compute_streams: Loud())


def register_layout() -> None:
    """Entry point of `offload.layouts`."""
    offload.register_layout("head_first", "h p l t d")
