"""Graph captures on other threads: nothing that the driver does makes one invalid."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from offload import start_scheduler
from offload.driver.cuda import CudaDriver
from offload.errors import CudaError
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import PATIENCE, Flight, Pool, land, world
from tests.driver.test_cuda_scheduler import pools


@contextmanager
def captured_elsewhere(fake: FakeCuda) -> Iterator[None]:
    """Let another thread capture a graph for the length of a block; raise if that came to nothing."""
    begun, done, errors = threading.Event(), threading.Event(), list[BaseException]()

    def capture() -> None:
        try:
            with fake.using(fake.new_stream()), fake.capture():
                begun.set()
                done.wait(PATIENCE)
        except CudaError as error:
            errors.append(error)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


def test_a_query_makes_a_capture_elsewhere_invalid_unless_the_thread_is_relaxed() -> None:
    """The fake does to captures what CUDA does: the other thread learns of it when its capture ends."""
    fake = FakeCuda()
    event = fake.new_event(timing=False)
    with captured_elsewhere(fake), fake.relaxed():
        assert fake.query(event)
    with (
        pytest.raises(CudaError, match="query"),
        captured_elsewhere(fake),
        pytest.raises(CudaError, match="captures a graph"),
    ):
        fake.query(event)
    assert len(fake.faults) == 1


def test_marks_are_taken_asked_watched_and_waited_for_beside_a_capture() -> None:
    """On the caller's thread, which nobody has relaxed, and which is not afterwards either."""
    with world() as (fake, driver):
        stream, theirs = fake.new_stream(), fake.new_event(timing=False)
        fake.record(theirs, stream)
        with captured_elsewhere(fake):
            marks = [*driver.marks(), *driver.events([theirs, stream])]
            assert not any(mark.query() for mark in marks)
            told = threading.Event()
            marks[0].watch(told.set)
            with fake.running():
                assert told.wait(PATIENCE)
                assert all(mark.wait(PATIENCE) for mark in marks)
                assert driver.marks()[0].wait()
        with pytest.raises(CudaError), captured_elsewhere(fake):
            fake.query(theirs)
        fake.faults.clear()


def test_a_thread_that_sleeps_until_a_mark_has_passed_spoils_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It blocks in CUDA, and no query before has found that there is nothing to wait for."""
    with world() as (fake, driver), captured_elsewhere(fake), fake.running():
        asleep, synchronize = threading.Event(), fake.synchronize

        def noted(event: object) -> None:
            asleep.set()
            synchronize(event)

        monkeypatch.setattr(fake, "synchronize", noted)
        with ThreadPoolExecutor(1) as pool:
            with fake.holding(fake.current_stream(0)):
                waited = pool.submit(driver.marks()[0].wait)
                assert asleep.wait(PATIENCE)
            assert waited.result(PATIENCE)
        fake.check()


def test_a_scheduler_works_beside_a_capture() -> None:
    """Opened, submitted to, fenced, closed: from a plain thread and on the loop's."""
    device, host = pools()
    fake = FakeCuda(seed=1)
    compute = fake.new_stream()
    with captured_elsewhere(fake), fake.running():
        driver = CudaDriver(0, calls=fake)
        opened = start_scheduler(device, host, io_backend="direct", driver=driver)
        with fake.using(compute), opened as scheduler:
            with fake.holding(fake.current_stream(0)):
                fake.compute(lambda: None)
                backup = scheduler.backup(device_pages=[1], host_pages=[5])
            streamed = scheduler.backup(device_pages=[2], host_pages=[6], streaming=True)
            for layer in range(3):
                streamed.layer_written(layer)
            backup.result(PATIENCE)
            load = scheduler.load(host_pages=[5], device_pages=[2])
            load.fence(0)
            for transfer in (load, streamed):
                transfer.result(PATIENCE)
    fake.check()
    assert not [call for call in fake.calls if call.thread == "offload-loop"]


def test_a_flight_lands_beside_a_capture() -> None:
    """The threads of a stream relax once, recorded or not."""
    with world() as (fake, driver), captured_elsewhere(fake):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], traced=True).go()
        land(fake, flight)
        assert flight.log == [0, 1, "ended"]
        fake.check()
