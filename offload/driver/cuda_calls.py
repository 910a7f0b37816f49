"""The one seam to CUDA: every call that the library makes goes through a `CudaCalls`.

Theory of operation
-------------------
The driver, the backends and pinned memory never name CUDA themselves. They hold a `CudaCalls`: on a
GPU `TorchCuda`, in tests `offload.testing.FakeCuda`, which executes. So one place knows

* which calls are torch's (streams, events, the small copies, so that torch's own bookkeeping stays
  right) and which are the CUDA driver's (what torch does not offer, or offers wrongly);
* that a failed call raises something with an `error_code`, whatever made it (`code` reads it);
* that current stream, current device and capture mode belong to a *thread*.

Streams are the library's own: created non-blocking, so that nothing orders them implicitly with the
legacy default stream, and with the least priority. `torch.cuda.Stream` hands out 32 handles per
device in turn, so two of them may be one stream. Events block the waiting thread instead of spinning a
core: that is what `blocking=True` means, and only `torch.cuda.Event` honours it.

The batched copy is bound by hand, through `cuGetProcAddress` at version 12.8 with nine arguments,
because the bindings for CUDA 12 and 13 disagree about the argument `failIdx`, and choosing by the
wrong version is a crash instead of an error. The library asks for one ABI and gets that one or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

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

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_HOST_POINTER_WORKS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_BATCH_VERSION = 12_080  # the version whose cuMemcpyBatchAsync has nine arguments


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""

    def __init__(self, call: str, error_code: int, text: str = "") -> None:
        self.call = call
        self.error_code = error_code
        detail = f" ({text})" if text else ""
        super().__init__(f"{call} returned CUDA error {error_code}{detail}")


class RawStream(Protocol):
    """A stream as the calls make it."""

    @property
    def cuda_stream(self) -> int:
        """Its handle; 0 is the legacy default stream."""


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
        """Let the calling thread make calls that another thread's graph capture would forbid."""

    def using(self, stream: RawStream) -> contextlib.AbstractContextManager[None]:
        """Make `stream` and its device current for the calling thread, for the length of a block."""

    def current_stream(self) -> RawStream:
        """Return the calling thread's current stream."""

    def capturing(self) -> bool:
        """Return whether the calling thread's current stream is capturing a graph."""

    # Streams and events.

    def new_stream(self) -> RawStream:
        """Create a stream on the current device: non-blocking, of least priority."""

    def destroy_stream(self, stream: RawStream) -> None:
        """Destroy a stream that `new_stream` made. Work on it still runs to its end."""

    def is_stream(self, value: object) -> bool:
        """Return whether this is a stream of this kind of device."""

    def new_event(self, *, timing: bool) -> RawEvent:
        """Create an event that blocks instead of spinning. It orders nothing before `record`."""

    def is_event(self, value: object) -> bool:
        """Return whether this is an event of this kind of device."""

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


class _Location(ctypes.Structure):
    """CUmemLocation: type and id. Zero is no hint; hints matter for managed memory only."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes, 24 bytes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


# Order STREAM: a source is read in stream order. ANY would let it be read before the waits that
# stand in front of the copy.
_STREAM_ORDER = _CopyAttributes(order=1)
_FIRST_INDEX = ctypes.c_size_t(0)


class DriverLibrary:
    """`libcuda` through ctypes: the handful of calls that torch does not offer."""

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._batch = self._find_batch_copy()

    def __call__(self, name: str, *args: object) -> None:
        """Call the function of this name; raise `CudaError` when it returns anything but success."""
        self._check(name, getattr(self._library, name)(*args))

    def _check(self, name: str, result: int) -> None:
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
        raise CudaError(name, result, (text.value or b"").decode())

    def _find_batch_copy(self) -> Callable[..., int] | None:
        address = ctypes.c_void_p()
        status = ctypes.c_int()
        result = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(address),
            ctypes.c_int(_BATCH_VERSION),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if result != 0 or not address.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        signature = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        return signature(address.value)

    @property
    def has_batch_copy(self) -> bool:
        """Whether this CUDA driver has the nine-argument `cuMemcpyBatchAsync`."""
        return self._batch is not None

    def copy_batch(
        self, destinations: Words, sources: Words, sizes: Words, stream_handle: int
    ) -> None:
        """Enqueue the copies on a stream: in one call, or one call each where there is no batch."""
        if stream_handle == 0:
            raise CudaError("cuMemcpyBatchAsync", 400, "the legacy stream takes no batch")
        stream = ctypes.c_void_p(stream_handle)
        if self._batch is None:
            for to, start, size in zip(destinations, sources, sizes, strict=True):
                self(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(int(to)),
                    ctypes.c_uint64(int(start)),
                    ctypes.c_size_t(int(size)),
                    stream,
                )
            return
        failed = ctypes.c_size_t()
        result = self._batch(
            destinations.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(_STREAM_ORDER),
            ctypes.addressof(_FIRST_INDEX),
            1,
            ctypes.addressof(failed),
            stream,
        )
        self._check("cuMemcpyBatchAsync", result)


class TorchCuda:
    """`CudaCalls` over torch and `libcuda`.

    Nothing here has run on a GPU in the project's own tests unless they were run with `-m gpu`.
    """

    def __init__(self, library: DriverLibrary | None = None) -> None:
        self._driver = DriverLibrary() if library is None else library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def set_device(self, device: int) -> None:
        torch.cuda.set_device(device)
        # torch skips the call when the device is current by default, and then the thread has no
        # context for the driver's own calls.
        self._driver("cuCtxSetCurrent", self._context(device))

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def pci_address(self, device: int) -> str:
        handle, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        self._driver("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._driver("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), handle)
        return text.value.decode()

    def _context(self, device: int) -> ctypes.c_void_p:
        found = self._contexts.get(device)
        if found is None:
            handle, found = ctypes.c_int(), ctypes.c_void_p()
            self._driver("cuInit", ctypes.c_uint(0))
            self._driver("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._driver("cuDevicePrimaryCtxRetain", ctypes.byref(found), handle)
            self._contexts[device] = found
        return found

    def relax_capture(self) -> None:
        mode = ctypes.c_int(_RELAXED)
        self._driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextlib.contextmanager
    def using(self, stream: RawStream) -> Iterator[None]:
        with torch.cuda.stream(cast("torch.cuda.Stream", stream)):
            yield

    def current_stream(self) -> RawStream:
        return torch.cuda.current_stream()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_stream(self) -> RawStream:
        least, greatest, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._driver("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._driver(
            "cuStreamCreateWithPriority", ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), least
        )
        assert handle.value is not None
        device = torch.cuda.current_device()
        return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]

    def destroy_stream(self, stream: RawStream) -> None:
        self._driver("cuStreamDestroy_v2", ctypes.c_void_p(stream.cuda_stream))

    def is_stream(self, value: object) -> bool:
        return isinstance(value, torch.cuda.Stream)

    def new_event(self, *, timing: bool) -> RawEvent:
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def is_event(self, value: object) -> bool:
        return isinstance(value, torch.cuda.Event)

    def is_recorded(self, event: RawEvent) -> bool:
        # torch creates the CUDA event at the first record, so a handle means recorded.
        return bool(cast("torch.cuda.Event", event).cuda_event)

    def record(self, event: RawEvent, stream: RawStream) -> None:
        cast("torch.cuda.Event", event).record(cast("torch.cuda.Stream", stream))

    def wait(self, event: RawEvent, stream: RawStream) -> None:
        cast("torch.cuda.Event", event).wait(cast("torch.cuda.Stream", stream))

    def query(self, event: RawEvent) -> bool:
        return bool(cast("torch.cuda.Event", event).query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: RawEvent) -> None:
        cast("torch.cuda.Event", event).synchronize()

    def elapsed_ms(self, start: RawEvent, end: RawEvent) -> float:
        return float(cast("torch.cuda.Event", start).elapsed_time(cast("torch.cuda.Event", end)))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.dtype == source.dtype == torch.uint8
        assert destination.is_contiguous()
        assert source.is_contiguous()
        destination.copy_(source, non_blocking=True)

    @property
    def has_batch_copy(self) -> bool:
        return self._driver.has_batch_copy

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words) -> None:
        handle = torch.cuda.current_stream().cuda_stream
        self._driver.copy_batch(destinations, sources, sizes, handle)

    def launch(self, launch: Launch) -> None:
        launch.kernel[launch.grid](*launch.args, **launch.meta)

    def register(self, address: int, nbytes: int) -> None:
        self._driver(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_PORTABLE_MAPPED),
        )

    def unregister(self, address: int) -> None:
        self._driver("cuMemHostUnregister", ctypes.c_void_p(address))

    def host_numbers(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.empty(len(numbers), dtype=torch.int64, pin_memory=True).copy_(
            torch.from_numpy(numbers)
        )

    def device_address(self, address: int) -> int:
        handle, same = ctypes.c_int(), ctypes.c_int()
        self._driver("cuCtxGetDevice", ctypes.byref(handle))
        self._driver(
            "cuDeviceGetAttribute", ctypes.byref(same), ctypes.c_int(_HOST_POINTER_WORKS), handle
        )
        if same.value:
            return address
        found = ctypes.c_uint64()
        self._driver(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(found),
            ctypes.c_void_p(address),
            ctypes.c_uint(0),
        )
        return found.value
