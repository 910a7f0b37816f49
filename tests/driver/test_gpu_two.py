"""Pools on a second GPU, and threads whose current device is the first: on a machine that has two."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from offload import DevicePool, HostPool, PoolGroup, PoolSpec, start_scheduler
from offload.errors import RequestError
from offload.group import Pair

pytestmark = pytest.mark.gpu

PATIENCE = 60.0
LONG = 400_000_000  # clock cycles: a fifth of a second or more
SPEC = PoolSpec.rows(num_layers=3, page_size=16, row_bytes=16 * 132)
THERE = "cuda:1"


@pytest.fixture(autouse=True)
def two() -> None:
    """Skip where there is one GPU only."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def pools(device: str = THERE) -> tuple[DevicePool, HostPool]:
    made = DevicePool.allocate(SPEC, num_pages=32, device=device)
    return made, HostPool.like(made, num_pages=64)


def on_a_fresh_thread(call: Callable[[], None]) -> None:
    """Run it where nobody has chosen a device; raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert torch.cuda.current_device() == 0
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def slowly(pool: DevicePool, page: int, value: int) -> None:
    """Queue, on the pool's device, a long kernel and then writes of a page."""
    with torch.cuda.device(pool.device):
        torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    for layer in range(pool.num_layers):
        pool.view("row", layer)[page] = value


def test_a_thread_of_another_device_waits_for_compute_and_fences_it() -> None:
    """What a slow kernel on the second GPU wrote is what arrives, and what is loaded is what compute reads."""
    device, host = pools()

    def body() -> None:
        with start_scheduler(device, host, io_backend="direct") as scheduler:
            slowly(device, 0, 77)
            scheduler.backup(device_pages=[0], host_pages=[0]).result(timeout=PATIENCE)
            slowly(device, 1, 5)
            load = scheduler.load(host_pages=[0], device_pages=[1])
            for layer in range(device.num_layers):
                load.fence(layer)
                assert (device.view("row", layer)[1].cpu() == 77).all()
            load.result(timeout=PATIENCE)

    on_a_fresh_thread(body)


def test_events_of_both_devices_can_be_followed_again_and_again() -> None:
    """Marks of a compute stream of the first GPU do not get into the pool of the second one's events."""
    device, host = pools()
    elsewhere = torch.cuda.current_stream(0)
    with start_scheduler(device, host, compute_streams=[elsewhere]) as scheduler:
        for _ in range(20):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(elsewhere)
            for after in ("compute", event, elsewhere):
                load = scheduler.load(host_pages=[0], device_pages=[0], after=after)
                load.result(timeout=PATIENCE)


PROGRAM = f"""
import threading
import torch
from offload import DevicePool, HostPool, PoolSpec, start_scheduler

def rank():
    torch.cuda.set_device(1)
    spec = PoolSpec.rows(num_layers=3, page_size=16, row_bytes=2112)
    device = DevicePool.allocate(spec, num_pages=32, device="{THERE}")
    host = HostPool.like(device, num_pages=64)
    with start_scheduler(device, host) as scheduler:
        def use():
            backup = scheduler.backup(device_pages=[0], host_pages=[0])
            backup.fence(2)
            backup.result()
        fresh = threading.Thread(target=use)
        fresh.start()
        fresh.join()
        use()

rank()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on the first GPU"
"""


def test_no_context_appears_on_the_first_gpu() -> None:
    """A process whose pools are on the second one takes no memory on the first."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


def test_a_group_on_two_devices_is_refused() -> None:
    """When the scheduler opens."""
    group = PoolGroup(a=Pair(*pools("cuda:0")), b=Pair(*pools("cuda:1")))
    with pytest.raises(RequestError, match="several devices"):
        start_scheduler(group)
