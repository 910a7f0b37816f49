"""Binding a device pool to a host pool: everything that differs, in one error."""

from __future__ import annotations

import torch

from offload.errors import GeometryError
from offload.pool_base import Pool
from offload.spec import PoolSpec


def check_pair(device: Pool, host: Pool) -> None:
    """Raise with everything that differs between two pools that are to exchange pages.

    Bytes are moved and never converted: dtypes must be equal, except that raw `uint8` takes any dtype
    of one byte.

    Raises:
        GeometryError: Kind, layers, page size, components, sizes or dtypes differ.
    """
    ours, theirs = _facts(device.spec), _facts(host.spec)
    if {device.geometry.names, host.geometry.names} != {
        tuple(c.name for c in device.spec.components)
    }:
        ours |= _pieces(device.spec)
        theirs |= _pieces(host.spec)
    for part in {
        *(c.name for c in device.spec.components),
        *(c.name for c in host.spec.components),
    }:
        key = f"{part} dtype"
        if key in ours and key in theirs and _same_bits(ours[key], theirs[key]):
            del ours[key], theirs[key]
    differ = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if differ:
        raise GeometryError(
            "the host pool does not fit the device pool",
            expected={name: ours.get(name, "absent") for name in differ},
            got={name: theirs.get(name, "absent") for name in differ},
            remedy="Derive the host pool from the device pool: HostPool.like(device, ...).",
        )


def _facts(spec: PoolSpec) -> dict[str, object]:
    facts: dict[str, object] = {
        "kind": spec.kind.value,
        "num_layers": spec.num_layers,
        "page_size": spec.page_size,
    }
    for made in spec.components:
        part = made.component
        row = part.heads * part.dim
        shape = f"{row * part.itemsize} bytes ({part.heads} x {part.dim} elements)"
        facts[f"{part.name} row"] = shape
        facts[f"{part.name} rows per page"] = part.tokens
        facts[f"{part.name} dtype"] = made.dtype
    return facts


def _pieces(spec: PoolSpec) -> dict[str, object]:
    """Return the pieces that one side stores apart, and whose widths must therefore agree."""
    return {
        f"{part.name} pieces": ", ".join(f"{name} {dim}" for name, dim in part.parts) or "none"
        for part in spec.parts
    }


def _same_bits(one: object, other: object) -> bool:
    assert isinstance(one, torch.dtype)
    assert isinstance(other, torch.dtype)
    return one == other or (one.itemsize == other.itemsize and torch.uint8 in {one, other})
