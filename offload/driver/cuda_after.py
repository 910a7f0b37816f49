"""What a request must follow, as events of our own: points of compute streams, and of callers' events.

Theory of operation
-------------------
Every mark is taken in the caller's frame, and is a point in time: whatever the caller does with his stream
or his event afterwards moves it neither forward nor back.

* A *stream* has an event of ours recorded at its present end.
* An *event of the caller's* is his to record again, and engines do. A query made later would see the new
  point; a wait that a stream has been given keeps the old one. So a stream of ours, a relay, waits for it at
  once, and what is watched is an event of ours behind that wait. An event that is late keeps what is behind
  it on its relay, so each has a relay of its own, as long as there are some; requests after one and the same
  event share one. Two events of one object that are under way at once are told in the order in which they came.

Streams come and go, and a thread waits for each: those used last keep theirs (`WAITERS`), and the others'
end when nothing of them is waited for.
"""

from __future__ import annotations

import threading
import weakref

import attrs

from offload.driver.cuda_calls import RawEvent, RawStream, code
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_waiter import Waiter
from offload.errors import RequestError

WAITERS = 8
"""Compute streams whose waiting threads stay when they have nothing to do."""

RELAYS = 4
"""Callers' events that are waited for without regard to each other; with more, the one used longest ago is shared.

Few, because a GPU has few queues (8, unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise): a stream that waits holds up
those that share its queue until the event passes.
"""

_CAPTURED = 907  # cudaErrorCapturedEvent


@attrs.define(eq=False)
class _Relay:
    """A stream of ours that waits for callers' events."""

    raw: RawStream
    waiter: Waiter
    source: int = 0
    """Whose event it waited for last, by identity; it only decides who shares a relay."""
    last: CudaEvent | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing on it is still to pass, as far as the device says so."""
        try:
            return self.last is None or self.last.query()
        except Exception:  # noqa: BLE001 - another request's event: who waits for it judges the error
            return False


class Marks:
    """The marks of one driver, and the threads that wait for them. Any thread may take one."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._waiters: dict[tuple[int, int], Waiter] = {}  # the one used last is the last one
        self._relays: list[_Relay] = []  # likewise
        self._all: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Marks of {len(self._waiters)} streams and {len(self._relays)} relays>"

    def of_stream(self, stream: RawStream) -> CudaEvent:
        """Record the present end of a compute stream."""
        return self._hub.record(stream, self.waiter(stream))

    def of_event(self, theirs: RawEvent) -> tuple[CudaEvent, ...]:
        """Return what stands for the point that a caller's event marks now; nothing when it has passed.

        Raises:
            RequestError: It was recorded in a stream that captures a graph.
        """
        if self._has_passed(theirs):
            return ()
        with self._lock:
            relay = self._relay(id(theirs))
            self._hub.calls.wait(theirs, relay.raw)
            relay.last = self._hub.record(relay.raw, relay.waiter)
            return (relay.last,)

    def _has_passed(self, theirs: RawEvent) -> bool:
        try:
            return self._hub.query(theirs)
        except Exception as error:
            if code(error) != _CAPTURED:
                raise
            raise RequestError(
                "after= is an event that was recorded in a stream that captures a graph: it is part of "
                "the graph, and passes when that is replayed. Record one around the replay.",
                value=theirs,
            ) from error

    def waiter(self, stream: RawStream) -> Waiter:
        """Return who waits for the events of a compute stream."""
        key = stream.device_index, stream.cuda_stream
        with self._lock:
            found = self._waiters.pop(key, None)
            if found is None:
                found = self._new_waiter(f"compute-{key[0]}-{key[1]:x}")
            self._waiters[key] = found
            if len(self._waiters) > WAITERS:
                self._waiters.pop(next(iter(self._waiters))).stop()
            return found

    def _new_waiter(self, name: str) -> Waiter:
        made = Waiter(self._hub, name)
        self._all.add(made)
        return made

    def _relay(self, source: int) -> _Relay:
        """Return the relay for an event: its own, one with nothing to do, a new one, or the oldest."""
        relays = self._relays
        found = next((relay for relay in relays if relay.source == source), None)
        if found is None:
            found = next((relay for relay in relays if relay.idle), None)
        if found is None and len(relays) < RELAYS:
            found = _Relay(self._hub.new_stream(), self._new_waiter(f"after-{len(relays)}"))
        elif found is None:
            found = relays[0]
        if found in relays:
            relays.remove(found)
        relays.append(found)
        found.source = source
        return found

    def waiters(self) -> list[Waiter]:
        """Return every waiter that somebody refers to; a thread that runs does."""
        with self._lock:
            return list(self._all)

    def streams(self) -> list[RawStream]:
        """Return the streams of ours, to be destroyed when nobody takes marks any more."""
        return [relay.raw for relay in self._relays]
