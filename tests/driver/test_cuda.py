"""The CUDA driver on a CUDA that executes: order, lateness, failure and loss, without a GPU."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from offload.driver import cuda_stream
from offload.driver.base import Access, Event
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_calls import STICKY, RawEvent, RawStream, here
from offload.errors import RequestError
from offload.testing_cuda import FakeCuda

PATIENCE = 20.0
LAYERS, PAGES, NBYTES = 2, 4, 48


class Pool:
    """Bytes by layer and page."""

    def __init__(self, seed: int) -> None:
        made = np.random.default_rng(seed).integers(0, 256, (LAYERS, PAGES, NBYTES), np.uint8)
        self.bytes = torch.from_numpy(made)

    def at(self, layer: int, page: int) -> torch.Tensor:
        return self.bytes[layer, page]

    def row(self, page: int) -> list[torch.Tensor]:
        return [self.bytes[layer, page] for layer in range(LAYERS)]


class Work:
    """One layer: pages of one pool to pages of another, one call each or all in one."""

    nbytes = NBYTES

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, batched: bool
    ) -> None:
        self.pairs = pairs
        self.batched = batched

    def __call__(self) -> None:
        if not self.batched:
            for source, destination in self.pairs:
                here().copy(destination, source)
            return
        self.sources = np.array([source.data_ptr() for source, _ in self.pairs], np.uint64)
        self.destinations = np.array([to.data_ptr() for _, to in self.pairs], np.uint64)
        self.sizes = np.full(len(self.pairs), NBYTES, np.uint64)
        here().copy_batch(self.destinations, self.sources, self.sizes)

    def poison(self) -> None:
        raise AssertionError("the fake poisons")

    def accesses(self) -> Sequence[Access]:
        return ()


class Flight:
    """A batch that copies pages, after events: some before its first layer, some before each."""

    def __init__(
        self,
        driver: CudaDriver,
        stream: str,
        source: Pool,
        destination: Pool,
        pages: Sequence[tuple[int, int]],
        *,
        after: Sequence[Event] = (),
        behind: Sequence[Flight] = (),
        urgency: float = 0.0,
        batched: bool = False,
        traced: bool = False,
    ) -> None:
        self.stream = driver.stream(stream)
        self.source, self.destination, self.pages = source, destination, pages
        self.after, self.behind, self.batched = after, behind, batched
        self.urgency: tuple[float, ...] = (urgency,)
        self.stopped = False
        self.traced = traced
        self.handed = 0
        self.log: list[object] = []
        self.events: dict[int, Event] = {}
        self.stamps: list[tuple[int, int]] = []
        self.errors: list[BaseException] = []
        self.torn: list[int] = []
        self.seen = [threading.Event() for _ in range(LAYERS)]
        self.over = threading.Event()

    def go(self) -> Flight:
        self.stream.carry(self)
        return self

    def issued_all(self) -> Flight:
        """Wait, as a thread, until every layer is enqueued or the flight is over."""
        for seen in self.seen:
            assert seen.wait(PATIENCE), self.log
        return self

    @property
    def exhausted(self) -> bool:
        return self.handed == LAYERS

    def prepare(self) -> None:
        for event in self.after:
            self.stream.wait(event)

    def next_layer(self) -> tuple[int, Work] | None:
        layer, self.handed = self.handed, self.handed + 1
        for other in self.behind:
            self.stream.wait(other.events[layer])
        return layer, self.works(layer)

    def works(self, layer: int) -> Work:
        """Return the copies of a layer."""
        pairs = [
            (self.source.at(layer, page), self.destination.at(layer, to)) for page, to in self.pages
        ]
        return Work(pairs, batched=self.batched)

    def issued(self, layer: int, event: Event, began_ns: int = 0) -> None:
        self.events[layer] = event
        self.seen[layer].set()

    def landed(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.log.append(layer)
        self.stamps.append((start_ns, end_ns))
        if any((self.destination.at(layer, to) == 0xA5).all() for _, to in self.pages):
            self.torn.append(layer)

    def failed(self, layer: int, error: BaseException) -> None:
        self.log.append("failed")
        self.errors.append(error)

    def ended(self) -> None:
        self.log.append("ended")
        for seen in self.seen:
            seen.set()
        self.over.set()


@contextlib.contextmanager
def world(seed: int = 0, *, fake: FakeCuda | None = None) -> Iterator[tuple[FakeCuda, CudaDriver]]:
    """Yield a fake and a driver on it; a stream of the caller's is current, and all is joined after."""
    fake = FakeCuda(seed) if fake is None else fake
    compute = fake.new_stream()
    driver = CudaDriver("cuda:0", calls=fake)
    try:
        with fake.using(compute):
            yield fake, driver
    finally:
        with fake.running():
            driver.close()


def land(fake: FakeCuda, *flights: Flight) -> None:
    """Step until these flights are over."""
    with fake.running():
        for flight in flights:
            assert flight.over.wait(PATIENCE), flight.log


def store(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def compute_copies(fake: FakeCuda, target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a kernel that copies."""
    fake.compute(partial(store, target, source), reads=[source], writes=[target])


# ---- one flight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_flight_lands_layer_by_layer_and_ends_last(seed: int, batched: bool) -> None:
    """Bytes arrive late and whole; the callbacks come in order, each once."""
    with world(seed) as (fake, driver):
        host, device = Pool(1), Pool(2)
        before = device.bytes.clone()
        flight = Flight(driver, "load", host, device, [(0, 1), (2, 3)], batched=batched)
        flight.go().issued_all()
        assert torch.equal(device.bytes, before), "nothing moves before it is stepped"
        land(fake, flight)
        assert flight.log == [*range(LAYERS), "ended"]
        assert not flight.torn
        assert torch.equal(device.bytes[:, [1, 3]], host.bytes[:, [0, 2]])
        assert torch.equal(device.bytes[:, [0, 2]], before[:, [0, 2]])
        fake.check()


def test_a_stopped_flight_ends_without_its_other_layers() -> None:
    """What is not enqueued never is, and the flight ends after what was."""
    with world() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)])
        flight.stopped = True
        flight.go()
        land(fake, flight)
        assert flight.log == ["ended"]
        assert not fake.named("copy")


def test_an_urgent_flight_overtakes_what_is_not_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a bounded number of layers is enqueued ahead; behind them the more urgent flight goes first."""
    monkeypatch.setattr(cuda_stream, "AHEAD_LAYERS", 1)
    monkeypatch.setattr(cuda_stream, "AHEAD_BYTES", 1)
    with world() as (fake, driver):
        host, device = Pool(1), Pool(2)
        slow = Flight(driver, "load", host, device, [(0, 0)], urgency=5.0).go()
        assert slow.seen[0].wait(PATIENCE)
        fast = Flight(driver, "load", host, device, [(1, 1)], urgency=1.0).go()
        land(fake, slow, fast)
        order = [call.arguments[0] for call in fake.named("copy")]
        pages = [(layer, page) for layer, page in ((0, 0), (0, 1), (1, 1), (1, 0))]
        assert order == [device.at(*where).data_ptr() for where in pages]


def test_a_flight_stopped_under_way_ends_after_what_was_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layer on the stream drains and lands; the next one is never enqueued."""
    monkeypatch.setattr(cuda_stream, "AHEAD_LAYERS", 1)
    monkeypatch.setattr(cuda_stream, "AHEAD_BYTES", 1)
    with world() as (fake, driver):
        host, device = Pool(1), Pool(2)
        before = device.bytes.clone()
        flight = Flight(driver, "load", host, device, [(0, 1)]).go()
        assert flight.seen[0].wait(PATIENCE)
        flight.stopped = True
        flight.stream.kick()
        assert not flight.over.is_set(), "its first layer is still to land"
        land(fake, flight)
        assert flight.log == [0, "ended"]
        assert torch.equal(device.at(0, 1), host.at(0, 0))
        assert torch.equal(device.bytes[1], before[1])


def test_an_event_of_another_kind_holds_back_what_is_not_enqueued() -> None:
    """Such as a `threading.Event`: nothing is enqueued before it fires, and a stopped flight still ends."""
    with world() as (fake, driver):
        fired = threading.Event()
        (event,) = driver.events(fired)
        driver.stream("load").wait(event)
        stopped = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)])
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
        stopped.go()
        stopped.stopped = True
        stopped.stream.kick()
        assert stopped.over.wait(PATIENCE)
        assert not fake.named("copy")
        fired.set()
        land(fake, flight)
        assert flight.log == [*range(LAYERS), "ended"]


def test_work_is_kept_until_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptor arrays live until their copies ran; a driver that drops them early is found out."""
    with world() as (fake, driver):
        pages = [(0, 0), (1, 1)]
        flight = Flight(driver, "load", Pool(1), Pool(2), pages, batched=True).go().issued_all()
        land(fake, flight)
        fake.check()
    keeps = cuda_stream._Ticket

    def forgets(flight: object, layer: int, work: Work, *rest: object) -> object:
        return keeps(flight, layer, None, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_stream, "_Ticket", forgets)
    with world() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), pages, batched=True).go().issued_all()
        other = Flight(driver, "load", Pool(1), Pool(2), [(2, 2)]).go().issued_all()
        land(fake, flight, other)
        assert any("freed" in fault for fault in fake.faults)


def test_events_return_to_the_pool_when_nobody_can_ask_them() -> None:
    """Raw events are reused once their flight is gone, and not before."""
    with world() as (fake, driver):
        for _ in range(5):
            flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
            land(fake, flight)
            kept = [event.query() for event in flight.events.values()]
            assert kept == [True] * LAYERS
            del flight
        assert len(fake.named("new_event")) < len(fake.named("record"))


# ---- every edge -------------------------------------------------------------------------------------


class Forgetful(FakeCuda):
    """Leaves out the nth wait or record, as a driver without that line would."""

    def __init__(self, name: str, nth: int) -> None:
        super().__init__()
        self.name, self.left = name, nth
        self.made = 0

    def _skips(self, name: str) -> bool:
        if name != self.name:
            return False
        self.made += 1
        self.left -= 1
        return self.left == 0

    def record(self, event: RawEvent, stream: RawStream) -> None:
        if not self._skips("record"):
            super().record(event, stream)

    def wait(self, event: RawEvent, stream: RawStream) -> None:
        if not self._skips("wait"):
            super().wait(event, stream)


def every_edge(fake: FakeCuda) -> list[str]:
    """Run a program in which each edge between streams is needed; return what went wrong."""
    with world(fake=fake) as (_, driver):
        device, host = Pool(1), Pool(2)
        made, out, fresh = Pool(3), Pool(4), Pool(5)
        expected = made.bytes[:, 0].clone()
        for layer in range(LAYERS):  # compute makes page 0, which the backup reads
            compute_copies(fake, device.at(layer, 0), made.at(layer, 0))
        backup = Flight(driver, "backup", device, host, [(0, 0)], after=driver.marks())
        backup.go().issued_all()
        for layer in range(LAYERS):  # compute still reads page 1, which the load overwrites
            compute_copies(fake, out.at(layer, 1), device.at(layer, 1))
        marks = driver.marks()
        load = Flight(driver, "load", host, device, [(0, 1)], after=marks, behind=[backup])
        load.go().issued_all()
        compute = driver.compute_stream()
        for layer in range(LAYERS):
            compute.wait(backup.events[layer])  # page 0 may be overwritten
            compute_copies(fake, device.at(layer, 0), fresh.at(layer, 0))
            compute.wait(load.events[layer])  # page 1 may be read
            compute_copies(fake, out.at(layer, 0), device.at(layer, 1))
        fake.run()
        land(fake, backup, load)
        wrong = list(fake.faults)
        for name, found in (("out", out), ("host", host)):
            if not torch.equal(found.bytes[:, 0], expected):
                wrong.append(f"{name} holds other bytes")
        return wrong


def test_a_program_with_every_edge_is_clean() -> None:
    """With all waits and records in place there is no race, and all bytes are right."""
    assert every_edge(FakeCuda()) == []


@pytest.mark.parametrize("name", ["wait", "record"])
def test_no_wait_and_no_record_can_be_left_out(name: str) -> None:
    """Leaving out any single one of them is noticed."""
    counted = Forgetful(name, 0)
    assert every_edge(counted) == []
    assert counted.made >= 6
    for nth in range(1, counted.made + 1):
        assert every_edge(Forgetful(name, nth)), f"{name} {nth} of {counted.made} is not needed"


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_move_the_right_bytes_without_a_race(seed: int) -> None:
    """Loads, backups, fences and kernels in any order give what running them one by one gives."""
    rng = random.Random(seed)
    with world(seed) as (fake, driver):
        device, host, made = Pool(1), Pool(2), Pool(3)
        model = {"device": device.bytes.clone(), "host": host.bytes.clone()}
        flights: list[Flight] = []
        users: dict[tuple[str, int], list[Flight]] = {}
        for _ in range(14):
            what, page, to = (
                rng.choice(["load", "backup", "kernel", "step"]),
                *rng.choices(range(PAGES), k=2),
            )
            if what == "step":
                for _ in range(rng.randrange(12)):
                    fake.step()
            elif what == "kernel":
                for flight in users.get(("device", to), ()):
                    for event in flight.events.values():
                        driver.compute_stream().wait(event)
                for layer in range(LAYERS):
                    compute_copies(fake, device.at(layer, to), made.at(layer, page))
                model["device"][:, to] = made.bytes[:, page]
            else:
                ends = ("host", "device") if what == "load" else ("device", "host")
                pools = {"host": host, "device": device}
                touched = [(ends[0], page), (ends[1], to)]
                behind = [other for key in touched for other in users.get(key, ())]
                flight = Flight(
                    driver, what, pools[ends[0]], pools[ends[1]], [(page, to)],
                    after=driver.marks(), behind=behind, batched=rng.random() < 0.5,
                )  # fmt: skip
                flights.append(flight.go().issued_all())
                for key in touched:
                    users.setdefault(key, []).append(flight)
                model[ends[1]][:, to] = model[ends[0]][:, page]
        land(fake, *flights)
        fake.run()
        fake.check()
        assert torch.equal(device.bytes, model["device"])
        assert torch.equal(host.bytes, model["host"])


# ---- marks, after, threads --------------------------------------------------------------------------


def test_marks_are_recorded_in_the_callers_frame_on_every_compute_stream() -> None:
    """The submitting thread's current stream and the named streams are marked, by that thread."""
    fake = FakeCuda()
    named = fake.new_stream()
    driver = CudaDriver(0, calls=fake, compute_streams=[named])
    mine = fake.new_stream()
    with fake.using(mine):
        assert len(driver.marks()) == 2
    with fake.using(named):
        assert len(driver.marks()) == 1
    records = fake.named("record")
    assert [call.arguments[1] for call in records] == [mine, named, named]
    assert {call.thread for call in records} == {threading.current_thread().name}
    with fake.running():
        driver.close()


def test_after_takes_events_streams_and_lists_and_refuses_the_rest() -> None:
    """An event that was never recorded would order nothing, so it is refused."""
    with world() as (fake, driver):
        event, stream = fake.new_event(timing=False), fake.new_stream()
        fake.record(event, stream)
        assert len(driver.events([event, stream, driver.marks()[0]])) == 3
        assert driver.events(()) == ()
        for wrong in (fake.new_event(timing=False), "now", 3):
            with pytest.raises(RequestError):
                driver.events(wrong)


def test_watching_a_mark_calls_back_when_compute_is_there() -> None:
    """A watcher hears of compute's progress without polling."""
    with world() as (fake, driver):
        out = Pool(1)
        compute_copies(fake, out.at(0, 0), out.at(0, 1))
        (mark,) = driver.marks()
        heard = threading.Event()
        mark.watch(heard.set)
        assert not mark.query()
        assert not mark.wait(0)
        with fake.running():
            assert heard.wait(PATIENCE)
        assert mark.wait(0)


def test_threads_of_the_driver_use_its_device_and_relax_their_capture_mode() -> None:
    """No context appears on that of the caller's thread, 0, and a capture elsewhere forbids them nothing."""
    fake = FakeCuda()
    driver = CudaDriver("cuda:1", calls=fake)
    assert fake.current_device() == 0
    flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)])
    flight.go().issued_all()
    with fake.using(fake.current_stream(1)), fake.capture():
        assert driver.capturing()
        land(fake, flight)
    assert flight.log == [*range(LAYERS), "ended"]
    assert fake.contexts == {1}
    ours = {call.thread for call in fake.calls} - {threading.current_thread().name}
    for thread in ours:
        names = [call.name for call in fake.calls if call.thread == thread]
        assert names[:2] == ["set_device", "relax_capture"]
    with fake.running():
        driver.close()
    driver.close()
    assert fake.contexts == {1}
    fake.check()


# ---- failure ----------------------------------------------------------------------------------------


def accounts(flight: Flight) -> None:
    """Check that a flight heard a whole story: landings in order, at most one failure, one ending."""
    assert flight.log[-1] == "ended"
    assert flight.log.count("ended") == 1
    heard = flight.log[:-1]
    landed = [word for word in heard if word != "failed"]
    assert landed == list(range(len(landed)))
    assert heard == landed if len(landed) == LAYERS else heard[len(landed) :] == ["failed"]


def test_a_failed_copy_fails_its_flight_alone_after_what_was_enqueued() -> None:
    """Its event is recorded all the same; others go on, and the device is not lost."""
    with world() as (fake, driver):
        host, device = Pool(1), Pool(2)
        fake.fail(error_code=2, nth=2, name="copy")
        bad = Flight(driver, "load", host, device, [(0, 0)]).go()
        land(fake, bad)
        good = Flight(driver, "load", host, device, [(1, 1)]).go()
        land(fake, good)
        assert bad.log == [0, "failed", "ended"]
        assert good.log == [*range(LAYERS), "ended"]
        assert driver.lost is None


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("sticky", [False, True])
def test_whichever_call_fails_every_flight_ends_once(sticky: bool, traced: bool) -> None:
    """For each call in turn: nothing hangs, nothing is told twice, and a sticky error is a loss."""
    for nth in range(1, 40):
        fake = FakeCuda(nth)
        compute = fake.new_stream()
        driver = CudaDriver(0, calls=fake)
        flights = [
            Flight(driver, name, Pool(1), Pool(2), [(page, page)], traced=traced)
            for page, name in enumerate(("load", "backup", "load"))
        ]
        fake.fail(700 if sticky else 1, nth=nth, sticky=sticky)
        with fake.using(compute):
            for flight in flights:
                flight.go()
            land(fake, *flights)
        for flight in flights:
            accounts(flight)
        assert not sticky or driver.lost is None or fake.broken in STICKY
        fake.forgive()
        with fake.running():
            driver.close()


def test_a_lost_device_fails_what_is_in_the_air_and_refuses_the_rest() -> None:
    """No event passes any more, and yet every flight ends, watchers are called and close returns."""
    with world() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go().issued_all()
        heard = threading.Event()
        out = Pool(3)
        compute_copies(fake, out.at(0, 0), out.at(0, 1))
        driver.marks()[0].watch(heard.set)
        fake.break_context(700)
        assert flight.over.wait(PATIENCE)
        assert heard.wait(PATIENCE)
        accounts(flight)
        assert driver.lost is not None
        with pytest.raises(RequestError, match="lost"):
            driver.marks()
        late = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
        assert late.over.wait(PATIENCE)
        assert late.log == ["failed", "ended"]


def test_in_a_forked_child_carry_raises_and_close_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA does not survive a fork: the child touches nothing of it."""
    with world() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)])
        with monkeypatch.context() as child:
            child.setattr("os.getpid", lambda: -1)
            made = len(fake.calls)
            with pytest.raises(RequestError, match="fork"):
                flight.go()
            driver.close()
            assert len(fake.calls) == made
        land(fake, flight.go())
        assert flight.log == [*range(LAYERS), "ended"]
