"""Every error that offload raises. Each class builds its text from its fields, and can be pickled.

A text says what was asked, why it cannot be, and what works instead.
"""

from __future__ import annotations

from offload.errors_asked import GeometryError, NotATrace, RequestError
from offload.errors_base import OffloadError, counted, one_of, shown, sized, told
from offload.errors_outcomes import (
    CudaError,
    InvalidTransitionError,
    OutOfMemoryError,
    OutOfPagesError,
    SchedulerClosedError,
    TransferCancelled,
    TransferFailed,
    left_behind,
)
from offload.errors_pairs import UnknownNameError, UnsupportedPairError

__all__ = [
    "CudaError",
    "GeometryError",
    "InvalidTransitionError",
    "NotATrace",
    "OffloadError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "RequestError",
    "SchedulerClosedError",
    "TransferCancelled",
    "TransferFailed",
    "UnknownNameError",
    "UnsupportedPairError",
    "counted",
    "left_behind",
    "one_of",
    "shown",
    "sized",
    "told",
]

for _name in __all__:  # where tracebacks and pickles look for them, whatever the file
    globals()[_name].__module__ = __name__
