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
from offload.testing_cuda_host import FakeHost
from offload.testing_cuda_model import (
    Access,
    Clock,
    FakeEvent,
    FakeStream,
    Op,
    join,
    meet,
    ordered,
    tensor_spans,
)


class FakeDevice(FakeHost):
    """Streams that run when they are stepped, and the rules that calls are held to."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.time = 0
        """Steps taken."""
        self._random = random.Random(seed)
        self._accesses: list[Access] = []
        self._seen: Clock = {}
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

    def compute(
        self,
        action: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        device: int | None = None,
    ) -> None:
        """Enqueue a kernel of the user's on the current stream: `action` runs when it is stepped.

        Args:
            device: That of its tensors, as torch's own calls go by; None: the thread's current one.
        """
        self._thread.bound = True
        spans = tensor_spans(reads), tensor_spans(writes)
        self._enqueue("compute", [action], *spans, device=device)

    def check(self) -> None:
        """Raise an AssertionError that lists every fault so far."""
        assert not self.faults, "\n".join(self.faults)

    # ---- what calls do ---

    def _enqueue(
        self,
        name: str,
        actions: Sequence[Callable[[], object]],
        reads: Spans,
        writes: Spans,
        *,
        device: int | None = None,
    ) -> None:
        stream = self._current(device)
        if self._captured(stream):
            raise CudaError(name, 900, "not while capturing")
        with self._changed:
            self.contexts.add(stream.device)
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
        self._learn(event.clock)
        return True

    def _learn(self, clock: Clock) -> None:
        """Note that the host has seen the end of everything up to this clock."""
        join(self._seen, clock)
        seen = self._seen
        self._accesses = [a for a in self._accesses if seen.get(a.stream, 0) < a.position]
