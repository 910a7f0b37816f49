"""A CUDA that executes on the CPU, slowly, late and in every legal order.

Theory of operation
-------------------
`FakeCuda` implements `CudaCalls`. It *models* what CUDA leaves unsaid, so that code that merely calls
the right functions in the wrong order fails here:

* An event is a snapshot of a stream's position, taken at `record`. One that was never recorded queries
  as done, and a wait on it does nothing: exactly as silent as the real one.
* Nothing moves when it is enqueued. `step` lets one stream, picked by the seed among those that can go
  on, do one small thing: pass a wait, poison a destination, move one range of a batch.
* A destination holds poison from the moment its copy begins until it ends, so a reader that came too
  early finds bytes that nobody wrote.
* Every operation carries a vector clock. Two operations that touch the same bytes, one of them writing,
  with no path of events from one to the other, are a race, however the streams happened to run. What the
  host saw done (by `synchronize` or `query`) comes before everything that is enqueued afterwards.
* The arguments of a launch and the arrays of a batched copy are held weakly: freed too early is a fault.
* A copy across the edge of a registration fails, as it does on a GPU.
* An event belongs to the device of its first record, and a thread has a current device that says nothing
  about where kernels run: `testing_cuda_host.py`.

Faults are collected in `faults`, because the code under test catches exceptions; `check` raises them.
Threads interleave as they like, so a seed fixes the order of the streams and not that of the threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from offload.driver.cuda_calls import Launch, RawEvent, RawStream, Spans, Words
from offload.errors import CudaError
from offload.testing_cuda_device import FakeDevice
from offload.testing_cuda_model import (
    FakeEvent,
    FakeStream,
    Generic,
    crosses,
    join,
    ordered,
    overlap,
    weak,
)

POISON = 0xA5
"""What a destination holds while its copy is under way."""

MAX_BATCH = 4096
"""Ranges that one batched copy takes; more than ten times as many have crashed a CUDA driver."""

_BOOT_NS = 1_000_000_000_000  # the host is up for a while when the device's first step comes
_LOOK = 0.001  # seconds at most; the next operation that ends cuts it short
_PATIENCE = 30.0  # seconds until a synchronize that nobody steps becomes an error instead of a hang


class FakeCuda(FakeDevice):
    """An executing fake of every CUDA call that the library makes.

    Example:
        >>> fake = FakeCuda(seed=3)
        >>> driver = CudaDriver("cuda:0", calls=fake)
        >>> with fake.running():   # or step by hand
        ...     ...
        >>> fake.check()
    """

    def __init__(self, seed: int = 0, *, has_batch_copy: bool = True, step_ns: int = 1_000) -> None:
        super().__init__(seed)
        self.step_ns = step_ns
        """How long a step takes, by the times of events and by `now_ns`."""
        self.registered: dict[int, int] = {}
        """Registered host memory: address to bytes."""
        self._batch = has_batch_copy

    def __repr__(self) -> str:
        return (
            f"<FakeCuda {len(self._streams)} streams, {self.time} steps, {len(self.faults)} faults>"
        )

    def now_ns(self) -> int:
        """Return the time on a host whose clock is the device's: for `CudaDriver(clock=...)`."""
        return _BOOT_NS + self.time * self.step_ns

    # ---- streams and events -------------------------------------------------------------------------

    def new_stream(self) -> RawStream:
        self._call("new_stream", unsafe=True, on=self._thread.device)
        with self._changed:
            return self._make(0x1000 + len(self._streams), self._thread.device)

    def destroy_stream(self, stream: RawStream) -> None:
        self._call("destroy_stream", stream, unsafe=True)
        cast("FakeStream", stream).destroyed = True

    def drain(self, stream: RawStream) -> None:
        mine = cast("FakeStream", stream)
        self._call("drain", stream, unsafe=True)
        with self._changed:
            target, clock = mine.enqueued, dict(mine.clock)
            self._until("drain", lambda: mine.done >= target)
            self._learn(clock)

    def as_stream(self, value: object) -> RawStream | None:
        value = value.same if isinstance(value, Generic) else value
        return value if isinstance(value, FakeStream) else None

    def new_event(self, *, timing: bool) -> RawEvent:
        self._call("new_event", timing)
        return FakeEvent(timing)

    def as_event(self, value: object) -> RawEvent | None:
        value = value.same if isinstance(value, Generic) else value
        return value if isinstance(value, FakeEvent) else None

    def is_recorded(self, event: RawEvent) -> bool:
        return cast("FakeEvent", event).stream is not None

    def record(self, event: RawEvent, stream: RawStream) -> None:
        mine, on = cast("FakeEvent", event), cast("FakeStream", stream)
        self._call("record", event, stream, on=on.device)
        if mine.device not in (None, on.device):
            raise RuntimeError(
                f"Event device {mine.device} does not match recording stream's device {on.device}."
            )
        with self._changed:
            assert not on.destroyed, "record on a destroyed stream"
            mine.device, mine.captured = on.device, self._captured(on)
            op = self._append("record", on, [lambda: setattr(mine, "time", self.time)])
            mine.stream, mine.position, mine.clock = on, op.position, dict(on.clock)

    def wait(self, event: RawEvent, stream: RawStream) -> None:
        mine, on = cast("FakeEvent", event), cast("FakeStream", stream)
        self._call("wait", event, stream, on=on.device)
        if self._captured(on):
            raise CudaError("wait", 905, "the event was recorded outside of the capture")
        if mine.captured:
            self.faults.append("wait: the event is of a capture, which the stream would now join")
        with self._changed:
            assert not on.destroyed, "wait on a destroyed stream"
            target, position = mine.stream, mine.position
            if target is None:
                return
            join(on.clock, mine.clock)
            self._append("wait", on, [], lambda: target.done >= position)

    def query(self, event: RawEvent) -> bool:
        mine = cast("FakeEvent", event)
        self._call("query", event, unsafe=True)
        self._askable("query", mine)
        with self._changed:
            if self._running and not mine.done:
                self._changed.wait(_LOOK)  # asking takes a moment, in which the streams go on
            return self._saw(mine)

    def synchronize(self, event: RawEvent) -> None:
        mine = cast("FakeEvent", event)
        self._call("synchronize", event, unsafe=True)
        self._askable("synchronize", mine)
        with self._changed:
            # A snapshot, as on a GPU: to record the event again while somebody waits changes nothing for him.
            stream, position, clock = mine.stream, mine.position, dict(mine.clock)
            self._until("synchronize", lambda: stream is None or stream.done >= position)
            self._learn(clock)

    def _askable(self, name: str, event: FakeEvent) -> None:
        if event.captured:
            raise CudaError(name, 907, "the event was last recorded in a capturing stream")

    def _until(self, name: str, done: Callable[[], bool]) -> None:
        """Block until done, or until the context is lost. Under the lock."""
        ended = lambda: done() or self.broken is not None
        assert self._changed.wait_for(ended, _PATIENCE), "nobody steps the streams"
        if self.broken is not None:
            raise CudaError(name, self.broken)

    def elapsed_ms(self, start: RawEvent, end: RawEvent) -> float:
        first, last = cast("FakeEvent", start), cast("FakeEvent", end)
        self._call("elapsed_ms", start, end)
        if not (first.timing and last.timing and first.done and last.done):
            raise CudaError("elapsed_ms", 400, "made without timing, or not passed yet")
        if last.time < first.time:
            self.faults.append("elapsed_ms: the second event passed before the first")
        return float(np.float32((last.time - first.time) * self.step_ns / 1e6))

    # ---- copies -------------------------------------------------------------------------------------

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.dtype == source.dtype == torch.uint8
        assert destination.is_contiguous()
        assert source.is_contiguous()
        assert destination.numel() == source.numel()
        self._call("copy", destination.data_ptr(), source.data_ptr(), source.numel())
        self._copies(
            "copy",
            np.array([destination.data_ptr()], np.uint64),
            np.array([source.data_ptr()], np.uint64),
            np.array([source.numel()], np.uint64),
        )

    @property
    def has_batch_copy(self) -> bool:
        return self._batch

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words) -> None:
        self._call("copy_batch", len(sizes), sizes.tolist())
        if self._current().cuda_stream == 0 or self._captured(self._current()):
            raise CudaError("copy_batch", 400, "the legacy stream and captures take no batch")
        if len(sizes) > MAX_BATCH:
            raise CudaError("copy_batch", 1, f"{len(sizes)} ranges in one call")
        if overlap(ordered(destinations, sizes)) or crosses(destinations, sources, sizes):
            self.faults.append("copy_batch: a range touches the destination of another")
        self._copies("copy_batch", destinations, sources, sizes)

    def _copies(self, name: str, destinations: Words, sources: Words, sizes: Words) -> None:
        for addresses in (destinations, sources):
            self._registration(name, addresses, sizes)
        alive = [weak(array) for array in (destinations, sources, sizes)] if len(sizes) > 1 else []
        ranges = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._random.shuffle(ranges)

        def poison() -> None:
            if any(reference() is None for reference in alive):
                self.faults.append(f"{name}: its arrays were freed before it ran")
            for to, _, size in ranges:
                ctypes.memset(to, POISON, size)

        def move(to: int, start: int, size: int) -> Callable[[], None]:
            return lambda: cast("None", ctypes.memmove(to, start, size))

        moves = [move(*each) for each in ranges]
        self._enqueue(name, [poison, *moves], Spans(sources, sizes), Spans(destinations, sizes))

    def launch(self, launch: Launch) -> None:
        self._call("launch", launch.kernel, launch.grid)
        reads, writes = launch.spans()
        arguments = [weak(argument) for argument in launch.args]
        kernel, grid, meta = launch.kernel, launch.grid, dict(launch.meta)

        def alive() -> list[object] | None:
            args = [reference() for reference in arguments]
            return None if any(argument is None for argument in args) else args

        def poison() -> None:
            if alive() is None:
                return
            for to, size in zip(writes.addresses.tolist(), writes.sizes.tolist(), strict=True):
                ctypes.memset(to, POISON, size)

        def execute() -> None:
            args = alive()
            if args is None:
                self.faults.append("launch: an argument was freed before the kernel ran")
            else:
                kernel[grid](*args, **meta)

        self._enqueue("launch", [poison, execute], reads, writes)

    # ---- memory -------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        self._call("register", address, nbytes, unsafe=True, bound=True)
        with self._changed:
            for start, size in self.registered.items():
                if start < address + nbytes and address < start + size:
                    raise CudaError("register", 712, "already registered")
            self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._call("unregister", address, unsafe=True, bound=True)
        with self._changed:
            if self.registered.pop(address, None) is None:
                raise CudaError("unregister", 713, "not registered")

    def device_memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._call("device_memory", nbytes)
        before = FakeEvent(timing=False)
        self.record(before, self._lasting(self._thread.device))
        self.wait(before, self._current())
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def host_numbers(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        self._call("host_numbers", len(numbers), unsafe=True, on=self._thread.device)
        return torch.from_numpy(numbers.copy())

    def device_address(self, address: int) -> int:
        self._call("device_address", address)
        return address

    def _registration(self, name: str, addresses: Words, sizes: Words) -> None:
        """Refuse a range that touches registered memory and does not lie in one registration."""
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            for start, length in self.registered.items():
                inside = start <= address and address + size <= start + length
                if not inside and start < address + size and address < start + length:
                    raise CudaError(name, 1, "the range crosses the edge of a registration")
