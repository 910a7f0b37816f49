"""The machine room of `FakeCuda`: it runs what was enqueued, step by step, and finds races and faults."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from offload.driver.cuda_calls import RawStream, Spans
from offload.errors import CudaError
from offload.testing_cuda_model import (
    Access,
    Call,
    Clock,
    FakeEvent,
    FakeStream,
    Op,
    Rule,
    ThreadState,
    join,
    meet,
    ordered,
    tensor_spans,
)


class FakeDevice:
    """Streams that run when they are stepped, and the rules that calls are held to."""

    def __init__(self, seed: int = 0) -> None:
        self.calls: list[Call] = []
        """Every call so far."""
        self.faults: list[str] = []
        """What a GPU would have done silently: races, freed arguments, lost waits."""
        self.contexts: set[int] = set()
        """Devices on which some call has made a context."""
        self.broken: int | None = None
        """The code that every call returns, once a sticky error has happened."""
        self.time = 0
        """Steps taken."""
        self._random = random.Random(seed)
        self._changed = threading.Condition(threading.RLock())
        self._thread = ThreadState()
        self._streams: list[FakeStream] = []
        self._default: dict[int, FakeStream] = {}
        self._accesses: list[Access] = []
        self._seen: Clock = {}
        self._rules: list[Rule] = []
        self._capturing: set[int] = set()
        self._running = False

    # ---- what a test does ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one stream do one thing; return False when none can."""
        with self._changed:
            able = [stream for stream in self._streams if stream.able]
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
        return self.broken is None and any(stream.able for stream in self._streams)

    @property
    def idle(self) -> bool:
        """Whether every stream has done all that was enqueued."""
        return not any(stream.queue for stream in self._streams)

    def drained(self, timeout: float) -> None:
        """Wait, while it runs, until everything that was enqueued is done."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.idle, timeout), "something never ends"

    def fail(
        self, error_code: int = 1, *, nth: int = 1, name: str | None = None, sticky: bool = False
    ) -> None:
        """Fail the nth call from now on, of this name or of any; sticky fails all later ones too."""
        self._rules.append(Rule(nth, name, error_code, sticky))

    def forgive(self) -> None:
        """Let the calls that were to fail succeed."""
        self._rules.clear()

    def break_context(self, error_code: int = 700) -> None:
        """Fail every call from now on, as after an illegal access on the device."""
        with self._changed:
            self.broken = error_code
            self._changed.notify_all()

    @contextlib.contextmanager
    def holding(self, *streams: RawStream) -> Iterator[None]:
        """Step these streams in no case inside the block: what is on them lands after it."""
        held = [cast("FakeStream", stream) for stream in streams]
        for stream in held:
            stream.held = True
        try:
            yield
        finally:
            with self._changed:
                for stream in held:
                    stream.held = False
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
        self._enqueue("compute", [action], tensor_spans(reads), tensor_spans(writes))

    def check(self) -> None:
        """Raise an AssertionError that lists every fault so far."""
        assert not self.faults, "\n".join(self.faults)

    def named(self, name: str) -> list[Call]:
        """Return the calls of this name."""
        return [call for call in self.calls if call.name == name]

    # ---- what calls do ---

    def _current(self) -> FakeStream:
        if self._thread.streams:
            return self._thread.streams[-1]
        device = self._thread.device
        with self._changed:
            if device not in self._default:
                self._default[device] = self._make(0)
            return self._default[device]

    def _make(self, handle: int) -> FakeStream:
        stream = FakeStream(self._thread.device, handle, number=len(self._streams))
        self._streams.append(stream)
        return stream

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
    ) -> Op:
        """Put an operation at the end of a stream, after what the host has seen done."""
        stream.enqueued += 1
        join(stream.clock, self._seen)
        stream.clock[stream.number] = stream.enqueued
        op = Op(name, stream.enqueued, ready, deque(actions))
        stream.queue.append(op)
        self._changed.notify_all()
        return op

    def _touch(self, op: Op, stream: FakeStream, spans: Spans, *, write: bool) -> None:
        """Compare an access with those of operations that no event orders before it."""
        if not len(spans.sizes):
            return
        start, end = ordered(spans.addresses, spans.sizes)
        mine = Access(op.name, stream.number, op.position, start, end, write)
        for other in self._accesses:
            after = stream.clock.get(other.stream, 0) >= other.position
            if not after and (write or other.write) and meet(mine, other):
                self.faults.append(
                    f"race: {op.name} {op.position} on stream {stream.number} "
                    f"{'writes' if write else 'reads'} bytes that {other.name} {other.position} on "
                    f"stream {other.stream} {'writes' if other.write else 'reads'}, and no event "
                    "orders them"
                )
        self._accesses.append(mine)

    def _saw(self, event: FakeEvent) -> bool:
        """Note what the host knows now: all that comes before a passed event has happened."""
        if not event.done:
            return False
        join(self._seen, event.clock)
        seen = self._seen
        self._accesses = [a for a in self._accesses if seen.get(a.stream, 0) < a.position]
        return True

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

    def _fail(self, name: str, rule: Rule) -> None:
        if rule.sticky:
            self.break_context(rule.error_code)
        raise CudaError(name, rule.error_code)
