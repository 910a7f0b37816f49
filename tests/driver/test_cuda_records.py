"""Ends of layers that cannot be marked: the flight at fault fails, and the device is not lost for it."""

from __future__ import annotations

import threading

import pytest

from offload import TransferFailed, start_scheduler
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_calls import STICKY, RawStream
from offload.errors import CudaError
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import LAYERS, PATIENCE, Flight, Pool, accounts, land, world
from tests.driver.test_cuda_scheduler import pools

CALLS = ("record", "new_event")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_whose_end_cannot_be_marked_fails_its_flight_alone(name: str, layer: int) -> None:
    """Layers before it land, it fails with the call's error, and those who come later move."""
    with world() as (fake, driver):
        host, device = Pool(1), Pool(2)
        fake.fail(2, name=name, nth=layer + 1)
        flight = Flight(driver, "load", host, device, [(0, 0)]).go()
        land(fake, flight)
        assert flight.log == [*range(layer), "failed", "ended"]
        assert getattr(flight.errors[0], "error_code", None) == 2
        assert driver.lost is None
        other = Flight(driver, "load", host, device, [(1, 1)]).go()
        land(fake, other)
        assert other.log == [*range(LAYERS), "ended"]
        fake.check()


def test_it_ends_when_what_it_had_enqueued_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event says so: the stream itself is waited for, and the flight's pages are in use until then."""
    with world() as (fake, driver):
        draining, drain = threading.Event(), fake.drain

        def noted(stream: RawStream) -> None:
            draining.set()
            drain(stream)

        monkeypatch.setattr(fake, "drain", noted)
        fake.fail(2, name="record", nth=LAYERS)
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], batched=True).go()
        assert draining.wait(PATIENCE)
        assert "failed" not in flight.log
        assert not flight.over.is_set()
        land(fake, flight)
        assert fake.idle
        accounts(flight)
        fake.check()


def test_an_error_of_the_copy_is_told_before_that_of_the_mark() -> None:
    """What went wrong first is what the caller reads."""
    with world() as (fake, driver):
        fake.fail(3, name="copy")
        fake.fail(2, name="record")
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
        land(fake, flight)
        assert [getattr(error, "error_code", None) for error in flight.errors] == [3]
        assert driver.lost is None


def test_a_wait_for_the_stream_that_fails_once_is_tried_again() -> None:
    """One refusal more is no loss either; two of them are."""
    for failures, lost in ((1, False), (2, True)):
        with world() as (fake, driver):
            fake.fail(2, name="record")
            for _ in range(failures):
                fake.fail(2, name="drain")
            flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
            land(fake, flight)
            accounts(flight)
            assert (driver.lost is not None) == lost


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error_code", sorted(STICKY))
def test_a_sticky_code_is_a_loss(name: str, error_code: int) -> None:
    """CUDA says of these that the process must end: no drain is tried."""
    with world() as (fake, driver):
        fake.fail(error_code, name=name)
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go()
        land(fake, flight)
        assert flight.log == ["failed", "ended"]
        assert isinstance(driver.lost, CudaError)
        assert not fake.named("drain")


@pytest.mark.parametrize("name", ["set_device", "relax_capture"])
def test_a_thread_that_gets_its_device_at_the_second_try_is_no_loss(name: str) -> None:
    """Both threads of a stream, and those that wait for marks; one that never gets it is one."""
    for failures, lost in ((1, False), (2, True)):
        with world() as (fake, driver):
            driver.stream("load")
            marks = driver.marks()
            for _ in range(failures):
                fake.fail(2, name=name)
            marks[0].wait(0)
            with fake.running():
                assert marks[0].wait(PATIENCE)
            assert (driver.lost is not None) == lost


@pytest.mark.parametrize("name", CALLS)
def test_a_scheduler_goes_on_after_it(name: str) -> None:
    """One transfer fails and says why; its pages are free, and the next one moves."""
    device, host = pools()
    fake = FakeCuda(seed=1)
    driver = CudaDriver(0, calls=fake)
    with (
        fake.running(),
        start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
    ):
        fake.fail(2, name=name)
        load = scheduler.load(host_pages=[0], device_pages=[0], after=())
        with pytest.raises(TransferFailed) as caught:
            load.result(PATIENCE)
        assert getattr(caught.value.__cause__, "error_code", None) == 2
        scheduler.wait_idle(device_pages=[0], timeout=PATIENCE)
        scheduler.load(host_pages=[0], device_pages=[0], after=()).result(PATIENCE)
    assert driver.lost is None
    fake.check()
