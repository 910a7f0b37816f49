"""Allocating pools: zeroed memory for every array of a geometry, and where its registrations meet if it is pinned."""

from __future__ import annotations

from math import lcm

import torch

from offload.core.geometry import Array, Component, Geometry
from offload.errors import RequestError
from offload.pinned import Pinned, pinned_memory
from offload.pool_base import Held
from offload.pool_memory import host_memory
from offload.spec import PoolSpec


def device_tensors(spec: PoolSpec, num_pages: int, where: torch.device) -> Held:
    """Return zeroed memory for a device pool, by component one tensor for each layer."""
    tensors: Held = {}
    for part in spec.components:
        shape = (num_pages * part.component.tokens, *part.row_shape)
        nbytes = num_pages * part.component.nbytes
        tensors[part.name] = [
            _zeros(nbytes, where).view(part.dtype).view(shape) for _ in range(spec.num_layers)
        ]
    return tensors


def host_tensors(
    spec: PoolSpec, geometry: Geometry, *, pinned: bool, near: int | None = None
) -> tuple[Geometry, Held]:
    """Return memory for a host pool, by array; and the geometry, with the places where its parts meet.

    Args:
        near: The GPU that pinned memory is for; None: the calling thread's current one.
    """
    dtypes = {name: part.dtype for part in spec.components for name in _stored(part.component)}
    tensors: Held = {}
    breaks: dict[str, tuple[int, ...]] = {}
    for array in geometry.arrays:
        blocks = [
            _host_block(array, geometry, pinned=pinned, near=near)
            for _ in range(spec.num_layers if array.separate else 1)
        ]
        breaks[array.name] = blocks[0].breaks  # of equal sizes, so cut in the same places
        made = [_shaped(block.memory, array, dtypes[array.name]) for block in blocks]
        tensors[array.name] = made if array.separate else made[0]
    return geometry.broken(breaks), tensors


def _host_block(array: Array, geometry: Geometry, *, pinned: bool, near: int | None) -> Pinned:
    """Return the memory of an array, and where its registrations meet if it is pinned."""
    if not pinned:
        return Pinned(host_memory(array.nbytes), ())
    strides = [part.page_stride for part in geometry.components if part.array == array.name]
    try:
        return pinned_memory(array.nbytes, granule=lcm(*strides), device=near)
    except OSError as error:
        if error.errno is not None:
            raise
        raise RequestError(  # a library that cannot be loaded has no number
            f"HostPool.allocate: pinned=True needs the CUDA driver: {error}. Leave pinned out."
        ) from error


def _shaped(block: torch.Tensor, array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return memory in an array's shape."""
    steps = tuple(stride // dtype.itemsize for stride in array.strides)
    return block.view(dtype).as_strided(array.shape, steps)


def _stored(component: Component) -> list[str]:
    """Return the names under which a component may be stored: its own and its pieces'."""
    return [component.name, *(name for name, _ in component.parts)]


def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return host_memory(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
