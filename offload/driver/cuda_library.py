"""`libcuda` through ctypes: what the CUDA driver offers and torch does not, or offers wrongly.

The batched copy is bound by hand, through `cuGetProcAddress` at version 12.8 with nine arguments,
because the bindings for CUDA 12 and 13 disagree about the argument `failIdx`, and choosing by the
wrong version is a crash instead of an error. The library asks for one ABI and gets that one or none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from offload.driver.cuda_calls import Words
from offload.errors import CudaError

_BATCH_VERSION = 12_080  # the version whose cuMemcpyBatchAsync has nine arguments


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
