"""When layers of the CUDA driver ran: exact where somebody records, cheap where nobody does."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from offload.driver.cuda import CudaDriver
from offload.driver.cuda_stamps import Stamps
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import LAYERS, PAGES, Flight, Pool, Work, land, world

STEP_NS = 1_000
KERNEL_STEPS = 400


def test_stamps_do_not_overlap_and_lie_between_issue_and_now() -> None:
    """A traced flight gets a start and an end per layer, in order, on the host's clock."""
    before = time.perf_counter_ns()
    with world() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], traced=True).go()
        land(fake, flight)
        (start, end), (start_1, end_1) = flight.stamps
        assert before < start <= end <= start_1 <= end_1
        fake.check()


def long_kernel(fake: FakeCuda) -> None:
    """Queue compute that takes many steps."""
    out = torch.zeros(1, dtype=torch.uint8)
    for _ in range(KERNEL_STEPS):
        fake.compute(lambda: None, writes=[out])


def fake_with_clock(seed: int) -> tuple[FakeCuda, CudaDriver]:
    """Return a fake and a driver that has the fake's own clock."""
    fake = FakeCuda(seed, step_ns=STEP_NS)
    return fake, CudaDriver("cuda:0", calls=fake, clock=fake.now_ns)


def stamps_behind_compute(seed: int) -> list[tuple[int, int]]:
    """Return the stamps, from the start of the program, of a flight whose stream waits for a long kernel."""
    fake, driver = fake_with_clock(seed)
    start = fake.now_ns()
    with fake.using(fake.new_stream()):
        long_kernel(fake)
        marks = driver.marks()
    flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], after=marks, traced=True)
    flight.go().issued_all()
    land(fake, flight)
    with fake.running():
        driver.close()
    fake.check()
    return [(first - start, last - start) for first, last in flight.stamps]


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_does_not_include_what_its_stream_waited_for(seed: int) -> None:
    """Behind 400 steps of compute a copy of three steps is about three steps long, and starts behind them."""
    stamps = stamps_behind_compute(seed)
    assert all(0 < last - first < 20 * STEP_NS for first, last in stamps), stamps
    assert stamps[0][0] > 0.9 * KERNEL_STEPS * STEP_NS


def test_without_an_event_in_front_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: told by its end alone, the first copy is as long as the compute before it."""
    monkeypatch.setattr(Stamps, "begin", lambda _: None)
    (first, last), *_ = stamps_behind_compute(0)
    assert last - first > 0.9 * KERNEL_STEPS * STEP_NS


class SlowWork(Work):
    """A copy that the device takes long for, and the host no time to enqueue."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__([], batched=False)
        self.fake = fake

    def __call__(self) -> None:
        long_kernel(self.fake)


@pytest.mark.parametrize("traced", [False, True])
def test_a_copy_is_as_long_as_the_device_takes(
    monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    """Not as long as its enqueueing, which is over before the first byte moves: with a recording, and without."""
    fake, driver = fake_with_clock(0)
    flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], traced=traced)
    monkeypatch.setattr(Flight, "works", lambda self, layer: SlowWork(fake), raising=True)
    flight.go().issued_all()
    land(fake, flight)
    with fake.running():
        driver.close()
    lengths = [(end - start) / STEP_NS for start, end in flight.stamps]
    assert LAYERS * KERNEL_STEPS <= sum(lengths) <= 1.2 * LAYERS * KERNEL_STEPS, lengths
    assert not traced or min(lengths) >= KERNEL_STEPS


@pytest.mark.parametrize("seed", range(4))
def test_an_untraced_flight_takes_no_timing_events(seed: int) -> None:
    """Nobody records: no event with times is made, none is asked, and busy time is counted all the same."""
    with world(seed) as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0), (1, 1)]).go()
        land(fake, flight)
        assert {call.arguments for call in fake.named("new_event")} == {(False,)}
        assert not fake.named("elapsed_ms")
        assert len(fake.named("record")) == LAYERS
        flat = [stamp for pair in flight.stamps for stamp in pair]
        assert flat == sorted(flat)
        assert flat[0] > 0


def test_timing_events_come_from_a_pool() -> None:
    """Fifty traced layers make a handful of timing events, not a hundred."""
    with world() as (fake, driver):
        for _ in range(25):
            flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], traced=True).go()
            land(fake, flight)
            del flight
        made = [call for call in fake.named("new_event") if call.arguments == (True,)]
        assert len(made) <= 12


def test_an_anchor_is_renewed_after_a_second() -> None:
    """A flight of a second later is measured from an anchor of its own, on a stream that nothing else uses."""
    fake, driver = fake_with_clock(0)
    idle: list[int] = []
    for _ in range(2):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], traced=True).go()
        land(fake, flight)
        streams = [call.arguments[1] for call in fake.named("record")]
        raw = flight.stream.raw  # type: ignore[attr-defined]
        idle.append(sum(stream is not raw for stream in streams))
        fake.time += 1_500_000  # steps of a microsecond
    with fake.running():
        driver.close()
    assert 0 < idle[0] <= 3 * LAYERS
    assert idle[1] - idle[0] == 3
    fake.check()


STAMPS_FAIL = {"record": (1,), "elapsed_ms": (1, 2, 3), "query": (1, 2, 3), "new_event": (1,)}


@pytest.mark.parametrize("name", STAMPS_FAIL)
def test_a_stamp_that_fails_costs_no_copy(name: str) -> None:
    """Whatever call of the clock fails, the flight lands with stamps in order."""
    for nth in STAMPS_FAIL[name]:
        with world() as (fake, driver):
            host, device = Pool(1), Pool(2)
            fake.fail(2, name=name, nth=nth)
            flight = Flight(driver, "load", host, device, [(0, 0)], traced=True).go()
            land(fake, flight)
            assert flight.log == [*range(LAYERS), "ended"]
            flat = [stamp for pair in flight.stamps for stamp in pair]
            assert flat == sorted(flat)
            assert torch.equal(device.bytes[:, 0], host.bytes[:, 0])


def test_two_flights_share_one_order() -> None:
    """Traced and untraced flights of one stream do not overlap: busy time adds them up."""
    with world() as (fake, driver):
        flights = [
            Flight(driver, "load", Pool(1), Pool(2), [(page, page)], traced=bool(page % 2)).go()
            for page in range(PAGES)
        ]
        land(fake, *flights)
        stamps = sorted(pair for flight in flights for pair in flight.stamps)
        assert all(end <= start for (_, end), (start, _) in pairwise(stamps))
