"""Every call to a real GPU: `CudaCalls` over torch and `libcuda`. The only file that names `torch.cuda`.

Streams are the library's own: created non-blocking, so that nothing orders them implicitly with the
legacy default stream, and with the least priority. `torch.cuda.Stream` hands out 32 handles per
device in turn, so two of them may be one stream. Events block the waiting thread instead of spinning a
core: that is what `blocking=True` means, and only `torch.cuda.Event` honours it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from offload.driver.cuda_calls import Launch, RawEvent, RawStream, Words
from offload.driver.cuda_library import DriverLibrary

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_HOST_POINTER_WORKS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class TorchCuda:
    """`CudaCalls` over torch and `libcuda`.

    Nothing here has run on a GPU in the project's own tests unless they were run with `-m gpu`.
    """

    def __init__(self, library: DriverLibrary | None = None) -> None:
        self._driver = DriverLibrary() if library is None else library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._same: dict[int, bool] = {}

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
        self._exchange_mode(_RELAXED)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        before = self._exchange_mode(_RELAXED)
        try:
            yield
        finally:
            self._exchange_mode(before)

    def _exchange_mode(self, mode: int) -> int:
        """Set the calling thread's capture mode; return the one it had."""
        given = ctypes.c_int(mode)
        self._driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(given))
        return given.value

    @contextlib.contextmanager
    def using(self, stream: RawStream) -> Iterator[None]:
        with torch.cuda.stream(cast("torch.cuda.Stream", stream)):
            yield

    def current_stream(self, device: int) -> RawStream:
        return torch.cuda.current_stream(device)

    def capturing(self, device: int) -> bool:
        if torch.cuda.current_device() == device:
            return torch.cuda.is_current_stream_capturing()
        # Leaving the block makes no context on a device that had none: torch looks before it goes back.
        with torch.cuda.device(device):
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

    def drain(self, stream: RawStream) -> None:
        cast("torch.cuda.Stream", stream).synchronize()

    def as_stream(self, value: object) -> RawStream | None:
        # 1 CUDA's own kind, 2 the generic kind, such as `torch.accelerator` gives, 3 anything else.
        if isinstance(value, torch.cuda.Stream):
            return value
        if isinstance(value, torch.Stream) and value.device.type == "cuda":
            return torch.cuda.Stream(  # type: ignore[no-untyped-call]
                stream_id=value.stream_id,
                device_index=value.device_index,
                device_type=value.device_type,
            )
        return None

    def new_event(self, *, timing: bool) -> RawEvent:
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def as_event(self, value: object) -> RawEvent | None:
        if isinstance(value, torch.cuda.Event):
            return value
        generic = isinstance(value, torch.Event) and value.device.type == "cuda"
        return value if generic else None

    def is_recorded(self, event: RawEvent) -> bool:
        # torch creates the CUDA event at the first record, so a handle means recorded.
        if isinstance(event, torch.cuda.Event):
            return bool(event.cuda_event)
        return bool(cast("torch.Event", event).event_id)

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

    def device_memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        lasting, mine = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(lasting):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        mine.wait_stream(lasting)
        return memory

    def host_numbers(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.empty(len(numbers), dtype=torch.int64, pin_memory=True).copy_(
            torch.from_numpy(numbers)
        )

    def device_address(self, address: int) -> int:
        if self._reaches_by_host_address(torch.cuda.current_device()):
            return address
        found = ctypes.c_uint64()
        self._driver(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(found),
            ctypes.c_void_p(address),
            ctypes.c_uint(0),
        )
        return found.value

    def _reaches_by_host_address(self, device: int) -> bool:
        """Return whether registered memory has one address for both: asked once per device."""
        found = self._same.get(device)
        if found is None:
            handle, same = ctypes.c_int(), ctypes.c_int()
            self._driver("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._driver(
                "cuDeviceGetAttribute",
                ctypes.byref(same),
                ctypes.c_int(_HOST_POINTER_WORKS),
                handle,
            )
            found = self._same[device] = bool(same.value)
        return found
