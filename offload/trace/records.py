"""What the ring holds, and what it looks like when it is read again.

The ring holds plain tuples of integers and strings, `(kind, start, end, ...)`: the cheapest records that
Python has, one append and no dictionary, and the garbage collector stops looking at them. A reader sees
the same fields by name: `KINDS[record[0]](*record[1:])`.

All times are nanoseconds of `time.perf_counter_ns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import attrs

Record: TypeAlias = tuple[Any, ...]
Scalar: TypeAlias = "str | int | float | bool | None"
Tags: TypeAlias = "Mapping[str, Scalar]"

COPY: Final = 0
PLAN: Final = 1
REQUEST: Final = 2
WAIT: Final = 3
STEP: Final = 4
LAYER: Final = 5
TICK: Final = 6
INSTANT: Final = 7
COUNTER: Final = 8

ASYNC_LANE: Final = -1
"""The lane of a wait that suspended a task instead of holding a thread."""

UNKNOWN: Final = -1
"""A duration that the recording does not tell."""


class Copy(NamedTuple):
    """One layer of one batch, landed."""

    start: int
    end: int
    issue: int
    """When it began to be enqueued; 0: not stamped."""
    issued: int
    batch: int
    direction: str
    stream: str
    layer: int
    nbytes: int
    ops: int
    """Copies asked for, before requests were merged and pages coalesced."""
    transfers: int
    """Copies made."""


class Plan(NamedTuple):
    """A batch became a list of copies."""

    start: int
    end: int
    batch: int
    direction: str
    stream: str
    requests: tuple[int, ...]


class Request(NamedTuple):
    """A request from submit to settled; `end` is the export's time when it has not settled."""

    start: int
    end: int
    issued: int
    """0: never."""
    request: int
    direction: str
    nbytes: int
    pages: int
    outcome: str
    """`done`, `failed`, `cancelled`; or `unfinished`."""
    tags: Tags | None


@attrs.frozen
class OpenRequest:
    """A request that has not settled, as `in_flight` reports it to an export."""

    request: int
    direction: str
    submitted_ns: int
    issued_ns: int
    """0 while queued."""
    nbytes: int
    pages: int
    tags: Tags | None = None

    def until(self, now: int) -> Request:
        """Return it as a request that ends now, unfinished."""
        return Request(
            self.submitted_ns,
            now,
            self.issued_ns,
            self.request,
            self.direction,
            self.nbytes,
            self.pages,
            "unfinished",
            self.tags,
        )


class Wait(NamedTuple):
    """A wait for one layer that suspended. `layer` -1: for all of them."""

    start: int
    end: int
    request: int
    direction: str
    layer: int
    lane: int
    queued: int = UNKNOWN
    """How much of it passed before its copy had started. Found by `Timeline.of`."""


class Step(NamedTuple):
    """One forward pass."""

    start: int
    end: int
    lane: int
    number: int


class Layer(NamedTuple):
    """The compute of one layer, and the requests whose pages it read."""

    start: int
    end: int
    layer: int
    lane: int
    requests: tuple[int, ...]


class Tick(NamedTuple):
    """One turn of the scheduler."""

    start: int
    end: int


class Instant(NamedTuple):
    """Something without length."""

    start: int
    end: int
    name: str
    args: Mapping[str, Scalar] | None


class Counter(NamedTuple):
    """Values that hold from `start` on."""

    start: int
    end: int
    name: str
    values: Mapping[str, int]


_NUMBERS: Final = {COPY: 5, PLAN: 3, REQUEST: 4, WAIT: 3}
"""Where in a record the number of its batch or request stands."""

_LISTS: Final = {PLAN: 6, LAYER: 5}
"""Where the numbers of several requests stand."""


def renumbered(record: Record, by: int) -> Record:
    """Return a record whose requests and batches have numbers higher by so many."""
    kind, fields = record[0], list(record)
    if kind in _NUMBERS:
        fields[_NUMBERS[kind]] += by
    if kind in _LISTS:
        fields[_LISTS[kind]] = tuple(number + by for number in fields[_LISTS[kind]])
    if kind == INSTANT and fields[4]:
        told = fields[4]
        fields[4] = {k: v + by if k in ("request", "batch") else v for k, v in told.items()}
    return tuple(fields)


KINDS: Final = (Copy, Plan, Request, Wait, Step, Layer, Tick, Instant, Counter)
"""The reader's type of each kind of record, by its number."""
