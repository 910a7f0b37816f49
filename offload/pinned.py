"""Page-locked host memory for pools: mapped, made resident near the GPU, registered in chunks.

Theory of operation
-------------------
torch's own pinned allocator rounds a block up to a power of two, so 33 GiB become 64. Here the memory is a
shared mapping of its own: exactly as large as asked, rounded to the system's page, and shared with a forked
child instead of copied under a running copy.

A registration of 512 GiB fails on current drivers, so a big mapping is registered in chunks of at most
`CHUNK` bytes. A copy that crosses from one chunk into the next is refused by CUDA, although the addresses are
neighbours. So the places where chunks meet, `breaks`, go into the pool's geometry, and plans are cut there.

All or nothing: when a chunk fails, those before it are unregistered, last first, and the error is raised.
`pinned_keeper.py` does both, on a thread of its own. It is called before serving: registering is said to take
about 0.1 s per GiB (vllm#51080; not measured here).

A shared mapping is what the kernel calls shmem. Its pages are the system's (4 KiB on x86: 134 million of them in
512 GiB), unless `/sys/kernel/mm/transparent_hugepage/shmem_enabled` says `advise` or `always`; huge pages are
asked for. It counts as shared memory: against the memory limit of its cgroup, where making it resident beyond
that gets the process killed and not refused, and not against the size of /dev/shm. Registering locks it through
the CUDA driver; where that counts it as locked memory, `ulimit -l` has to allow it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import lcm
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import torch

from offload.driver.cuda_calls import CudaCalls
from offload.driver.cuda_torch import TorchCuda
from offload.pinned_keeper import Mapping, keeper_of

CHUNK = 64 << 30
"""Bytes of the largest registration: 512 GiB in one fails on driver r580 and later (vllm#51080)."""

_PREFAULT_THREADS = 8  # one thread makes 2-4 GB/s resident, and memory takes several times that


@attrs.frozen(eq=False)
class Pinned:
    """A block of page-locked memory."""

    memory: torch.Tensor
    """[nbytes] of uint8. The block lives as long as it and its views."""

    breaks: tuple[int, ...]
    """Byte offsets where two registrations meet."""


def pinned_memory(
    nbytes: int, *, granule: int, calls: CudaCalls | None = None, device: int | None = None
) -> Pinned:
    """Return zeroed page-locked memory whose base is a multiple of the system's page.

    Args:
        granule: Bytes, such as a page stride. Chunks end on its multiples where they can, so that what lies
            between two of them is in one chunk.
        calls: How CUDA is reached.
        device: The GPU to be near to; None: the calling thread's current one, which stays that.

    Raises:
        CudaError: A chunk could not be registered. None is then.
    """
    calls = _made(TorchCuda) if calls is None else calls
    near = calls.current_device() if device is None else device
    whole = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = Mapping(-1, whole, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    bounds = chunk_bounds(whole, granule=granule, chunk=CHUNK)
    keeper_of(calls, near).register(
        mapping,
        memory.data_ptr(),
        bounds,
        lambda: _prefault(memory.numpy(), _cpus_near(calls.pci_address(near))),
    )
    return Pinned(memory[:nbytes], tuple(bound for bound in bounds[1:-1] if bound < nbytes))


@cache
def _made(factory: Callable[[], CudaCalls]) -> CudaCalls:
    """Return the calls that a process shares, so that its pools share a thread."""
    return factory()


def chunk_bounds(nbytes: int, *, granule: int, chunk: int) -> list[int]:
    """Return the offsets where registrations begin and end, 0 and `nbytes` included.

    Chunks end on the system's pages, because two registrations of one page are refused; and on multiples of
    `granule` too, unless the two together only meet behind `chunk` bytes.
    """
    step = lcm(granule, mmap.PAGESIZE)
    if step > chunk:
        step = mmap.PAGESIZE
    size = max(chunk // step, 1) * step
    return [*range(0, nbytes, size), nbytes]


def _prefault(memory: npt.NDArray[np.uint8], cpus: frozenset[int]) -> None:
    """Make memory resident, from threads on these cores: a page lives where it was first touched."""
    pages = -(-len(memory) // mmap.PAGESIZE)
    share = -(-pages // _PREFAULT_THREADS) * mmap.PAGESIZE
    parts = [memory[start : start + share] for start in range(0, len(memory), share)]
    with ThreadPoolExecutor(_PREFAULT_THREADS, initializer=partial(_stay_on, cpus)) as pool:
        list(pool.map(_touch, parts))


def _touch(part: npt.NDArray[np.uint8]) -> None:
    part[:: mmap.PAGESIZE] = 0


def _stay_on(cpus: frozenset[int]) -> None:
    """Keep the calling thread on these cores, those of them that this process may use."""
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)


def _cpus_near(pci_address: str, root: Path = Path("/sys")) -> frozenset[int]:
    """Return the cores of the NUMA node that a PCI device hangs on; empty where nothing says so."""
    try:
        node = int((root / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return frozenset()
    cpus: set[int] = set()
    for span in listed.strip().split(","):
        first, _, last = span.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
