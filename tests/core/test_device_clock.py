"""Device timestamps on the host's clock, with a fake device whose clock we know."""

from __future__ import annotations

import struct

import attrs
import pytest

from offload.core.device_clock import DeviceClock, clamp

MS = 1_000_000


def as_float32(value: float) -> float:
    """Return what a 32-bit float keeps of a value."""
    kept: float = struct.unpack("f", struct.pack("f", value))[0]
    return kept


@attrs.define
class FakeDevice:
    """A device whose events are nanoseconds of the host's own clock, told as a device tells them."""

    now: int = 0
    anchors: int = 0
    delay: int = 8_000

    def record(self) -> int:
        """Record an event half a delay from now, and wait for it."""
        self.anchors += 1
        event = self.now + self.delay // 2
        self.now += self.delay
        return event

    def elapsed_ms(self, first: int, last: int) -> float:
        """Return the distance as cudaEventElapsedTime does."""
        return as_float32((last - first) / MS)

    def clock(self) -> DeviceClock[int]:
        """Return a clock over it."""
        return DeviceClock(self.record, self.elapsed_ms, lambda: self.now)


def test_interval_is_found() -> None:
    """A copy's start is right to the resolution of the float, its length to a nanosecond."""
    device = FakeDevice()
    clock = device.clock()
    device.now = 500 * MS
    clock.interval(500 * MS + 10_000, 500 * MS + 20_000)
    start, end = clock.interval(900 * MS, 900 * MS + 250_000)
    assert abs(start - 900 * MS) <= 61
    assert abs(end - start - 250_000) <= 1


def test_anchor_is_renewed_each_second() -> None:
    """An hour after the start times are still right: the anchor is a second old at most."""
    device = FakeDevice()
    clock = device.clock()
    clock.interval(0, 10)
    taken = device.anchors
    device.now += 3_600_000 * MS
    at = device.now
    start, _ = clock.interval(at, at + 100)
    assert device.anchors == 2 * taken
    assert abs(start - at) <= 61


def test_without_renewal_it_would_drift() -> None:
    """The control: with one anchor for an hour the float alone is off by more than 10 us."""
    device = FakeDevice()
    clock = DeviceClock(device.record, device.elapsed_ms, lambda: device.now, renew_ns=10**18)
    clock.interval(0, 10)
    worst = 0
    for k in range(50):
        device.now = at = 3_600_000 * MS + k * 37_123
        worst = max(worst, abs(clock.interval(at, at + 100)[0] - at))
    assert worst > 10_000


def test_stream_order_is_kept() -> None:
    """Copies of one stream never overlap, whatever two anchors say."""
    device = FakeDevice()
    clock = device.clock()
    previous = 0
    for k in range(200):
        device.now += 10 * MS
        device.delay = 8_000 + 40_000 * (k % 2)
        first = device.now - 2_000 + 700 * (k % 3)
        start, end = clock.interval(first, first + 1_500)
        assert start >= previous
        assert end >= start
        previous = end


def test_nothing_starts_before_it_was_issued() -> None:
    """A start that the anchors put before the host's own issue is moved behind it."""
    device = FakeDevice()
    start, end = device.clock().interval(100, 500, issued_ns=300)
    assert start == 300
    assert end >= start


@pytest.mark.parametrize(
    ("given", "after", "expected"),
    [((5, 9), 0, (5, 9)), ((5, 9), 7, (7, 9)), ((5, 9), 12, (12, 12)), ((5, 4), 0, (5, 5))],
)
def test_clamp(given: tuple[int, int], after: int, expected: tuple[int, int]) -> None:
    """An interval is moved behind a time, cut where it must be, and never negative."""
    assert clamp(*given, after=after) == expected
