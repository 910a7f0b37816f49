"""Raw memory for pools: lazily resident, 4096-aligned host blocks, and byte views of tensors."""

from __future__ import annotations

import mmap

import torch

ALIGNMENT = 4096
"""Bytes. What direct file I/O and memory registration ask of an address."""


def host_memory(nbytes: int) -> torch.Tensor:
    """Return a block of zeroed host bytes whose base is a multiple of `ALIGNMENT`.

    Nothing is resident until it is touched, and a forked child that writes gets a copy.

    Shapes:
        [nbytes] of uint8.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def flat_view(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the bytes from a tensor's first element on, over its own storage, without autograd.

    Shapes:
        [nbytes] of uint8.
    """
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (nbytes,), (1,))
