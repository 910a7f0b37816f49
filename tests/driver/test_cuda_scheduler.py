"""The whole scheduler on the CUDA driver, over a CUDA that executes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable

import anyio
import pytest
import torch

from offload import (
    DevicePool,
    HostPool,
    PoolSpec,
    SchedulerClosedError,
    TransferFailed,
    open_scheduler,
    start_scheduler,
)
from offload.driver.cuda import CudaDriver
from offload.errors import RequestError
from offload.testing import FakeCuda

SPEC = PoolSpec.mha(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8)
PATIENCE = 20.0


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    def run_on(body: Callable[[], Awaitable[None]]) -> None:
        anyio.run(body, backend=request.param)

    return run_on


def pools() -> tuple[DevicePool, HostPool]:
    device = DevicePool.allocate(SPEC, num_pages=8)
    host = HostPool.like(device, num_pages=8, layout="page_first_direct")
    draw = torch.Generator().manual_seed(0)
    for layer in range(SPEC.num_layers):
        for name in ("k", "v"):
            flat, _ = device.flat(name, layer)
            flat.copy_(torch.randint(0, 256, flat.shape, generator=draw, dtype=torch.uint8))
    return device, host


def page(pool: DevicePool, name: str, layer: int, index: int) -> torch.Tensor:
    """Return the bytes of one page of a layer of a device pool."""
    flat, part = pool.flat(name, layer)
    start = part.at(layer, index)
    return flat[start : start + part.nbytes]


def test_a_round_trip_beside_compute(
    run: Callable[[Callable[[], Awaitable[None]]], None],
) -> None:
    """A backup reads what compute queued before it, a fence lets compute overwrite, a load brings it back."""

    async def body() -> None:
        device, host = pools()
        fake = FakeCuda(seed=1)
        made = {name: torch.full_like(page(device, name, 0, 0), 7) for name in ("k", "v")}
        zero = torch.zeros_like(made["k"])
        compute = fake.new_stream()
        driver = CudaDriver(0, calls=fake)

        def fill(layer: int, value: torch.Tensor) -> None:
            for name in ("k", "v"):
                target = page(device, name, layer, 1)
                fake.compute(lambda target=target: target.copy_(value), writes=[target])  # type: ignore[misc]

        with fake.running(), fake.using(compute):
            async with open_scheduler(
                device, host, io_backend="direct", driver=driver
            ) as scheduler:
                for layer in range(SPEC.num_layers):
                    fill(layer, made["k"])
                backup = await scheduler.backup(device_pages=[1], host_pages=[5])
                for layer in range(SPEC.num_layers):
                    await backup.issued(layer)
                    backup.fence(layer)
                    fill(layer, zero)
                load = await scheduler.load(host_pages=[5], device_pages=[2])
                await load
                await backup
        for layer in range(SPEC.num_layers):
            for name in ("k", "v"):
                assert torch.equal(page(device, name, layer, 2), made[name])
                assert not page(device, name, layer, 1).any()
        fake.check()

    run(body)


def test_a_capturing_thread_may_not_submit_or_fence() -> None:
    """On a stream that captures a graph both raise, in the caller's frame."""
    device, host = pools()
    fake = FakeCuda()
    driver = CudaDriver(0, calls=fake)
    with (
        fake.running(),
        start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
    ):
        load = scheduler.load(host_pages=[0], device_pages=[0])
        load.wait_issued(0, timeout=PATIENCE)
        with fake.capture():
            with pytest.raises(RequestError):
                scheduler.load(host_pages=[1], device_pages=[1])
            with pytest.raises(RequestError):
                load.fence(0)
        load.result(timeout=PATIENCE)


def test_a_failed_copy_fails_its_transfer_and_the_next_one_works() -> None:
    """The error arrives where the transfer is awaited, with CUDA's own as its cause."""
    device, host = pools()
    fake = FakeCuda()
    driver = CudaDriver(0, calls=fake)
    with (
        fake.running(),
        start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
    ):
        fake.fail(2, name="copy", nth=2)
        load = scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(TransferFailed) as caught:
            load.result(timeout=PATIENCE)
        assert getattr(caught.value.__cause__, "error_code", None) == 2
        scheduler.load(host_pages=[1], device_pages=[1]).result(timeout=PATIENCE)
    fake.check()


def test_a_lost_device_settles_everything_and_closes() -> None:
    """What is in the air fails, submits are refused, and leaving the block returns."""
    device, host = pools()
    fake = FakeCuda()
    driver = CudaDriver(0, calls=fake)
    with start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler:
        load = scheduler.load(host_pages=[0], device_pages=[0], after=())
        load.wait_issued(0, timeout=PATIENCE)
        fake.break_context(700)
        with pytest.raises(TransferFailed, match="locked for ever"):
            load.result(timeout=PATIENCE)
        with pytest.raises(
            SchedulerClosedError, match=r"device is lost\. Pages that it had"
        ) as caught:
            scheduler.wait_idle(host_pages=[0], timeout=PATIENCE)
        assert caught.value.__cause__ is driver.lost
        with pytest.raises(RequestError, match="lost"):
            scheduler.load(host_pages=[1], device_pages=[1])
    assert driver.lost is not None


def test_a_load_never_overtakes_compute_that_is_queued() -> None:
    """A queued kernel still reads the old page, and a queued zero-fill does not wipe the loaded one."""
    for seed in range(6):
        device, host = pools()
        for layer in range(SPEC.num_layers):
            host.flat("k", layer)[0].fill_(9)
            host.flat("v", layer)[0].fill_(9)
        fake = FakeCuda(seed)
        driver = CudaDriver(0, calls=fake)
        target, zeroed = page(device, "k", 0, 2), page(device, "k", 0, 3)
        before, seen = target.clone(), torch.empty_like(target)
        with (
            fake.using(fake.new_stream()),
            start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
        ):
            fake.compute(lambda: seen.copy_(target), reads=[target], writes=[seen])  # noqa: B023
            fake.compute(lambda: zeroed.zero_(), writes=[zeroed])  # noqa: B023
            load = scheduler.load(host_pages=[0, 1], device_pages=[2, 3])
            with fake.running():
                load.result(timeout=PATIENCE)
                scheduler.close()
        assert torch.equal(seen, before)
        assert (target == 9).all()
        assert (zeroed == 9).all()
        fake.check()


def test_a_load_of_pages_whose_backup_is_unfinished_gets_the_new_bytes() -> None:
    """Host pages that a backup still writes are read after it, and those that a load still reads stay."""
    for seed in range(6):
        device, host = pools()
        fake = FakeCuda(seed)
        driver = CudaDriver(0, calls=fake)
        old = [page(device, "v", layer, 0).clone() for layer in range(SPEC.num_layers)]
        new = [page(device, "v", layer, 1).clone() for layer in range(SPEC.num_layers)]
        with (
            fake.using(fake.new_stream()),
            start_scheduler(device, host, io_backend="direct", driver=driver) as scheduler,
        ):
            backup = scheduler.backup(device_pages=[0], host_pages=[4])
            load = scheduler.load(host_pages=[4], device_pages=[6])
            again = scheduler.backup(device_pages=[1], host_pages=[4])
            last = scheduler.load(host_pages=[4], device_pages=[7])
            with fake.running():
                for transfer in (backup, load, again, last):
                    transfer.result(timeout=PATIENCE)
                scheduler.close()
        for layer in range(SPEC.num_layers):
            assert torch.equal(page(device, "v", layer, 6), old[layer])
            assert torch.equal(page(device, "v", layer, 7), new[layer])
        fake.check()


@pytest.mark.parametrize("closes", [True, False])
def test_interpreter_exit_is_quiet_and_quick(closes: bool) -> None:
    """Threads of a driver that nobody closed do not keep the process, and say nothing."""
    program = (
        "from offload.driver.cuda import CudaDriver\n"
        "from offload.testing import FakeCuda\n"
        "driver = CudaDriver(0, calls=FakeCuda())\n"
        "driver.stream('load'), driver.stream('backup'), driver.marks()\n"
        f"{'driver.close()' if closes else ''}\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
