"""io backend `cpu`: copies between host tensors, every layout and kind; `cpu_ways.py` has the ways.

A batch chooses one way for all its layers. What does not depend on the batch is found once per pair of pools:
each layer of each component, on both sides, as the widest words and fewest axes that the two share.
"""

from __future__ import annotations

from math import gcd

import attrs
import torch

from offload.backend.base import PoolCopy
from offload.backend.cpu_ways import Sides, Way, choose
from offload.core.geometry import ComponentGeometry, pair_alignment, pair_runs
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.pool import DevicePool, HostPool, Pool

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CpuBackend:
    """Copies between pools in host memory."""

    name = "cpu"

    def __init__(self) -> None:
        self._between: dict[tuple[Pool, Pool, Direction], _Between] = {}

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> CpuCopy:
        """Choose the way, and make the indices; views of the pools are kept for the next batch."""
        between = self._between.get((device, host, direction))
        if between is None:
            both = PoolCopy.of(device, host, direction, runs)
            between = self._between[device, host, direction] = _Between(
                both.source,
                both.destination,
                both.pairs,
                device.geometry.page_bytes,
                packed=all(ours.adjacent for ours, _ in both.pairs),
            )
        nbytes = runs.num_pages * between.page_bytes
        way = choose(runs, nbytes // len(between.pairs), packed=between.packed)
        return CpuCopy(
            between.source, between.destination, between.pairs, runs, nbytes, between, way
        )


@attrs.define(eq=False)
class _Between:
    """What all copies from one pool to another share."""

    source: Pool
    destination: Pool
    pairs: tuple[tuple[ComponentGeometry, ComponentGeometry], ...]
    page_bytes: int
    """Bytes of one layer of one page."""

    packed: bool
    """Whether pages of the source lie together."""

    layers: dict[int, tuple[Sides, ...]] = attrs.field(factory=dict)
    """By layer, each component."""


@attrs.define(eq=False)
class CpuCopy(PoolCopy):
    """Prepared copies of `cpu`."""

    _between: _Between
    _way: Way

    def copy(self, layer: int) -> None:
        """Copy one pool layer."""
        layers = self._between.layers
        sides = layers.get(layer)
        if sides is None:
            sides = layers[layer] = tuple(_sides(self, *pair, layer) for pair in self.pairs)
        copy = self._way.copy
        for each in sides:
            copy(each)

    def num_ops(self, layer: int) -> int:
        """Return how many copies torch or numpy is asked for."""
        return len(self.pairs) * self._way.num_ops


def _sides(both: PoolCopy, ours: ComponentGeometry, theirs: ComponentGeometry, layer: int) -> Sides:
    """Return one layer of a component on both sides, as the widest words and fewest axes they share."""
    source, _ = both.source.flat(ours.name, layer)
    destination, _ = both.destination.flat(theirs.name, layer)
    starts = (
        source.storage_offset() + ours.at(layer, 0),
        destination.storage_offset() + theirs.at(layer, 0),
    )
    word = gcd(8, pair_alignment(ours, theirs), *starts)
    runs = pair_runs(ours, theirs)
    sizes = (*(count for count, _ in runs.loops), runs.nbytes // word)
    views = []
    for side, (flat, part, pool) in enumerate(
        ((source, ours, both.source), (destination, theirs, both.destination))
    ):
        steps = (part.page_stride, *(pair[side] for _, pair in runs.loops))
        view = torch.empty(0, dtype=_WORDS[word]).set_(
            flat.untyped_storage(),
            starts[side] // word,
            (pool.num_pages, *sizes),
            (*(step // word for step in steps), 1),
        )
        views.append(view)
    return Sides(views[0], views[1], views[0].numpy(), views[1].numpy())
