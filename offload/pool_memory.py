"""Raw memory for pools: lazily resident, 4096-aligned host blocks, and byte views of tensors."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.errors import CudaError, OutOfMemoryError, RequestError

ALIGNMENT = 4096
"""Bytes. What direct file I/O and memory registration ask of an address."""


_CUDA_OUT_OF_MEMORY = 2
"""What the CUDA driver returns where it cannot lock so much memory."""


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


def usable_device(call: str, device: str | torch.device) -> torch.device:
    """Return a device with its index: "cuda" is the current "cuda:i".

    Raises:
        RequestError: There is no such device here.
    """
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch's, by kind of device
        why = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise RequestError(
            f"{call}: device {str(device)!r} cannot be used here: {why}. Pass one that this torch has, "
            "such as 'cpu'.",
            value=device,
        ) from error


@contextmanager
def naming_bytes(call: str, *, num_pages: int, nbytes: int, where: str) -> Iterator[None]:
    """Say how many bytes were asked for where there are too few, whoever finds out.

    Raises:
        OutOfMemoryError: There are.
    """
    try:
        yield
    except (MemoryError, OverflowError, OSError, torch.OutOfMemoryError, CudaError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if isinstance(error, CudaError) and error.error_code != _CUDA_OUT_OF_MEMORY:
            raise
        raise OutOfMemoryError(call, num_pages=num_pages, nbytes=nbytes, where=where) from error
