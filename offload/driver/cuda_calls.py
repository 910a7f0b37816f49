"""The one seam to CUDA: every call that the library makes goes through a `CudaCalls`.

Theory of operation
-------------------
The driver, the backends and pinned memory never name CUDA themselves. They hold a `CudaCalls`: on a
GPU `TorchCuda` (`cuda_torch.py`), in tests `offload.testing.FakeCuda`, which executes. So one place knows

* which calls are torch's (streams, events, the small copies, so that torch's own bookkeeping stays
  right) and which are the CUDA driver's (what torch does not offer, or offers wrongly);
* that a failed call raises something with an `error_code`, whatever made it (`code` reads it);
* that current stream, current device and capture mode belong to a *thread*.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]
"""Addresses or lengths, one per copy."""

RawEvent = object
"""What the calls make as an event: opaque outside them."""

STICKY = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Codes that end the context: every later call returns them. CUDA's reference says of each of these
that the process must be terminated to go on using CUDA."""


class RawStream(Protocol):
    """A stream as the calls make it."""

    @property
    def cuda_stream(self) -> int:
        """Its handle; 0 is the legacy default stream, and each device has one of those."""

    @property
    def device_index(self) -> int:
        """Its device."""


@attrs.frozen(eq=False)
class Launch:
    """One kernel launch."""

    kernel: Any
    """A Triton kernel: `kernel[grid](*args, **meta)` launches it."""

    grid: tuple[int, ...]
    """Number of programs."""

    args: Sequence[object]
    """Tensors, addresses and numbers; kept alive by whoever launches until the stream has passed."""

    meta: Mapping[str, object]
    """Constants and launch options."""

    spans: Callable[[], tuple[Spans, Spans]]
    """Return the ranges that it reads and those that it writes; only a fake asks."""


@attrs.frozen(eq=False)
class Spans:
    """Byte ranges of memory."""

    addresses: Words
    """First byte of each."""

    sizes: Words
    """Length of each, in bytes."""


class CudaCalls(Protocol):
    """Every CUDA call of the library. Methods raise an exception with an `error_code` when one fails."""

    # The calling thread.

    def set_device(self, device: int) -> None:
        """Make `device` current for the calling thread; otherwise a context appears on device 0."""

    def current_device(self) -> int:
        """Return the calling thread's current device."""

    def pci_address(self, device: int) -> str:
        """Return where a device hangs, such as `0000:1b:00.0`."""

    def relax_capture(self) -> None:
        """Let the calling thread make calls that another thread's graph capture would forbid, for good."""

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        """Let it make them for the length of a block: to ask an event, to block, to register memory.

        Without that the call fails, and the capture of the other thread becomes invalid.
        """

    def using(self, stream: RawStream) -> contextlib.AbstractContextManager[None]:
        """Make `stream` and its device current for the calling thread, for the length of a block."""

    def current_stream(self, device: int) -> RawStream:
        """Return the calling thread's current stream of a device, whatever its current device is."""

    def capturing(self, device: int) -> bool:
        """Return whether the calling thread's current stream of a device is capturing a graph."""

    # Streams and events.

    def new_stream(self) -> RawStream:
        """Create a stream on the current device: non-blocking, of least priority."""

    def destroy_stream(self, stream: RawStream) -> None:
        """Destroy a stream that `new_stream` made. Work on it still runs to its end."""

    def drain(self, stream: RawStream) -> None:
        """Block the calling thread until all that was enqueued on a stream is done."""

    def as_stream(self, value: object) -> RawStream | None:
        """Return the stream that a caller's object is, if it is one of this kind of device."""

    def new_event(self, *, timing: bool) -> RawEvent:
        """Create an event that blocks instead of spinning. It orders nothing before `record`.

        It belongs to the device of its first record, and streams of others may wait for it only.
        """

    def as_event(self, value: object) -> RawEvent | None:
        """Return the event that a caller's object is, if it is one of this kind of device."""

    def is_recorded(self, event: RawEvent) -> bool:
        """Return whether somebody has recorded the event. Before that, waits on it do nothing."""

    def record(self, event: RawEvent, stream: RawStream) -> None:
        """Let `event` mark the present end of `stream`."""

    def wait(self, event: RawEvent, stream: RawStream) -> None:
        """Order everything enqueued on `stream` from now on after `event`."""

    def query(self, event: RawEvent) -> bool:
        """Return whether everything before `event` on its stream is done."""

    def synchronize(self, event: RawEvent) -> None:
        """Block the calling thread until `event` is done. Holds no interpreter lock meanwhile."""

    def elapsed_ms(self, start: RawEvent, end: RawEvent) -> float:
        """Return the milliseconds between two events made with timing, both done."""

    # Copies: enqueued on the current stream.

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between two contiguous one-dimensional `uint8` views."""

    @property
    def has_batch_copy(self) -> bool:
        """Whether the CUDA driver copies many ranges in one call; otherwise one call for each."""

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words) -> None:
        """Copy many ranges, in no order, each after the stream's earlier work.

        No range may overlap another's destination. The arrays are kept by the caller until the
        stream has passed.
        """

    def launch(self, launch: Launch) -> None:
        """Launch a kernel."""

    # Memory.

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory and map it into the device's address space."""

    def unregister(self, address: int) -> None:
        """Undo `register`, given the same address."""

    def device_memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of the device, for the current stream to use after what used it before.

        It is of the device's default stream, which lives as long as the process: torch's allocator keeps a
        block's stream as long as it keeps the block, and may yet synchronize it, so it must not be one that
        is destroyed. Whoever lets go of it has seen the last use of it pass.

        Shapes:
            [nbytes] of uint8.
        """

    def host_numbers(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the numbers in page-locked host memory, where a kernel reads them in place.

        The memory goes back to a pool when the tensor dies: keep it until the kernel has passed.

        Shapes:
            [N] of int64.
        """

    def device_address(self, address: int) -> int:
        """Return under which address a kernel reaches registered host memory: mostly the same one."""


class _Bound(threading.local):
    """The calls of the stream that a thread works for."""

    calls: CudaCalls | None = None


_BOUND = _Bound()


def bind(calls: CudaCalls) -> None:
    """Let backends on the calling thread find `calls`. A stream's threads do it once, first."""
    _BOUND.calls = calls


def is_bound() -> bool:
    """Return whether the calling thread is a stream's, or another of ours."""
    return _BOUND.calls is not None


def here() -> CudaCalls:
    """Return the calls of the stream whose thread this is: how a backend reaches CUDA.

    Raises:
        RuntimeError: This thread works for no CUDA stream.
    """
    if _BOUND.calls is None:
        raise RuntimeError("this thread works for no CUDA stream, so it has no CUDA calls")
    return _BOUND.calls


def copier() -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return how the calling thread copies bytes: through its stream's calls, or at once if it has none."""
    return _copy_now if _BOUND.calls is None else _BOUND.calls.copy


def _copy_now(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


def code(error: BaseException) -> int | None:
    """Return the CUDA code that an exception carries, or None when it carries none."""
    found = getattr(error, "error_code", None)
    return found if isinstance(found, int) else None
