"""Host memory that a GPU reaches under other addresses: the same bytes, mapped a second time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import torch

from offload.core.kinds import Layout
from offload.driver.cuda_calls import Launch, Words
from offload.pool import HostPool
from offload.spec import PoolSpec
from offload.testing_cuda import FakeCuda


@attrs.frozen(eq=False)
class Twice:
    """One block of memory, and where its chunks are mapped a second time."""

    memory: torch.Tensor
    chunk: int
    again: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...]

    def address(self, address: int) -> int:
        """Return the second address of a byte."""
        number, within = divmod(address - self.memory.data_ptr(), self.chunk)
        return int(self.again[number].ctypes.data) + within

    def first(self, addresses: Words) -> int:
        """Return how many of these addresses are of the first mapping."""
        start = self.memory.data_ptr()
        inside = (addresses >= start) & (addresses < start + len(self.memory))
        return int(inside.sum())


@contextmanager
def mapped_twice(chunk: int, chunks: int) -> Iterator[Twice]:
    """Map so many chunks in one piece, and each once more on its own."""
    file = os.memfd_create("offload-test")
    try:
        os.ftruncate(file, chunk * chunks)
        whole = np.frombuffer(mmap.mmap(file, chunk * chunks), np.uint8)
        again = [
            np.frombuffer(mmap.mmap(file, chunk, offset=n * chunk), np.uint8) for n in range(chunks)
        ]
        yield Twice(torch.from_numpy(whole), chunk, tuple(again))
    finally:
        os.close(file)


def host_pool(twice: Twice, spec: PoolSpec, layout: Layout) -> HostPool:
    """Return a page-locked pool in such memory, broken where its chunks meet."""
    made = HostPool.allocate(spec, num_pages=1, layout=layout, pinned=False)
    num_pages = len(twice.memory) // made.nbytes
    (array,) = HostPool.allocate(
        spec, num_pages=num_pages, layout=layout, pinned=False
    ).geometry.arrays
    dtype = spec.components[0].dtype
    tensor = twice.memory[: array.nbytes].view(dtype).view(array.shape)
    pool = HostPool.adopt(spec, {array.name: tensor}, layout=layout)
    breaks = tuple(range(twice.chunk, array.nbytes, twice.chunk))
    pool.geometry = pool.geometry.broken({array.name: breaks})
    pool.pinned = True
    return pool


class Elsewhere(FakeCuda):
    """A GPU that knows page-locked memory by its second addresses."""

    def __init__(self, twice: Twice, seed: int = 0) -> None:
        super().__init__(seed)
        self.twice = twice
        self.wrong = 0
        """Addresses that copies used and a GPU could not."""
        self.launches: list[Launch] = []

    def device_address(self, address: int) -> int:
        super().device_address(address)
        return self.twice.address(address)

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words) -> None:
        self.wrong += self.twice.first(destinations) + self.twice.first(sources)
        super().copy_batch(destinations, sources, sizes)

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        super().launch(launch)
