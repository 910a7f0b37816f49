"""What a caller may pass as `after=` on CUDA: points in time, kept whatever happens to his objects later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from offload import start_scheduler
from offload.driver import cuda_after
from offload.driver.base import Driver, Event
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_calls import RawEvent, RawStream
from offload.driver.sim import SimDriver
from offload.driver.threads import ThreadsDriver
from offload.errors import RequestError
from offload.testing_cuda import FakeCuda
from offload.testing_cuda_model import FakeEvent, FakeStream, Generic
from tests.driver.test_cuda import PATIENCE, Flight, Pool, land, world
from tests.driver.test_cuda_scheduler import page, pools


def recorded(fake: FakeCuda, stream: RawStream) -> RawEvent:
    """Return an event of the caller's that marks the present end of a stream."""
    event = fake.new_event(timing=False)
    fake.record(event, stream)
    return event


def heard(event: Event) -> threading.Event:
    """Watch an event; what is returned is set when it has passed."""
    told = threading.Event()
    event.watch(told.set)
    return told


# ---- a snapshot -------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["elsewhere", "later"])
def test_an_event_stands_for_its_point_at_the_submit(again: str) -> None:
    """Engines record their events again and again: that moves nothing, neither forward nor back."""
    with world() as (fake, driver):
        one, other = fake.new_stream(), fake.new_stream()
        with fake.holding(one):
            with fake.using(one):
                fake.compute(lambda: None)
            theirs = recorded(fake, one)
            (mark,) = driver.events(theirs)
            if again == "elsewhere":
                fake.record(theirs, other)
            else:
                with fake.using(one):
                    fake.compute(lambda: None)
                fake.record(theirs, one)
            fake.run()
            assert not mark.query()
        told = heard(mark)
        with fake.running():
            assert told.wait(PATIENCE)
        assert mark.query()


def test_what_is_recorded_later_holds_nothing_up() -> None:
    """The request goes when the point of the submit has passed, however busy the event is by then."""
    with world() as (fake, driver):
        quick, slow = fake.new_stream(), fake.new_stream()
        with fake.holding(slow), fake.running():
            with fake.holding(quick):
                theirs = recorded(fake, quick)
                (mark,) = driver.events(theirs)
                fake.record(theirs, slow)
            assert heard(mark).wait(PATIENCE)


def test_a_backup_after_an_event_reads_what_its_writer_wrote() -> None:
    """The event is recorded again, elsewhere, while the writer is still queued."""
    device, host = pools()
    fake = FakeCuda(seed=1)
    driver = CudaDriver(0, calls=fake)
    target, writer = page(device, "k", 0, 1), fake.new_stream()
    with (
        fake.running(),
        start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
    ):
        with fake.holding(writer):
            with fake.using(writer):
                fake.compute(lambda: target.fill_(7), writes=[target])
            theirs = recorded(fake, writer)
            backup = scheduler.backup(device_pages=[1], host_pages=[5], after=theirs)
            fake.record(theirs, fake.new_stream())
            scheduler.load(host_pages=[0], device_pages=[0], after=()).result(PATIENCE)
            assert backup.state == "queued"
        backup.result(PATIENCE)
        scheduler.load(host_pages=[5], device_pages=[2], after=()).result(PATIENCE)
    assert (page(device, "k", 0, 2) == 7).all()
    fake.check()


def test_an_event_that_has_passed_costs_no_stream() -> None:
    """There is nothing left to wait for."""
    with world() as (fake, driver):
        theirs = recorded(fake, fake.new_stream())
        fake.run()
        made = len(fake.named("new_stream"))
        assert driver.events(theirs) == ()
        assert len(fake.named("new_stream")) == made


def test_an_event_of_a_capture_is_refused() -> None:
    """To wait for it would take the library's stream into the graph."""
    with world() as (fake, driver):
        theirs = fake.new_event(timing=False)
        with fake.capture():
            fake.record(theirs, fake.current_stream(0))
            with pytest.raises(RequestError, match="captures a graph"):
                driver.events(theirs)
        fake.check()


# ---- several ----------------------------------------------------------------------------------------


def test_a_late_event_holds_up_nobody_else() -> None:
    """Each of them is told when it passes, in whatever order that is."""
    with world() as (fake, driver):
        late, early = fake.new_stream(), fake.new_stream()
        with fake.holding(late), fake.running():
            with fake.holding(early):
                first = heard(driver.events(recorded(fake, late))[0])
                second = heard(driver.events(recorded(fake, early))[0])
            assert second.wait(PATIENCE)
            assert not first.is_set()
        with fake.running():
            assert first.wait(PATIENCE)


def test_relays_are_used_again_and_one_late_event_keeps_one_of_them() -> None:
    """However many events pass meanwhile, two streams of ours serve them."""
    with world() as (fake, driver):
        late, quick = fake.new_stream(), fake.new_stream()
        made = len(fake.named("new_stream"))
        with fake.holding(late), fake.running():
            first = heard(driver.events(recorded(fake, late))[0])
            for _ in range(5 * cuda_after.RELAYS):
                with fake.holding(quick):
                    marks = driver.events(recorded(fake, quick))
                assert heard(marks[0]).wait(PATIENCE)
            assert not first.is_set()
        assert len(fake.named("new_stream")) - made == 2


def test_default_streams_of_two_devices_hold_each_other_up_in_nothing() -> None:
    """Both have the handle 0; each is waited for on a thread of its own."""
    with world() as (fake, driver):
        late, quick = fake.current_stream(2), fake.current_stream(3)
        with fake.holding(late), fake.running():
            first = heard(driver.events(late)[0])
            assert heard(driver.events(quick)[0]).wait(PATIENCE)
            assert not first.is_set()


def test_a_point_of_a_stream_that_went_out_of_use_can_still_be_watched() -> None:
    """Its thread has ended by itself, and starts again for as long as that takes."""
    with world() as (fake, driver):
        old = fake.new_stream()
        first, second = (driver.events(old)[0] for _ in range(2))
        with fake.running():
            assert heard(first).wait(PATIENCE)
            (ended,) = (t for t in threading.enumerate() if "-compute-" in t.name)
            for _ in range(cuda_after.WAITERS):
                driver.events(fake.new_stream())
            ended.join(PATIENCE)
            assert not ended.is_alive()
            assert heard(second).wait(PATIENCE)


def threads() -> int:
    return threading.active_count()


@pytest.mark.parametrize("what", ["streams", "events", "one event"])
def test_however_many_come_threads_and_streams_of_ours_are_bounded(what: str) -> None:
    """Compute streams that come and go, and events in flight by the hundred; all of them are told."""
    bound = cuda_after.RELAYS if what == "events" else cuda_after.WAITERS
    with world() as (fake, driver):
        before, made = threads(), len(fake.named("new_stream"))
        streams = [fake.new_stream() for _ in range(100)]
        theirs = recorded(fake, streams[0])
        marks: list[Event] = []
        for stream in streams:
            if what == "streams":
                with fake.using(stream):
                    marks += driver.marks()
            else:
                marks += driver.events(theirs if what == "one event" else recorded(fake, stream))
        told = [heard(mark) for mark in marks]
        ours = len(fake.named("new_stream")) - made - len(streams)
        assert ours <= {"streams": 0, "events": bound, "one event": 1}[what]
        with fake.running():
            assert all(each.wait(PATIENCE) for each in told)
            driver.marks()[0].wait(PATIENCE)
        assert not driver._hub.on_lost
        for waiter in driver._marks.waiters():
            if waiter not in driver._marks._waiters.values():
                waiter.stop()
                waiter.join(PATIENCE)
        assert threads() - before <= bound + 1


# ---- kinds ------------------------------------------------------------------------------------------


def test_handles_of_torchs_generic_kind_are_taken_for_what_they_are() -> None:
    """`torch.accelerator` gives such: a stream is its point now, though it can be asked like an event."""
    with world() as (fake, driver):
        stream = fake.new_stream()
        assert isinstance(stream, FakeStream)
        event = recorded(fake, stream)
        assert isinstance(event, FakeEvent)
        first, second = driver.events([Generic(stream), Generic(event)])
        with fake.using(stream):
            fake.compute(lambda: None)
        with fake.running():
            assert heard(first).wait(PATIENCE)
            assert heard(second).wait(PATIENCE)
        with pytest.raises(RequestError, match="never recorded"):
            driver.events(Generic(FakeEvent(timing=False)))


DRIVERS: dict[str, Callable[[], Driver]] = {
    "threads": ThreadsDriver,
    "sim": SimDriver,
    "cuda": lambda: CudaDriver(0, calls=FakeCuda()),
}


class OtherStream:
    """A stream of a library that is not torch: it can be asked as an event can."""

    def query(self) -> bool:
        """Say whether it is idle."""
        raise AssertionError("a stream is no event")

    def synchronize(self) -> None:
        """Wait until it is."""
        raise AssertionError("a stream is no event")

    def wait_event(self, event: object) -> None:
        """Order it after an event."""
        raise AssertionError(event)


WRONG: dict[str, Callable[[], object]] = {
    "a stream of torch": lambda: torch.Stream("cpu"),
    "an event of torch": torch.Event,
    "a stream of others": OtherStream,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", DRIVERS)
def test_streams_and_events_of_another_device_are_refused(name: str, wrong: str) -> None:
    """None is taken for an event that says when it is idle, or that has always passed."""
    driver = DRIVERS[name]()
    try:
        for after in (WRONG[wrong](), [WRONG[wrong]()]):
            with pytest.raises(RequestError, match="of another"):
                driver.events(after)
    finally:
        driver.close()


@pytest.mark.parametrize("wrong", [np.array(3), asyncio.Event(), "now", 3, [3], None])
def test_what_is_no_event_is_refused_in_words(wrong: object) -> None:
    """Whatever it says of itself: an array of no dimension is a sequence by its type, and has no elements."""
    with world() as (_, driver), pytest.raises(RequestError, match="after="):
        driver.events(wrong)


def test_what_follows_an_event_lands_after_it() -> None:
    """A flight told to wait for the snapshot itself does, on its stream."""
    with world() as (fake, driver):
        slow = fake.new_stream()
        with fake.holding(slow), fake.running():
            (mark,) = driver.events(recorded(fake, slow))
            flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], after=[mark]).go()
            free = Flight(driver, "backup", Pool(1), Pool(2), [(0, 0)]).go()
            assert free.over.wait(PATIENCE)
            assert not flight.over.is_set()
        land(fake, flight)
