"""Where in memory the copies of a layer begin and end: what the CUDA backends add to byte offsets."""

from __future__ import annotations

import numpy as np

from offload.backend.base import PoolCopy
from offload.core.plan import Offsets, Ops
from offload.driver.cuda_calls import Words


def addresses(both: PoolCopy, index: int, layer: int, ops: Ops) -> tuple[Words, Words, Words]:
    """Return addresses of sources and of destinations, and sizes, of one component's copies."""
    ours, theirs = both.pairs[index]
    source, _ = both.source.flat(ours.name, layer)
    destination, _ = both.destination.flat(theirs.name, layer)
    return (
        _at(source.data_ptr(), ops.source),
        _at(destination.data_ptr(), ops.destination),
        ops.nbytes.astype(np.uint64),
    )


def _at(address: int, offsets: Offsets) -> Words:
    return offsets.astype(np.uint64) + np.uint64(address)
