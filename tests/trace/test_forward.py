"""A forward whose times are known late, as on a GPU: what is drawn is what the device did."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from offload import Tracer
from offload.core.stopwatch import Interval, Mark
from offload.trace.forward import ForwardTrace


@attrs.define(eq=False)
class Device:
    """A stopwatch over a device that passes marks when it is told to."""

    refuses: bool = False
    """Whether no mark can be taken, as in a capture."""
    blind: bool = False
    """Whether no time can be told."""
    marks: int = 0
    _asked: list[tuple[Mark, Mark, Callable[[Interval], None]]] = attrs.field(factory=list)

    def mark(self) -> Mark | None:
        """Return the next mark."""
        if self.refuses:
            return None
        self.marks += 1
        return self.marks - 1

    def between(self, first: Mark, last: Mark, told: Callable[[Interval], None]) -> None:
        """Remember who asks."""
        self._asked.append((first, last, told))

    def passes(self, *times: int) -> None:
        """Pass all marks, at these times."""
        for first, last, told in self._asked:
            assert isinstance(first, int)
            assert isinstance(last, int)
            told(None if self.blind else (times[first], times[last]))
        self._asked.clear()


def forward_on(device: Device) -> tuple[Tracer, ForwardTrace]:
    """Return a tracer that has a device's stopwatch, and a forward of it."""
    tracer = Tracer()
    tracer.stopwatch = device
    return tracer, ForwardTrace(tracer)


def two_layers(forward: ForwardTrace) -> None:
    """Reach layer 0, wait, compute; reach layer 1, wait for two loads, compute: seven marks."""
    forward.arrive(0)
    forward.waited(5, 0)
    forward.leave(0, (5,))
    forward.arrive(1)
    forward.waited(5, 1)
    forward.waited(6, 1)
    forward.leave(1, (5, 6))
    forward.close()


def test_waits_and_layers_are_the_devices() -> None:
    """Seven points of a stream are three waits, two layers and one step; nothing is drawn before they pass."""
    device = Device()
    tracer, forward = forward_on(device)
    two_layers(forward)
    assert tracer.timeline().records == 0
    device.passes(100, 150, 170, 180, 185, 200, 260)
    recorded = tracer.timeline()
    assert [(w.start, w.end, w.request, w.layer) for w in recorded.waits] == [
        (100, 150, 5, 0),
        (180, 185, 5, 1),
        (185, 200, 6, 1),
    ]
    assert [(one.start, one.end) for one in recorded.layers] == [(150, 170), (200, 260)]
    assert [(step.start, step.end) for step in recorded.steps] == [(100, 260)]


def test_a_lane_is_taken_until_its_steps_are_drawn() -> None:
    """A forward that begins on the host while the device runs the one before gets a lane of its own."""
    device = Device()
    tracer, forward = forward_on(device)
    two_layers(forward)
    assert ForwardTrace(tracer).lane == 1
    device.passes(100, 150, 170, 180, 185, 200, 260)
    assert ForwardTrace(tracer).lane == 0


@pytest.mark.parametrize("device", [Device(refuses=True), Device(blind=True)])
def test_what_cannot_be_measured_is_counted(device: Device) -> None:
    """A wait in a capture, or without times, is no wait of nothing: the report says that it was not measured."""
    tracer, forward = forward_on(device)
    two_layers(forward)
    device.passes()
    report = tracer.report()
    assert (report.waits, report.unmeasured_waits, report.steps) == (0, 3, 0)
    assert tracer.take_lane() == 0
    assert "1 step" not in str(report)


def test_a_recording_that_begins_inside_a_layer_has_no_unmeasured_waits() -> None:
    """Where compute is the thread there is none to measure: the layer under way is left out."""
    tracer = Tracer(active=False)
    forward = ForwardTrace(tracer)
    forward.arrive(0)
    tracer.start()
    forward.waited(5, 0)
    forward.leave(0)
    forward.close()
    assert (tracer.report().unmeasured_waits, len(tracer.timeline().layers)) == (0, 1)


def test_a_report_with_waits_that_nobody_measured_says_so() -> None:
    """Never a stall of 0.000 ms, nor one that is too short without a word; the file says the same."""
    tracer = Tracer()
    tracer.layer(0, 1_000_000, 3_000_000)
    tracer.step(1_000_000, 3_000_000)
    tracer.unmeasured()
    assert "not measured (1 wait of a compute stream)" in str(tracer.report())
    assert "0.000 ms" not in str(tracer.report())
    assert "stalled 0" not in tracer.report().headline()
    tracer.wait(1, "load", 0, 1_000_000, 2_000_000, 0)
    assert "not measured: 1 wait of a compute stream" in str(tracer.report())
    assert "at least 50.0%" in tracer.report().headline()
