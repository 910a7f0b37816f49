"""What the ring holds: one plain tuple of integers and strings per thing that happened.

Tuples of integers and strings are the cheapest records that Python has: one append, no dictionary, and the
garbage collector stops looking at them. All times are nanoseconds of `time.perf_counter_ns`. Field 0 is
the kind, fields 1 and 2 are start and end, the rest depends on the kind:

    COPY      issue_ns, issued_ns, batch, direction, stream, layer, nbytes, ops, transfers
    PLAN      batch, direction, stream, requests
    REQUEST   issued_ns, request, direction, nbytes, pages, outcome, labels
    WAIT      request, direction, layer, lane
    STEP      lane, number
    LAYER     layer, lane, requests
    TICK      (nothing)
    INSTANT   name, args
    COUNTER   name, values
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Record: TypeAlias = tuple[Any, ...]

COPY: Final = 0
PLAN: Final = 1
REQUEST: Final = 2
WAIT: Final = 3
STEP: Final = 4
LAYER: Final = 5
TICK: Final = 6
INSTANT: Final = 7
COUNTER: Final = 8

LAYER_OF_ALL: Final = -1
"""The layer of a wait that was for the whole transfer."""

ASYNC_LANE: Final = -1
"""The lane of a wait that suspended a task instead of holding a thread."""
