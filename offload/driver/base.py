"""What time is: the three protocols behind every driver.

Theory of operation
-------------------
A *driver* owns streams. A *stream* carries *flights*, one batch each, layer by layer, on a thread of
its own (the simulator: on its virtual clock). The loop's thread never plans and never copies: it hands
a flight to `Stream.carry` and hears of it again through the flight's own callbacks.

Between two layers a stream looks at all flights it carries and takes the next layer of the most urgent
one, so a small urgent load overtakes a big batch at a layer boundary. Whatever it has enqueued stays in
order: a stream is a queue, and only what has not been enqueued can be overtaken.

The life of a flight on a stream:

1. `carry(flight)`           any thread; returns at once.
2. `flight.prepare()`        stream's thread, once: plans the batch. May raise: then `failed` and `ended`.
3. `flight.next_layer()`     stream's thread: the work of the next layer, or None when the flight may not go
                             on yet (`kick` says that it may again) or has nothing left.
                             A work that covers several layers goes under the number of its last.
4. `flight.issued(l, event)` stream's thread: layer `l` is enqueued and `event` marks its end.
5. `flight.landed(l, ...)`   the thread that sees it, in stream order: the bytes of layer `l` are there.
   `flight.failed(l, error)` the same, when the copy raised. Nothing of this flight is enqueued after it.
6. `flight.ended()`          exactly once, last: nothing of this flight will touch memory again. A flight
                             ends when it is `exhausted` and all it enqueued has passed; after a failure
                             or `flight.stopped`, when what had been enqueued has passed.

`failed` names layer 0 when `prepare` or `next_layer` raised. A driver that is closed, or an interpreter that exits,
with flights in the air ends them after the layer under way, as if they were stopped.

A stream never waits on a lock that a flight's callbacks could need, and a callback never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from offload.core.stopwatch import Stopwatch


class Event(Protocol):
    """A point in a stream's order. Made only by recording: there is no event that was never recorded."""

    def query(self) -> bool:
        """Return whether everything before it on its stream has landed. Never blocks."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until landed; return whether it has. `timeout` in seconds. Never needs a loop."""

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when landed, on the thread that sees it; at once when it already has."""


class Work(Protocol):
    """The copies of one layer of one batch, over all its pools."""

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""

    def __call__(self) -> None:
        """Move the bytes (threads, simulator), or enqueue the moves on the current stream (cuda)."""

    def poison(self) -> None:
        """Overwrite the destination bytes, so that a reader that came too early fails by value."""

    def accesses(self) -> Sequence[Access]:
        """Return what it reads and writes, for a race detector."""


class Access(Protocol):
    """One side of a work: which pages of which pool and layer it touches."""

    @property
    def pool(self) -> object:
        """The pool; identity counts."""

    @property
    def layer(self) -> int:
        """The pool's own layer index."""

    @property
    def pages(self) -> Sequence[int]:
        """Page ids."""

    @property
    def write(self) -> bool:
        """Whether it writes them; else it reads them."""


class Flight(Protocol):
    """One batch in the air, as a stream sees it. Every method may be called from the stream's threads."""

    urgency: tuple[float, ...]
    """Smaller goes first. Compared at every layer boundary."""

    stopped: bool
    """Set when nobody wants the rest: layers that are not enqueued yet never are."""

    @property
    def traced(self) -> bool:
        """Whether somebody records now, so that stamps are worth their price; asked for each layer.

        `landed` gets stamps anyway, of whatever costs nothing: they feed plain counts.
        """

    def prepare(self) -> None: ...

    @property
    def exhausted(self) -> bool: ...

    def next_layer(self) -> tuple[int, Work] | None: ...

    def issued(self, layer: int, event: Event, began_ns: int = 0) -> None:
        """`began_ns`: when enqueueing it began; 0 where it begins to move as soon as it is issued."""

    def landed(self, layer: int, start_ns: int, end_ns: int) -> None: ...

    def failed(self, layer: int, error: BaseException) -> None: ...

    def ended(self) -> None: ...


class Stream(Protocol):
    """An ordered queue of copies with its own issuing thread."""

    name: str

    def carry(self, flight: Flight) -> None:
        """Take a flight. Any thread; returns at once."""

    def kick(self) -> None:
        """Look again: a flight that had no next layer may have one now, or was stopped. Any thread."""

    def wait(self, event: Event) -> None:
        """Order what is enqueued on this stream from now on after `event`; the host goes on."""

    def record(self) -> Event:
        """Mark this point of the stream."""


@runtime_checkable
class TimesCompute(Protocol):
    """A driver that fences, and can measure what a compute stream does: what it waits for, and its layers."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Takes times on the calling thread's compute stream; only a recording asks."""


class Driver(Protocol):
    """Streams and their clock. `open` before use, `close` joins every thread it started."""

    name: str
    """`cuda`, `threads` or `sim`."""

    fences: bool
    """Whether `fence` orders a compute stream. False: compute is the calling thread, and a fence waits."""

    @property
    def lost(self) -> BaseException | None:
        """What ended the device, so that nothing on it will ever be seen to end; else None."""

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, `load` or `backup`, made on first use."""

    def compute_stream(self) -> Stream:
        """Return the stream on which the calling thread's compute runs."""

    def marks(self) -> tuple[Event, ...]:
        """Record what the calling thread's compute has queued so far; empty where that has happened already."""

    def events(self, after: object) -> tuple[Event, ...]:
        """Return events for what a caller passed as `after=`: an event, a stream, or a sequence of them.

        Raises:
            RequestError: It is none of these.
        """

    def capturing(self) -> bool:
        """Return whether the calling thread's compute stream is capturing a graph."""

    def now(self) -> float:
        """Return the time in seconds, on the clock of deadlines."""

    def now_ns(self) -> int:
        """Return the time in nanoseconds, on the clock of a flight's stamps and so of traces."""

    @property
    def alarm(self) -> Callable[[float, Callable[[], None]], Callable[[], None]] | None:
        """How to be called back after so many seconds of a virtual clock; returns what cancels that.

        None: seconds are the loop's own, and so are its alarms. Called back on the loop's thread.
        """

    async def quiesce(self) -> None:
        """Let whatever is in the air land, where time only passes when somebody makes it. Else nothing."""

    def close(self) -> None:
        """End all threads. Called when no flight is in the air; any number of times."""

    @property
    def closed(self) -> bool:
        """Whether that has been done, and it carries nothing any more."""
