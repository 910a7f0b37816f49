"""io backend `direct`: one plain copy per run of pages that lie together on both sides.

It is what torch does by itself, for comparison and for when nothing else may be used: so members of a group are not
joined either, and on a GPU `auto` prefers `memcpy_batch`, which takes whatever this takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs

from offload.backend.base import Access, PoolCopy
from offload.core.kinds import Direction
from offload.core.plan import Ops, Runs, copy_ops
from offload.driver.cuda_calls import copier
from offload.pool import DevicePool, HostPool


class DirectBackend:
    """Copies contiguous bytes with `Tensor.copy_`, so that torch never makes a temporary."""

    name = "direct"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> DirectCopy:
        """Find out which bytes; each layer then shifts them by its stride."""
        return DirectCopy(PoolCopy.of(device, host, direction, runs))


@attrs.define(eq=False)
class DirectCopy:
    """Prepared copies of `direct`."""

    _both: PoolCopy
    _found: dict[tuple[int, int], Ops] = attrs.field(init=False, factory=dict)

    def copy(self, layer: int) -> None:
        """Copy run by run. From and to pinned memory, the current stream goes on meanwhile."""
        both, move = self._both, copier()
        for index, (ours, theirs) in enumerate(both.pairs):
            source, _ = both.source.flat(ours.name, layer)
            destination, _ = both.destination.flat(theirs.name, layer)
            ops = self._ops(index, layer)
            starts, ends, sizes = ops.source, ops.destination, ops.nbytes
            for start, end, size in zip(
                starts.tolist(), ends.tolist(), sizes.tolist(), strict=True
            ):
                move(destination[end : end + size], source[start : start + size])

    def nbytes(self, layer: int) -> int:
        """Return the bytes of one pool layer."""
        return self._both.layer_bytes

    def num_ops(self, layer: int) -> int:
        """Return how many runs of bytes that is."""
        return sum(len(self._found_at(index, layer)) for index in range(len(self._both.pairs)))

    def poison(self, layer: int) -> None:
        """Fill the destination bytes of one pool layer."""
        self._both.poison(layer)

    def accesses(self, layer: int) -> Sequence[Access]:
        """Return what the copy of one pool layer reads and writes."""
        return self._both.accesses(layer)

    def _ops(self, index: int, layer: int) -> Ops:
        """Return the runs of one component."""
        ops = self._found_at(index, layer)
        if self.cut:
            return ops
        ours, theirs = self._both.pairs[index]
        return ops.shifted(layer * ours.layer_stride, layer * theirs.layer_stride)

    def _found_at(self, index: int, layer: int) -> Ops:
        """Return the runs of one component: as many and as long as they are, at the place of layer 0.

        At their own place where breaks cut each layer apart.
        """
        key = (index, layer if self.cut else 0)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = copy_ops(self._both.runs, *self._both.pairs[index], key[1])
        return found

    @cached_property
    def cut(self) -> bool:
        """Whether places that no copy may cross cut each layer in its own way."""
        return any(part.breaks for pair in self._both.pairs for part in pair)
