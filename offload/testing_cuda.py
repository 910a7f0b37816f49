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

Faults are collected in `faults`, because the code under test catches exceptions; `check` raises them.
Threads interleave as they like, so a seed fixes the order of the streams and not that of the threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch

from offload.driver.cuda_calls import CudaError, Launch, RawEvent, RawStream, Spans, Words

POISON = 0xA5
"""What a destination holds while its copy is under way."""

MAX_BATCH = 4096
"""Ranges that one batched copy takes; more than ten times as many have crashed a CUDA driver."""

_PATIENCE = 30.0  # seconds until a synchronize that nobody steps becomes an error instead of a hang

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
    queue: deque[_Op] = attrs.field(factory=deque)
    destroyed: bool = False

    def __repr__(self) -> str:
        return f"<FakeStream {self.cuda_stream} {self.done}/{self.enqueued}>"


@attrs.define(eq=False)
class FakeEvent:
    """A snapshot of a stream's position; before the first record, of nothing."""

    timing: bool
    stream: FakeStream | None = None
    position: int = 0
    clock: Clock = attrs.field(factory=dict)
    time: int = 0
    """Steps taken when it passed."""

    @property
    def done(self) -> bool:
        """Whether the snapshot has been reached; true as well when there is none."""
        return self.stream is None or self.stream.done >= self.position


@attrs.define(eq=False)
class _Op:
    """Something in a stream: `ready` says when it may go on, `actions` are its small things to do."""

    name: str
    position: int
    ready: Callable[[], bool]
    actions: deque[Callable[[], object]]


@attrs.frozen(eq=False)
class _Access:
    """Bytes that one operation touches."""

    name: str
    stream: int
    position: int
    start: Words
    end: Words
    write: bool


@attrs.define(eq=False)
class _Rule:
    """Fail the nth call from now on."""

    nth: int
    name: str | None
    error_code: int
    sticky: bool


class _Thread(threading.local):
    """What CUDA keeps per thread."""

    def __init__(self) -> None:
        self.device = 0
        self.chosen = False
        self.streams: list[FakeStream] = []
        self.relaxed = False
        self.capturing = False


class FakeCuda:
    """An executing fake of every CUDA call that the library makes.

    Example:
        >>> fake = FakeCuda(seed=3)
        >>> driver = CudaDriver("cuda:0", calls=fake)
        >>> with fake.running():   # or step by hand
        ...     ...
        >>> fake.check()
    """

    def __init__(self, seed: int = 0, *, has_batch_copy: bool = True) -> None:
        self.calls: list[Call] = []
        """Every call so far."""
        self.faults: list[str] = []
        """What a GPU would have done silently: races, freed arguments, lost waits."""
        self.contexts: set[int] = set()
        """Devices on which some call has made a context."""
        self.broken: int | None = None
        """The code that every call returns, once a sticky error has happened."""
        self.registered: dict[int, int] = {}
        """Registered host memory: address to bytes."""
        self.time = 0
        """Steps taken."""
        self._random = random.Random(seed)
        self._batch = has_batch_copy
        self._changed = threading.Condition(threading.RLock())
        self._thread = _Thread()
        self._streams: list[FakeStream] = []
        self._default: dict[int, FakeStream] = {}
        self._accesses: list[_Access] = []
        self._seen: Clock = {}
        self._rules: list[_Rule] = []
        self._capturing: set[int] = set()
        self._running = False

    def __repr__(self) -> str:
        return (
            f"<FakeCuda {len(self._streams)} streams, {self.time} steps, {len(self.faults)} faults>"
        )

    # ---- what a test does ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one stream do one thing; return False when none can."""
        with self._changed:
            able = [s for s in self._streams if s.queue and s.queue[0].ready()]
            if self.broken is not None or not able:
                return False
            stream = self._random.choice(able)
            op = stream.queue[0]
            self.time += 1
            if op.actions:
                op.actions.popleft()()
            if not op.actions:
                stream.queue.popleft()
                stream.done = op.position
                self._changed.notify_all()
            return True

    def run(self) -> None:
        """Step until no stream can go on."""
        while self.step():
            pass

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Step on a thread of its own inside the block, whenever there is something to step."""
        self._running = True
        thread = threading.Thread(target=self._run_always, name="fake-gpu")
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()
            thread.join()

    def _run_always(self) -> None:
        while self._running:
            if not self.step():
                with self._changed:
                    self._changed.wait_for(lambda: not self._running or self._steppable())

    def _steppable(self) -> bool:
        return self.broken is None and any(s.queue and s.queue[0].ready() for s in self._streams)

    @property
    def idle(self) -> bool:
        """Whether every stream has done all that was enqueued."""
        return not any(stream.queue for stream in self._streams)

    def fail(
        self, error_code: int = 1, *, nth: int = 1, name: str | None = None, sticky: bool = False
    ) -> None:
        """Fail the nth call from now on, of this name or of any; sticky fails all later ones too."""
        self._rules.append(_Rule(nth, name, error_code, sticky))

    def forgive(self) -> None:
        """Let the calls that were to fail succeed."""
        self._rules.clear()

    def break_context(self, error_code: int = 700) -> None:
        """Fail every call from now on, as after an illegal access on the device."""
        with self._changed:
            self.broken = error_code
            self._changed.notify_all()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Let the calling thread's current stream capture a graph, in global mode."""
        me = threading.get_ident()
        self._thread.capturing = True
        self._capturing.add(me)
        try:
            yield
        finally:
            self._thread.capturing = False
            self._capturing.discard(me)

    def compute(
        self,
        action: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Enqueue a kernel of the user's on the current stream: `action` runs when it is stepped."""
        self._enqueue("compute", [action], _tensor_spans(reads), _tensor_spans(writes))

    def check(self) -> None:
        """Raise an AssertionError that lists every fault so far."""
        assert not self.faults, "\n".join(self.faults)

    def named(self, name: str) -> list[Call]:
        """Return the calls of this name."""
        return [call for call in self.calls if call.name == name]

    # ---- the calling thread -------------------------------------------------------------------------

    def set_device(self, device: int) -> None:
        self._thread.device, self._thread.chosen = device, True
        self._call("set_device", device)

    def current_device(self) -> int:
        return self._thread.device

    def pci_address(self, device: int) -> str:
        return f"ffff:ff:{device:02x}.0"

    def relax_capture(self) -> None:
        self._call("relax_capture")
        self._thread.relaxed = True

    @contextlib.contextmanager
    def using(self, stream: RawStream) -> Iterator[None]:
        mine = cast("FakeStream", stream)
        before, self._thread.device = self._thread.device, mine.device
        self._thread.streams.append(mine)
        try:
            yield
        finally:
            self._thread.streams.pop()
            self._thread.device = before

    def current_stream(self) -> RawStream:
        return self._current()

    def capturing(self) -> bool:
        return self._thread.capturing

    def _current(self) -> FakeStream:
        if self._thread.streams:
            return self._thread.streams[-1]
        device = self._thread.device
        with self._changed:
            if device not in self._default:
                self._default[device] = self._make(0)
            return self._default[device]

    # ---- streams and events -------------------------------------------------------------------------

    def new_stream(self) -> RawStream:
        self._call("new_stream")
        with self._changed:
            return self._make(0x1000 + len(self._streams))

    def _make(self, handle: int) -> FakeStream:
        stream = FakeStream(self._thread.device, handle, number=len(self._streams))
        self._streams.append(stream)
        return stream

    def destroy_stream(self, stream: RawStream) -> None:
        self._call("destroy_stream", stream)
        cast("FakeStream", stream).destroyed = True

    def is_stream(self, value: object) -> bool:
        return isinstance(value, FakeStream)

    def new_event(self, *, timing: bool) -> RawEvent:
        self._call("new_event", timing)
        return FakeEvent(timing)

    def is_event(self, value: object) -> bool:
        return isinstance(value, FakeEvent)

    def is_recorded(self, event: RawEvent) -> bool:
        return cast("FakeEvent", event).stream is not None

    def record(self, event: RawEvent, stream: RawStream) -> None:
        mine, on = cast("FakeEvent", event), cast("FakeStream", stream)
        self._call("record", event, stream)
        with self._changed:
            assert not on.destroyed, "record on a destroyed stream"
            op = self._append("record", on, [lambda: setattr(mine, "time", self.time)])
            mine.stream, mine.position, mine.clock = on, op.position, dict(on.clock)

    def wait(self, event: RawEvent, stream: RawStream) -> None:
        mine, on = cast("FakeEvent", event), cast("FakeStream", stream)
        self._call("wait", event, stream)
        if self._thread.capturing:
            raise CudaError("wait", 905, "the event was recorded outside of the capture")
        with self._changed:
            target, position = mine.stream, mine.position
            if target is None:
                return
            _join(on.clock, mine.clock)
            self._append("wait", on, [], lambda: target.done >= position)

    def query(self, event: RawEvent) -> bool:
        self._call("query", event, unsafe=True)
        with self._changed:
            return self._saw(cast("FakeEvent", event))

    def synchronize(self, event: RawEvent) -> None:
        mine = cast("FakeEvent", event)
        self._call("synchronize", event, unsafe=True)
        with self._changed:
            ended = lambda: mine.done or self.broken is not None
            assert self._changed.wait_for(ended, _PATIENCE), "nobody steps the streams"
            if self.broken is not None:
                raise CudaError("synchronize", self.broken)
            self._saw(mine)

    def _saw(self, event: FakeEvent) -> bool:
        """Note what the host knows now: all that comes before a passed event has happened."""
        if not event.done:
            return False
        _join(self._seen, event.clock)
        seen = self._seen
        self._accesses = [a for a in self._accesses if seen.get(a.stream, 0) < a.position]
        return True

    def elapsed_ms(self, start: RawEvent, end: RawEvent) -> float:
        first, last = cast("FakeEvent", start), cast("FakeEvent", end)
        self._call("elapsed_ms", start, end)
        if not (first.timing and last.timing and first.done and last.done):
            raise CudaError("elapsed_ms", 400, "made without timing, or not passed yet")
        return float(last.time - first.time)

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
        if self._current().cuda_stream == 0 or self._thread.capturing:
            raise CudaError("copy_batch", 400, "the legacy stream and captures take no batch")
        if len(sizes) > MAX_BATCH:
            raise CudaError("copy_batch", 1, f"{len(sizes)} ranges in one call")
        if _overlap(_ordered(destinations, sizes)) or _crosses(destinations, sources, sizes):
            self.faults.append("copy_batch: a range touches the destination of another")
        self._copies("copy_batch", destinations, sources, sizes)

    def _copies(self, name: str, destinations: Words, sources: Words, sizes: Words) -> None:
        for addresses in (destinations, sources):
            self._registration(name, addresses, sizes)
        alive = [_weak(array) for array in (destinations, sources, sizes)] if len(sizes) > 1 else []
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
        arguments = [_weak(argument) for argument in launch.args]
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

    def _enqueue(
        self, name: str, actions: Sequence[Callable[[], object]], reads: Spans, writes: Spans
    ) -> None:
        stream = self._current()
        if self._thread.capturing:
            raise CudaError(name, 900, "not while capturing")
        with self._changed:
            assert not stream.destroyed, f"{name} on a destroyed stream"
            op = self._append(name, stream, actions)
            for spans, write in ((reads, False), (writes, True)):
                self._touch(op, stream, spans, write=write)

    def _append(
        self,
        name: str,
        stream: FakeStream,
        actions: Sequence[Callable[[], object]],
        ready: Callable[[], bool] = lambda: True,
    ) -> _Op:
        """Put an operation at the end of a stream, after what the host has seen done."""
        stream.enqueued += 1
        _join(stream.clock, self._seen)
        stream.clock[stream.number] = stream.enqueued
        op = _Op(name, stream.enqueued, ready, deque(actions))
        stream.queue.append(op)
        self._changed.notify_all()
        return op

    def _touch(self, op: _Op, stream: FakeStream, spans: Spans, *, write: bool) -> None:
        """Compare an access with those of operations that no event orders before it."""
        if not len(spans.sizes):
            return
        start, end = _ordered(spans.addresses, spans.sizes)
        mine = _Access(op.name, stream.number, op.position, start, end, write)
        for other in self._accesses:
            ordered = stream.clock.get(other.stream, 0) >= other.position
            if not ordered and (write or other.write) and _meet(mine, other):
                self.faults.append(
                    f"race: {op.name} {op.position} on stream {stream.number} "
                    f"{'writes' if write else 'reads'} bytes that {other.name} {other.position} on "
                    f"stream {other.stream} {'writes' if other.write else 'reads'}, and no event "
                    "orders them"
                )
        self._accesses.append(mine)

    # ---- memory -------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        self._call("register", address, nbytes, unsafe=True)
        with self._changed:
            for start, size in self.registered.items():
                if start < address + nbytes and address < start + size:
                    raise CudaError("register", 712, "already registered")
            self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._call("unregister", address, unsafe=True)
        with self._changed:
            if self.registered.pop(address, None) is None:
                raise CudaError("unregister", 713, "not registered")

    def host_numbers(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        self._call("host_numbers", len(numbers))
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

    def _call(self, name: str, *arguments: object, unsafe: bool = False) -> None:
        """Note a call and fail it when a rule, a capture or a broken context says so."""
        state = self._thread
        stream = state.streams[-1].cuda_stream if state.streams else 0
        thread = threading.current_thread().name
        with self._changed:
            self.calls.append(Call(name, thread, state.device, stream, arguments))
            self.contexts.add(state.device)
            if self.broken is not None:
                raise CudaError(name, self.broken)
            for rule in self._rules[:]:
                if rule.name in (None, name):
                    rule.nth -= 1
                    if rule.nth == 0:
                        self._rules.remove(rule)
                        self._fail(name, rule)
            captured = self._capturing and not state.relaxed
            if unsafe and captured:
                raise CudaError(name, 900, "another thread captures a graph in global mode")

    def _fail(self, name: str, rule: _Rule) -> None:
        if rule.sticky:
            self.break_context(rule.error_code)
        raise CudaError(name, rule.error_code)


def _join(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position


def _weak(value: object) -> Callable[[], object]:
    """Return a function that gives the value, or None when it was a tensor or array and is gone."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return weakref.ref(cast("Any", value))
    return lambda: value


def _ordered(addresses: Words, sizes: Words) -> tuple[Words, Words]:
    """Return starts and ends of ranges, by start."""
    order = np.argsort(addresses)
    start = addresses[order]
    return start, start + sizes[order]


def _overlap(ranges: tuple[Words, Words]) -> bool:
    start, end = ranges
    return bool((start[1:] < end[:-1]).any())


def _crosses(destinations: Words, sources: Words, sizes: Words) -> bool:
    """Return whether any range reads what another one writes."""
    reads = _Access("", 0, 0, *_ordered(sources, sizes), write=False)
    return _meet(reads, _Access("", 0, 0, *_ordered(destinations, sizes), write=True))


def _meet(one: _Access, other: _Access) -> bool:
    """Return whether two sets of ranges share a byte."""
    return bool(((one.start[:, None] < other.end) & (other.start < one.end[:, None])).any())


def _tensor_spans(tensors: Sequence[torch.Tensor]) -> Spans:
    """Return the bytes of contiguous tensors."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    return Spans(addresses, np.array([tensor.nbytes for tensor in tensors], np.uint64))
