"""One forward pass, as its hooks see it: which lane it is drawn on, where a step begins and ends.

Theory of operation
-------------------
The hooks take *marks*: where a layer is reached, where each of its waits is over, where it ends. Between two of
them lies a wait or the compute of a layer, and a stopwatch (`core/stopwatch.py`) tells their times: at once where
compute is the thread; on a GPU when the device has passed them, so what is drawn is what its stream did and not
when the host launched it. A step is written when all of it is known, and its lane is free from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import attrs

from offload.core.stopwatch import Interval, Mark, Stopwatch

if TYPE_CHECKING:
    from offload.trace.tracer import Tracer


@attrs.frozen(eq=False)
class HostWatch:
    """The stopwatch where compute is the calling thread: a mark is a time."""

    now_ns: Callable[[], int]

    def mark(self) -> int:
        """Return the time."""
        return self.now_ns()

    def between(self, first: Mark, last: Mark, told: Callable[[Interval], None]) -> None:
        """Call `told` at once."""
        told((cast("int", first), cast("int", last)))


@attrs.define(eq=False)
class _Step:
    """One pass over the layers: it is written when it has ended and all its times are known."""

    write: Callable[[int, int], None]
    """Called with the time of its first mark and that of the end of its last layer."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _awaited: int = attrs.field(default=1, init=False)
    _first_ns: int = attrs.field(default=0, init=False)
    _last_ns: int = attrs.field(default=0, init=False)

    def expect(self) -> None:
        """Wait for one more time."""
        with self._lock:
            self._awaited += 1

    def hear(self, times: Interval, *, ends: bool) -> None:
        """Learn the times of a part of it; `ends`: of a layer, so that it may be the last."""
        with self._lock:
            if times is not None:
                self._first_ns = min(self._first_ns or times[0], times[0])
                self._last_ns = max(self._last_ns, times[1] if ends else 0)
            self._awaited -= 1
            over = not self._awaited
        if over:
            self.write(self._first_ns, self._last_ns)


@attrs.define(eq=False)
class ForwardTrace:
    """The recording side of `layerwise.attach`. One forward at a time; concurrent forwards have one each.

    A hook before a layer calls `arrive(layer)`, then `waited(request, layer)` after each wait of it; a hook
    after the layer `leave(layer, requests)`. A step begins when its first layer's hook starts and ends with
    its last layer; entering a layer that is not after the last one begins a new step.
    """

    tracer: Tracer
    lane: int = attrs.field(init=False)
    _watch: Stopwatch = attrs.field(init=False)
    _step: _Step | None = attrs.field(default=None, init=False)
    _at: Mark | None = attrs.field(default=None, init=False)
    _layer: int = attrs.field(default=-1, init=False)
    _lane: _Step = attrs.field(init=False)
    """All its steps: when they are written, the lane is free."""

    def __attrs_post_init__(self) -> None:
        self.lane = self.tracer.take_lane()
        self._watch = self.tracer.stopwatch or HostWatch(self.tracer.clock)
        self._lane = _Step(lambda *_: self.tracer.free_lane(self.lane))

    def arrive(self, layer: int) -> None:
        """Say that the forward has come to a layer, before any wait."""
        if layer <= self._layer:
            self._end_step()
        self._layer = layer
        if self._step is None:
            self._lane.expect()
            self._step = _Step(self._write_step)
        self._at = self._watch.mark() if self.tracer.active else None

    def waited(self, request: int, layer: int) -> None:
        """Record a wait that is over here; compute begins, or another wait."""

        def record(start: int, end: int) -> None:
            self.tracer.wait(request, "load", layer, start, end, self.lane)

        self._reach(record, self.tracer.unmeasured, ends=False)

    def leave(self, layer: int, requests: tuple[int, ...] = ()) -> None:
        """Record the compute of a layer, which ends here."""

        def record(start: int, end: int) -> None:
            self.tracer.layer(layer, start, end, self.lane, requests)

        self._reach(record, lambda: None, ends=True)

    def close(self) -> None:
        """End the step, and give the lane back when all of it is known."""
        self._end_step()
        self._lane.hear(None, ends=False)

    def _reach(
        self, record: Callable[[int, int], None], unknown: Callable[[], None], *, ends: bool
    ) -> None:
        """Mark this point, and record what lies between it and the one before."""
        if not self.tracer.active:
            return
        step, first, last = self._step, self._at, self._watch.mark()
        self._at = last
        if step is None or first is None or last is None:
            if not isinstance(
                self._watch, HostWatch
            ):  # whose recording began in the middle of this
                unknown()
            return

        def told(times: Interval) -> None:
            if times is None:
                unknown()
            else:
                record(*times)
            step.hear(times, ends=ends)

        step.expect()
        self._watch.between(first, last, told)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        self._layer = -1
        if step is not None:
            step.hear(None, ends=False)

    def _write_step(self, first: int, last: int) -> None:
        if last:
            self.tracer.step(first, last, self.lane)
        self._lane.hear(None, ends=False)
