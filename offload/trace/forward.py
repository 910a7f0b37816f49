"""One forward pass, as its hooks see it: which lane it is drawn on, where a step begins and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from offload.trace.tracer import Tracer


@attrs.define(eq=False)
class ForwardTrace:
    """The recording side of `layerwise.attach`. One forward at a time; concurrent forwards have one each.

    A hook before a layer calls `enter(layer)` (after it has waited: the wait is its own slice), a hook
    after it `leave(layer, requests)`. A step begins when its first layer's hook starts and ends with its
    last layer; entering a layer that is not after the last one begins a new step.
    """

    tracer: Tracer
    lane: int = attrs.field(init=False)
    _first_ns: int = attrs.field(default=0, init=False)
    _last_ns: int = attrs.field(default=0, init=False)
    _start_ns: int = attrs.field(default=0, init=False)
    _layer: int = attrs.field(default=-1, init=False)

    def __attrs_post_init__(self) -> None:
        self.lane = self.tracer.take_lane()

    def arrive(self, layer: int) -> int:
        """Say that the forward has come to a layer, before any wait. Returns the time."""
        now = self.tracer.clock()
        if layer <= self._layer:
            self._end_step()
        if not self._first_ns:
            self._first_ns = now
        self._layer = layer
        self._start_ns = now
        return now

    def waited(self, request: int, layer: int, start: int) -> None:
        """Record a wait since `start`; compute begins now."""
        now = self.tracer.clock()
        self._start_ns = now
        if self.tracer.active:
            self.tracer.wait(request, "load", layer, start, now, self.lane)

    def leave(self, layer: int, requests: tuple[int, ...] = ()) -> None:
        """Record the compute of a layer, which ends now."""
        self._last_ns = self.tracer.clock()
        if self.tracer.active:
            self.tracer.layer(layer, self._start_ns, self._last_ns, self.lane, requests)

    def close(self) -> None:
        """End the step and give the lane back."""
        self._end_step()
        self.tracer.free_lane(self.lane)

    def _end_step(self) -> None:
        if self._last_ns and self.tracer.active:
            self.tracer.step(self._first_ns, self._last_ns, self.lane)
        self._first_ns = self._last_ns = 0
        self._layer = -1
