"""Where in memory the copies of a layer begin and end: what the CUDA backends add to byte offsets.

A GPU mostly reaches page-locked host memory under the host's own addresses. Where it does not (WSL2), each
registered chunk has another address, and everything that carries addresses must carry that one.
"""

from __future__ import annotations

import numpy as np
import torch

from offload.backend.base import PoolCopy
from offload.core.geometry import ComponentGeometry
from offload.core.plan import Offsets, Ops
from offload.driver.cuda_calls import Words, here
from offload.errors import GeometryError
from offload.pool import Pool


def addresses(both: PoolCopy, index: int, layer: int, ops: Ops) -> tuple[Words, Words, Words]:
    """Return addresses of sources and of destinations, and sizes, of one component's copies."""
    ours, theirs = both.pairs[index]
    return (
        _at(both.source, ours, layer, ops.source),
        _at(both.destination, theirs, layer, ops.destination),
        ops.nbytes.astype(np.uint64),
    )


def address(pool: Pool, part: ComponentGeometry, layer: int) -> int:
    """Return under which address a kernel finds the array that holds a layer.

    Raises:
        GeometryError: Its registered chunks do not follow each other there.
    """
    starts = set(_starts(pool, pool.flat(part.name, layer)[0], part.breaks))
    if len(starts) > 1:
        raise GeometryError(
            f"array {part.array!r} of the host pool",
            expected={"device addresses": "one range"},
            got={"device addresses": f"{len(starts)} ranges, which no kernel can read as one"},
            remedy="Use io_backend 'memcpy_batch', or a host pool of at most one registered chunk.",
        )
    return starts.pop()


def _at(pool: Pool, part: ComponentGeometry, layer: int, offsets: Offsets) -> Words:
    starts = np.array(_starts(pool, pool.flat(part.name, layer)[0], part.breaks), np.uint64)
    chunk = np.searchsorted(part.breaks, offsets, side="right") if len(starts) > 1 else 0
    found: Words = offsets.astype(np.uint64) + starts[chunk]
    return found


def _starts(pool: Pool, flat: torch.Tensor, breaks: tuple[int, ...]) -> list[int]:
    """Return, for each registered chunk, what the device adds to an offset into the array."""
    first = flat.data_ptr()
    if not pool.pinned:
        return [first]
    calls = here()
    return [calls.device_address(first + chunk) - chunk for chunk in (0, *breaks)]
