"""The CUDA driver where the pools are on one device and the caller's thread says another, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from offload import DevicePool, HostPool, PoolGroup, PoolSpec, start_scheduler
from offload.driver.cuda import CudaDriver
from offload.errors import RequestError
from offload.group import Pair
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import LAYERS, Flight, Pool, land
from tests.driver.test_cuda_scheduler import page, pools

PATIENCE = 20.0
HERE, THERE = 0, 1
"""The current device of a thread that never chose one; that of the pools."""


@contextmanager
def apart(seed: int = 0, **options: object) -> Iterator[tuple[FakeCuda, CudaDriver]]:
    """Yield a fake and a driver of device 1; the calling thread's current device is 0, by default."""
    fake = FakeCuda(seed)
    driver = CudaDriver(f"cuda:{THERE}", calls=fake, **options)  # type: ignore[arg-type]
    assert fake.current_device() == HERE
    try:
        yield fake, driver
    finally:
        with fake.running():
            driver.close()


def test_marks_are_of_the_pools_device() -> None:
    """A kernel on tensors of device 1 runs there, whatever the thread's current device is: it is waited for."""
    with apart() as (fake, driver):
        with fake.holding(fake.current_stream(THERE)):
            fake.compute(lambda: None, device=THERE)
            (mark,) = driver.marks()
            fake.run()
            assert not mark.query()
        fake.run()
        assert mark.query()


def test_a_backup_waits_for_compute_on_the_pools_device() -> None:
    """A thread that never chose a device submits; what arrives in host memory is what the kernel wrote."""
    with apart() as (fake, driver):
        device, host = pools()
        target, there = page(device, "k", 0, 1), fake.current_stream(THERE)
        with (
            fake.running(),
            start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
        ):
            with fake.holding(there):
                fake.compute(lambda: target.fill_(7), writes=[target], device=THERE)
                backup = scheduler.backup(device_pages=[1], host_pages=[5])
                scheduler.load(host_pages=[0], device_pages=[0], after=()).result(PATIENCE)
                assert backup.state == "queued"
            backup.result(PATIENCE)
            loaded = scheduler.load(host_pages=[5], device_pages=[2])
            loaded.result(PATIENCE)
        assert (page(device, "k", 0, 2) == 7).all()
        fake.check()


def test_a_fence_orders_the_pools_device() -> None:
    """The stream that waits is the one on which kernels over the pool will run."""
    with apart() as (fake, driver):
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)]).go().issued_all()
        driver.compute_stream().wait(flight.events[0])
        assert [call.arguments[1].device for call in fake.named("wait")] == [THERE]  # type: ignore[attr-defined]
        land(fake, flight)


def test_a_capture_is_looked_for_on_the_pools_device() -> None:
    """A graph of the pools' device counts, whatever the current device is; one of another device does not."""
    with apart() as (fake, driver):
        there = fake.current_stream(THERE)
        with fake.using(there), fake.capture():
            fake._thread.device = HERE
            assert driver.capturing()
            fake._thread.device = THERE
        with fake.capture():
            assert not driver.capturing()


def test_default_streams_of_two_devices_are_two() -> None:
    """Both have the handle 0, and both are marked."""
    fake = FakeCuda()
    streams = [fake.current_stream(device) for device in (HERE, THERE)]
    driver = CudaDriver(THERE, calls=fake, compute_streams=streams)
    assert len(driver.marks()) == 2
    assert {call.arguments[1] for call in fake.named("record")} == set(streams)
    with fake.running():
        driver.close()


def test_an_event_is_recorded_on_streams_of_its_own_device_only() -> None:
    """Marks of compute on another device are pooled apart: nothing is recorded where CUDA refuses it."""
    fake = FakeCuda()
    driver = CudaDriver(THERE, calls=fake, compute_streams=[fake.current_stream(HERE)])
    for _ in range(3):
        marks = driver.marks()
        flight = Flight(driver, "load", Pool(1), Pool(2), [(0, 0)], after=marks)
        del marks
        land(fake, flight.go())
        assert flight.log == [*range(LAYERS), "ended"]
        del flight
    assert driver.lost is None
    assert len(fake.named("new_event")) < len(fake.named("record"))
    with fake.running():
        driver.close()


def everything(driver: CudaDriver, fake: FakeCuda) -> None:
    """Mark, move both ways, fence, follow an event and a stream, watch, wait with a time limit."""
    marks = [*driver.marks(), *driver.events(fake.current_stream(THERE))]
    event = fake.new_event(timing=False)
    fake.record(event, fake.current_stream(THERE))
    marks += driver.events(event)
    flights = [
        Flight(driver, name, Pool(1), Pool(2), [(0, 0)], after=marks, traced=True)
        for name in ("load", "backup")
    ]
    for flight in flights:
        flight.go().issued_all()
        driver.compute_stream().wait(flight.events[0])
    land(fake, *flights)
    assert all(mark.wait(PATIENCE) for mark in marks)


def on_a_thread(call: Callable[[], None]) -> None:
    """Run it on a thread that never chose a device; raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("chooses", [True, False])
def test_no_context_appears_on_another_device(chooses: bool) -> None:
    """Half a gigabyte of GPU 0 for each rank of another: not by opening, by moving, nor by closing."""
    fake = FakeCuda()

    def rank() -> None:
        if chooses:
            fake.set_device(THERE)
        driver = CudaDriver(THERE, calls=fake)
        on_a_thread(lambda: everything(driver, fake))
        everything(driver, fake)
        on_a_thread(driver.close)
        driver.close()

    on_a_thread(rank)
    assert fake.contexts == {THERE}
    destroyed = {call.arguments[0] for call in fake.named("destroy_stream")}
    assert len(destroyed) == len(fake.named("new_stream"))


def test_a_scheduler_whose_thread_chose_nothing_makes_no_context_elsewhere() -> None:
    """The loop's thread opens the streams, and its current device is 0 too."""
    device, host = pools()
    with apart() as (fake, driver), fake.running():
        with start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler:
            scheduler.backup(device_pages=[1], host_pages=[5]).result(PATIENCE)
        assert fake.contexts == {THERE}


def test_a_driver_of_another_gpu_is_refused_when_a_scheduler_opens() -> None:
    """Its streams, and the compute that it would wait for, are not where the pools are."""
    device, host = pools()
    device.device = torch.device("cuda:1")
    with pytest.raises(RequestError, match=r"on cuda:1, and .* on cuda:0"):
        start_scheduler(device, host, driver=CudaDriver(0, calls=FakeCuda()))


def test_members_on_two_devices_are_refused_when_a_scheduler_opens() -> None:
    """One driver has the streams of one device: said before anything is queued."""
    spec = PoolSpec.rows(num_layers=1, page_size=1, row_bytes=64)
    made = [DevicePool.allocate(spec, num_pages=2) for _ in range(2)]
    group = PoolGroup(
        a=Pair(made[0], HostPool.like(made[0], num_pages=2)),
        b=Pair(made[1], HostPool.like(made[1], num_pages=2)),
    )
    for member, name in zip(group.members, ("cuda:0", "cuda:1"), strict=True):
        member.device.device = torch.device(name)
    with pytest.raises(RequestError, match=r"'a' .*cuda:0.*'b' .*cuda:1"):
        start_scheduler(group, driver=CudaDriver(0, calls=FakeCuda()))
