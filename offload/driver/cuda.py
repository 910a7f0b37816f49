"""CUDA as a driver: one stream with two threads per direction, and events between them and compute.

Theory of operation
-------------------
Every edge is an event. What the caller's compute has queued is marked in the caller's own frame, on that
thread's current stream and on the `compute_streams` given at the start, because a current stream belongs
to a thread: marked later, or elsewhere, it would be another stream and the wait would do nothing. It is the
current stream of the *pools'* device: kernels run on the device of their tensors, whatever the thread's
current device is. Compute is ordered after a layer by `compute_stream().wait(event)`, and the host goes on.

A caller's thread, and the loop's, keep their current device; streams are made and destroyed on threads of
ours. To go to a device and "back" would make a context on device 0 for every rank that is elsewhere.

Streams are made on first use, and all calls go through one `CudaCalls`, so all of this runs on
`offload.testing.FakeCuda` as it does on a GPU.

`lost` is the error that ended the context, or None. After it nothing can be drained: flights fail and end
at once, and their device pages must not be given to anybody.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch

from offload.driver import foreign
from offload.driver.base import Event, Flight, Stream
from offload.driver.cuda_after import Marks
from offload.driver.cuda_calls import CudaCalls, RawStream
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_stopwatch import CudaStopwatch
from offload.driver.cuda_stream import CudaStream
from offload.driver.cuda_torch import TorchCuda
from offload.driver.cuda_waiter import Waiter
from offload.errors import RequestError

EXIT_SECONDS = 1.0
"""How long interpreter exit waits for the threads of a driver."""


class CudaDriver:
    """Dedicated CUDA streams for load and backup.

    Args:
        device: The device of the pools.
        compute_streams: Streams that every submit is ordered after, besides the submitting thread's
            current one. Name them when the forward runs on a stream of another thread.
        calls: How CUDA is reached.
        clock: The host's nanoseconds; a test may bring its own.
    """

    name = "cuda"
    fences = True

    def __init__(
        self,
        device: torch.device | str | int = "cuda",
        *,
        compute_streams: Sequence[object] = (),
        calls: CudaCalls | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        made = TorchCuda() if calls is None else calls
        given = device if isinstance(device, int) else torch.device(device).index
        index = cast("int | None", given)  # torch declares an int, and gives None for plain 'cuda'
        self._hub = Hub(made, made.current_device() if index is None else index, clock)
        self._compute = tuple(self._raw(stream) for stream in compute_streams)
        self._lock = threading.Lock()
        self._streams: dict[str, CudaStream] = {}
        self._marks = Marks(self._hub)
        self.stopwatch = CudaStopwatch(self._hub, self._marks.waiter)
        """Measures the calling thread's compute stream; only a recording asks."""
        self._closed = False
        self._end = weakref.finalize(self, _end, self._hub, self._streams, self._marks)

    def __repr__(self) -> str:
        state = ", lost" if self.lost is not None else ""
        return f"<CudaDriver {self._hub.device}: {', '.join(self._streams) or 'no streams'}{state}>"

    @property
    def device(self) -> torch.device:
        """That of the pools."""
        return torch.device("cuda", self._hub.device)

    @property
    def lost(self) -> BaseException | None:
        """The error that ended the CUDA context; None while there is none."""
        return self._hub.lost

    def stream(self, name: str) -> Stream:
        """Return the stream of that name; its threads start on first use."""
        found = self._streams.get(name)
        if found is not None:
            return found
        with self._lock:
            if self._closed:
                raise RequestError(f"cannot make stream {name!r}: the driver is closed")
            if name not in self._streams:
                self._streams[name] = CudaStream(name, self._hub, self._new_raw(name))
            return self._streams[name]

    def _new_raw(self, name: str) -> RawStream:
        raw = self._hub.new_stream()
        used = {_key(stream) for stream in self._compute}
        used |= {_key(stream.raw) for stream in self._streams.values()}
        if _key(raw) in used:
            raise RuntimeError(f"stream {name!r} shares its handle with another stream in use")
        return raw

    def compute_stream(self) -> Stream:
        """Return the calling thread's current stream of the pools' device."""
        return ComputeStream(self, self._hub.calls.current_stream(self._hub.device))

    def marks(self) -> tuple[Event, ...]:
        """Record what the calling thread's stream and the compute streams have queued so far."""
        self._alive()
        current = self._hub.calls.current_stream(self._hub.device)
        streams = {_key(stream): stream for stream in (current, *self._compute)}
        return tuple(self.mark(stream) for stream in streams.values())

    def mark(self, stream: RawStream) -> CudaEvent:
        """Record the present end of a compute stream."""
        return self._marks.of_stream(stream)

    def events(self, after: object) -> tuple[Event, ...]:
        """Return events for what a caller passed as `after=`: each is a point in time, taken now.

        Raises:
            RequestError: It is no event, no stream and no sequence of them, an event that nobody has
                recorded, as CUDA would not wait for it and would not say so, or one inside a graph.
        """
        self._alive()
        return foreign.events(after, self._known)

    def _known(self, after: object) -> tuple[Event, ...] | None:
        """Return events for an event or a stream of CUDA's; None for anything else."""
        calls = self._hub.calls
        stream = calls.as_stream(after)
        if stream is not None:
            return (self.mark(stream),)
        event = calls.as_event(after)
        if event is None:
            return None
        if not calls.is_recorded(event):
            raise RequestError(
                "after= is an event that was never recorded, so nothing would wait for it. "
                "Record it first, or pass () to wait for nothing.",
                value=after,
            )
        return self._marks.of_event(event)

    def _raw(self, stream: object) -> RawStream:
        if isinstance(stream, CudaStream | ComputeStream):
            return stream.raw
        raw = self._hub.calls.as_stream(stream)
        if raw is None:
            raise RequestError(f"{stream!r} is not a CUDA stream", value=stream)
        return raw

    def _alive(self) -> None:
        if self.lost is not None:
            raise RequestError(
                "cannot submit: the CUDA context is lost, and only a new process gets another"
            ) from self.lost

    def capturing(self) -> bool:
        """Return whether the calling thread's current stream of the pools' device is capturing a graph."""
        return self._hub.calls.capturing(self._hub.device)

    def now(self) -> float:
        """Return the time in seconds, on the clock of deadlines."""
        return self._hub.now_ns() / 1e9

    def now_ns(self) -> int:
        """Return the time in nanoseconds, on the same clock."""
        return self._hub.now_ns()

    @property
    def alarm(self) -> None:
        """None: seconds are the loop's own."""
        return None

    async def quiesce(self) -> None:
        """Do nothing: time passes by itself."""

    def close(self) -> None:
        """End and join all threads and destroy the streams. Any number of times; nothing in a fork."""
        if self._closed or os.getpid() != self._hub.pid:
            return
        self._closed = True
        self._end.detach()
        _join(self._streams, self._marks, None)
        self._hub.close(*(stream.raw for stream in self._streams.values()), *self._marks.streams())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed


def _key(stream: RawStream) -> tuple[int, int]:
    """Return what tells streams apart: each device has a default stream, and all have the same handle."""
    return stream.device_index, stream.cuda_stream


class ComputeStream:
    """A stream on which the caller's own kernels run."""

    name = "compute"

    def __init__(self, driver: CudaDriver, raw: RawStream) -> None:
        self.raw = raw
        self._driver = driver

    def carry(self, flight: Flight) -> None:
        """Refuse: compute carries nothing."""
        raise RequestError(
            "the compute stream carries no flights; use stream('load') or ('backup')"
        )

    def kick(self) -> None:
        """Do nothing: nothing waits here."""

    def wait(self, event: Event) -> None:
        """Order what compute queues from now on after `event`; the host goes on."""
        if isinstance(event, CudaEvent):
            event.order(self.raw)
        else:
            event.wait()

    def record(self) -> Event:
        """Mark this point."""
        return self._driver.mark(self.raw)


def _join(streams: dict[str, CudaStream], marks: Marks, timeout: float | None) -> None:
    ending: list[CudaStream | Waiter] = [*streams.values(), *marks.waiters()]
    for one in ending:
        one.stop()
    end = None if timeout is None else time.monotonic() + timeout
    for one in ending:
        one.join(None if end is None else max(end - time.monotonic(), 0.0))


def _end(hub: Hub, streams: dict[str, CudaStream], marks: Marks) -> None:
    """End the threads of a driver that was forgotten, or of an interpreter that exits."""
    if os.getpid() == hub.pid:
        _join(streams, marks, EXIT_SECONDS)
