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
    delay: int = 8_000
    deaf: bool = False
    anchors: list[int] = attrs.field(factory=list)
    asked: list[tuple[int, int]] = attrs.field(factory=list)

    def record(self) -> int | None:
        """Record an event half a delay from now, and wait for it."""
        event = self.now + self.delay // 2
        self.now += self.delay
        self.anchors.append(event)
        return None if self.deaf else event

    def elapsed_ms(self, first: int, last: int) -> float:
        """Return the distance as cudaEventElapsedTime does, of two events in their order."""
        assert first <= last
        self.asked.append((first, last))
        return as_float32((last - first) / MS)

    def clock(self, **options: int) -> DeviceClock[int]:
        """Return a clock over it."""
        return DeviceClock(self.record, self.elapsed_ms, lambda: self.now, **options)

    def copy(self, clock: DeviceClock[int], start: int, length: int) -> tuple[int, int]:
        """Return what the clock says of a copy that the host enqueues 1 us before it starts, and sees end."""
        self.now = max(self.now, start + length + 5_000)
        return clock.interval(start, start + length, start - 1_000)


def test_interval_is_found() -> None:
    """A copy's start is right to the resolution of the float, its length to a nanosecond."""
    device = FakeDevice(now=500 * MS)
    clock = device.clock()
    device.copy(clock, 501 * MS, 10_000)
    start, end = device.copy(clock, 900 * MS, 250_000)
    assert abs(start - 900 * MS) <= 61
    assert abs(end - start - 250_000) <= 1


def test_what_was_enqueued_before_the_first_anchor_is_found_too() -> None:
    """Copies that were in the air when it was taken are measured back from an anchor of their own."""
    device = FakeDevice(now=100 * MS)
    clock = device.clock()
    issued = device.now - 1_000
    told = []
    for k in range(4):
        at = 100 * MS + k * 200_000
        device.now = at + 150_000
        told.append(clock.interval(at, at + 100_000, issued))
    assert [start for start, _ in told] == [100 * MS + k * 200_000 for k in range(4)]
    assert {end - start for start, end in told} == {100_000}


def test_anchor_is_renewed_each_second() -> None:
    """An hour of copies: each is right, the anchor is renewed once a second, and not for each copy."""
    device = FakeDevice()
    clock = device.clock()
    for k in range(1, 3_600):
        at = k * 1_000 * MS
        for step in range(3):
            start, _ = device.copy(clock, at + step * MS, 1_000)
            assert abs(start - at - step * MS) <= 122
    assert len(device.anchors) <= 3 * 3_600


def test_after_an_hour_without_copies_the_old_anchor_is_not_used() -> None:
    """Its distance would be off by a quarter of a millisecond."""
    device = FakeDevice()
    clock = device.clock()
    device.copy(clock, MS, 1_000)
    at = 3_600_000 * MS + 37_123
    start, _ = device.copy(clock, at, 1_000)
    assert abs(start - at) <= 61


def test_events_in_the_air_keep_their_anchor() -> None:
    """A copy that was enqueued before a renewal and lands after it is measured from the older anchor."""
    device = FakeDevice()
    clock = device.clock()
    device.copy(clock, MS, 1_000)
    before = 1_100 * MS
    device.copy(clock, before + 10 * MS, 1_000)  # renews
    taken = len(device.anchors)
    first = before + 20 * MS
    device.now = first + 10_000
    start, end = clock.interval(first, first + 300, before)
    assert abs(start - first) <= 122
    assert (end - start, len(device.anchors)) == (300, taken)


@pytest.mark.parametrize(
    ("late", "served"), [(-1, False), (0, True), (2 * 1_000 - 1, True), (2 * 1_000, False)]
)
def test_an_anchor_serves_from_when_it_is_known_until_twice_its_age(
    late: int, served: bool
) -> None:
    """What was issued before the host knew of it, or two renewals after it passed, asks for another."""
    device = FakeDevice(now=MS, delay=0)
    clock = device.clock(renew_ns=1_000)
    assert clock.interval(MS - 20, MS - 10, MS - 30) == (MS - 20, MS - 10)
    anchor = device.anchors[0]
    assert (anchor, device.now) == (MS, MS)  # without a delay it is known when it passes
    device.now = max(MS, MS + late) + 60
    device.asked.clear()
    clock.interval(MS + late + 20, MS + late + 50, MS + late)
    first = device.asked[0]
    assert first == ((anchor, MS + late + 20) if served else (MS + late + 20, device.anchors[-1]))


@pytest.mark.parametrize(("age", "renewed"), [(999, False), (1_000, True)])
def test_an_anchor_that_has_served_is_renewed_by_its_age(age: int, renewed: bool) -> None:
    """The copy that finds it old is still measured from it, and the next one from a new one."""
    device = FakeDevice(now=MS, delay=0)
    clock = device.clock(renew_ns=1_000)
    clock.interval(MS - 20, MS - 10, MS - 30)
    anchor = device.anchors[0]
    device.now = MS + age
    for issued, expected in ((MS + 500, anchor), (MS + age, MS + age if renewed else anchor)):
        device.asked.clear()
        clock.interval(issued + 10, issued + 20, issued)
        assert device.asked[0] == (expected, issued + 10)
        device.now = MS + age


def test_times_are_whole_nanoseconds() -> None:
    """The middle of an odd delay is rounded: lanes are drawn at integers."""
    device = FakeDevice(now=MS, delay=8_001)
    told = device.clock().interval(MS - 300, MS - 100, MS - 400)
    assert told == (MS - 300, MS - 100)
    assert {type(when) for when in told} == {int}


def test_without_renewal_it_would_drift() -> None:
    """The control: with one anchor for an hour the float alone is off by more than 10 us."""
    device = FakeDevice()
    clock = device.clock(renew_ns=10**18)
    device.copy(clock, MS, 100)
    worst = 0
    for k in range(50):
        at = 3_600_000 * MS + k * 37_123
        worst = max(worst, abs(device.copy(clock, at, 100)[0] - at))
    assert worst > 10_000


def test_stream_order_is_kept() -> None:
    """Copies of one stream never overlap, whatever two anchors say."""
    device = FakeDevice()
    clock = device.clock(renew_ns=1)
    previous = 0
    for k in range(200):
        device.delay = 8_000 + 40_000 * (k % 2)
        start, end = device.copy(clock, device.now + 700 * (k % 3), 1_500)
        assert start >= previous
        assert end >= start
        previous = end


def test_the_tightest_of_three_is_the_anchor() -> None:
    """A host thread that was preempted while one of them was taken does not spoil the anchor."""
    device = FakeDevice(now=10 * MS)
    delays = iter([900_000, 4_000, 700_000])
    record = device.record

    def preempted() -> int | None:
        device.delay = next(delays)
        event = record()
        assert event is not None
        return event - device.delay // 2  # right at the beginning: its middle is a wrong guess

    clock = DeviceClock(preempted, device.elapsed_ms, lambda: device.now)
    start, _ = clock.interval(9 * MS, 9 * MS + 500, 0)
    assert abs(start - 9 * MS) <= 2_000


def test_a_device_that_does_not_answer_in_time_is_not_waited_for() -> None:
    """Without an anchor the host's own times are told, until there is one again."""
    device = FakeDevice(now=MS, deaf=True)
    clock = device.clock()
    at = device.now
    assert clock.interval(at + 1, at + 2, at) == (at, device.now)
    assert len(device.anchors) == 1
    device.deaf = False
    start, end = device.copy(clock, 5 * MS, 700)
    assert (start, end - start) == (5 * MS, 700)


def test_events_mean_nothing_by_themselves() -> None:
    """A device that counts from another moment tells the same times: only distances are asked for."""
    device = FakeDevice(now=500 * MS)
    apart = 7_000 * MS

    def record() -> int | None:
        event = device.record()
        return None if event is None else event + apart

    clock = DeviceClock(record, device.elapsed_ms, lambda: device.now)
    for at in (501 * MS, 503 * MS):
        device.now = at + 10_000
        start, end = clock.interval(at + apart, at + apart + 700, at - 1_000)
        assert abs(start - at) <= 61
        assert abs(end - start - 700) <= 1


def test_one_answer_of_three_makes_an_anchor() -> None:
    """A device that answers once and then not in time has been heard."""
    device = FakeDevice(now=MS)
    answers = iter([True, False])

    def record() -> int | None:
        device.deaf = not next(answers)
        return device.record()

    clock = DeviceClock(record, device.elapsed_ms, lambda: device.now)
    assert clock.interval(MS - 900, MS - 200, MS - 2_000) == (MS - 900, MS - 200)


def test_nothing_starts_before_it_was_issued() -> None:
    """A start that the anchors put before the host's own issue is moved behind it."""
    device = FakeDevice(now=MS)
    clock = device.clock()
    assert clock.interval(MS - 300, MS - 100, MS - 200) == (MS - 200, MS - 100)


def test_events_without_times_end_when_they_are_seen() -> None:
    """Between the enqueueing, or the end before it, and now; both ways of stamping share one order."""
    device = FakeDevice(now=MS)
    clock = device.clock()
    assert clock.interval(MS - 400, MS - 100, MS - 900) == (MS - 400, MS - 100)
    device.now = MS + 900
    assert clock.seen(MS - 800) == (MS - 100, MS + 900)
    device.now = MS + 2_000
    assert clock.seen(MS + 1_000) == (MS + 1_000, MS + 2_000)


@pytest.mark.parametrize(
    ("given", "after", "expected"),
    [((5, 9), 0, (5, 9)), ((5, 9), 7, (7, 9)), ((5, 9), 12, (12, 12)), ((5, 4), 0, (5, 5))],
)
def test_clamp(given: tuple[int, int], after: int, expected: tuple[int, int]) -> None:
    """An interval is moved behind a time, cut where it must be, and never negative."""
    assert clamp(*given, after=after) == expected
