"""The slow, obvious copy: nested loops over page, layer, token and head, on bytes.

It addresses tensors by the shapes that the layouts are documented to have, never by the geometry that
the backends use.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from offload.core.kinds import Layout, PoolKind
from offload.pool import Pool


def fill(pool: Pool, seed: int) -> None:
    """Fill every byte of a pool's arrays, padding included, from a seed."""
    draw = random.Random(seed)
    for flat in flats(pool):
        flat.copy_(torch.frombuffer(bytearray(draw.randbytes(len(flat))), dtype=torch.uint8))


def flats(pool: Pool) -> list[torch.Tensor]:
    """Return the bytes of every array of a pool, padding included."""
    found = []
    for array in pool.geometry.arrays:
        held = pool.tensors[array.name]
        for tensor in held if isinstance(held, list) else [held]:
            start = tensor.storage_offset() * tensor.element_size()
            whole = torch.empty(0, dtype=torch.uint8)
            whole.set_(tensor.untyped_storage(), start, (array.nbytes,), (1,))
            found.append(whole)
    return found


def same_bytes(one: Pool, other: Pool) -> bool:
    """Return whether two pools of one shape hold the same bytes, padding included."""
    return all(torch.equal(a, b) for a, b in zip(flats(one), flats(other), strict=True))


def cell(pool: Pool, component: str, layer: int, page: int, token: int, head: int) -> torch.Tensor:
    """Return the bytes of one head's row of one token of one layer of one page.

    Shapes:
        [D * itemsize] of uint8, sharing the pool's memory.
    """
    part = pool.geometry.component(component).component
    tensor = pool.tensors[component]
    slot = page * part.tokens + token
    opaque = pool.spec.kind in {PoolKind.ROWS, PoolKind.STATE}
    if isinstance(tensor, list):
        row = tensor[layer][slot] if opaque else tensor[layer][slot, head]
        return row.reshape(-1).view(torch.uint8)
    if opaque:
        row = _opaque_row(pool, tensor, layer, page)
        return row[token * part.dim : (token + 1) * part.dim].view(torch.uint8)
    match pool.geometry.layout:
        case Layout.LAYER_FIRST:
            row = tensor[layer, slot, head]
        case Layout.PAGE_FIRST if tensor.ndim == 5:  # a padded page stride takes P and T apart
            row = tensor[page, token, layer, head]
        case Layout.PAGE_FIRST:
            row = tensor[slot, layer, head]
        case Layout.PAGE_FIRST_DIRECT | Layout.PAGE_FIRST_KV_SPLIT:
            row = tensor[page, layer, token, head]
        case Layout.PAGE_HEAD:
            row = tensor[page, head, token, layer]
        case _:
            raise AssertionError(pool.geometry.label)
    return row.view(torch.uint8)


def _opaque_row(pool: Pool, tensor: torch.Tensor, layer: int, page: int) -> torch.Tensor:
    """Return one layer of an opaque page, whatever axes its elements are spread over."""
    first = pool.geometry.layout is Layout.LAYER_FIRST
    if tensor.ndim == 2:  # one layer, and no axis for it
        tensor = tensor.unsqueeze(0 if first else 1)
    return (tensor[layer, page] if first else tensor[page, layer]).view(-1)


def copy(
    source: Pool, destination: Pool, pages: Iterable[tuple[int, int]], layers: Iterable[int]
) -> None:
    """Copy (source page, destination page) pairs of some layers, one head's row at a time."""
    layers = list(layers)
    for here, there in pages:
        for layer in layers:
            for made in source.spec.components:
                part = made.component
                for token in range(part.tokens):
                    for head in range(part.heads):
                        taken = row(source, made.name, layer, here, token, head)
                        put(destination, made.name, layer, there, token, head, taken)


def row(pool: Pool, component: str, layer: int, page: int, token: int, head: int) -> torch.Tensor:
    """Return a row's bytes, joined where the pool stores its pieces apart."""
    names = _stored(pool, component)
    return torch.cat([cell(pool, name, layer, page, token, head) for name in names])


def put(
    pool: Pool, component: str, layer: int, page: int, token: int, head: int, taken: torch.Tensor
) -> None:
    """Write a row's bytes, piece by piece where the pool stores them apart."""
    start = 0
    for name in _stored(pool, component):
        target = cell(pool, name, layer, page, token, head)
        target.copy_(taken[start : start + len(target)])
        start += len(target)
    assert start == len(taken)


def _stored(pool: Pool, component: str) -> list[str]:
    if component in pool.tensors:
        return [component]
    parts = next(part for part in pool.spec.parts if part.name == component).parts
    return [name for name, _ in parts]
