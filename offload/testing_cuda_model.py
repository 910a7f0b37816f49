"""What a fake CUDA is made of: streams, events, operations, accesses, and who comes before whom."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import numpy as np
import torch

from offload.driver.cuda_calls import Spans, Words

Clock = dict[int, int]


@attrs.frozen
class Call:
    """One call that was made."""

    name: str
    thread: str
    device: int
    stream: int
    """Handle of the calling thread's current stream."""
    arguments: tuple[object, ...]


@attrs.define(eq=False)
class FakeStream:
    """A queue of operations that run when they are stepped."""

    device: int
    cuda_stream: int
    number: int
    """Its place in vector clocks."""
    enqueued: int = 0
    done: int = 0
    clock: Clock = attrs.field(factory=dict)
    queue: deque[Op] = attrs.field(factory=deque)
    destroyed: bool = False
    held: bool = False
    """Not stepped now."""

    @property
    def able(self) -> bool:
        """Whether it has something to do that it may do now."""
        return bool(self.queue) and not self.held and self.queue[0].ready()

    @property
    def device_index(self) -> int:
        """Its device, by torch's name for that."""
        return self.device

    def __repr__(self) -> str:
        return f"<FakeStream {self.device}:{self.cuda_stream} {self.done}/{self.enqueued}>"


@attrs.define(eq=False)
class FakeEvent:
    """A snapshot of a stream's position; before the first record, of nothing."""

    timing: bool
    device: int | None = None
    """That of its first record. Streams of others may wait for it, and not record it."""
    stream: FakeStream | None = None
    position: int = 0
    clock: Clock = attrs.field(factory=dict)
    time: int = 0
    """Steps taken when it passed."""
    captured: bool = False
    """Whether its last record went into a graph, so that nobody may ask it."""

    @property
    def done(self) -> bool:
        """Whether the snapshot has been reached; true as well when there is none."""
        return self.stream is None or self.stream.done >= self.position


@attrs.frozen(eq=False)
class Generic:
    """A stream or an event as `torch.Stream` and `torch.Event` speak of it, without CUDA's own names."""

    same: FakeStream | FakeEvent

    def query(self) -> bool:
        """Return whether all is done: of a stream, what is enqueued by now."""
        same = self.same
        return same.done if isinstance(same, FakeEvent) else not same.queue

    def synchronize(self) -> None:
        """Refuse: in a test nobody would step."""
        raise AssertionError("asked past the seam")


@attrs.define(eq=False)
class Capture:
    """A graph that a thread's stream captures."""

    stream: FakeStream
    thread: int
    spoiled: str | None = None
    """The call that made it invalid."""


@attrs.define(eq=False)
class Op:
    """Something in a stream: `ready` says when it may go on, `actions` are its small things to do."""

    name: str
    position: int
    ready: Callable[[], bool]
    actions: deque[Callable[[], object]]


@attrs.frozen(eq=False)
class Access:
    """Bytes that one operation touches."""

    name: str
    stream: int
    position: int
    start: Words
    end: Words
    write: bool


@attrs.define(eq=False)
class Rule:
    """Fail the nth call from now on."""

    nth: int
    name: str | None
    error_code: int
    sticky: bool


class ThreadState(threading.local):
    """What CUDA keeps per thread."""

    def __init__(self) -> None:
        self.device = 0
        self.bound = False
        """Whether the CUDA driver's own calls find a context."""
        self.streams: list[FakeStream] = []
        self.relaxed = False
        self.capture: Capture | None = None


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position


def weak(value: object) -> Callable[[], object]:
    """Return a function that gives the value, or None when it was a tensor or array and is gone."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return weakref.ref(cast("Any", value))
    return lambda: value


def ordered(addresses: Words, sizes: Words) -> tuple[Words, Words]:
    """Return starts and ends of ranges, by start."""
    order = np.argsort(addresses)
    start = addresses[order]
    return start, start + sizes[order]


def overlap(ranges: tuple[Words, Words]) -> bool:
    start, end = ranges
    return bool((start[1:] < end[:-1]).any())


def crosses(destinations: Words, sources: Words, sizes: Words) -> bool:
    """Return whether any range reads what another one writes."""
    reads = Access("", 0, 0, *ordered(sources, sizes), write=False)
    return meet(reads, Access("", 0, 0, *ordered(destinations, sizes), write=True))


def meet(one: Access, other: Access) -> bool:
    """Return whether two sets of ranges share a byte."""
    return bool(((one.start[:, None] < other.end) & (other.start < one.end[:, None])).any())


def tensor_spans(tensors: Sequence[torch.Tensor]) -> Spans:
    """Return the bytes of contiguous tensors."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    return Spans(addresses, np.array([tensor.nbytes for tensor in tensors], np.uint64))
