"""Faults that random programs found, each as the smallest story that shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import torch

import offload
from offload.testing import Hooks, SimDriver

BACKENDS = ["asyncio", "trio"]


def pools(num_layers: int = 2) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return two small pools."""
    spec = offload.PoolSpec.rows(num_layers=num_layers, page_size=1, row_bytes=8)
    device = offload.DevicePool.allocate(spec, num_pages=8, device="cpu")
    return device, offload.HostPool.like(device, num_pages=8, layout="page_first")


def run(backend: str, body: Callable[[], Awaitable[object]]) -> None:
    anyio.run(body, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_that_compute_was_fenced_on_is_not_repeated(backend: str) -> None:
    """Compute goes on when a fenced copy fails, so its transfer fails although a batch mate is mended."""

    async def body() -> None:
        device, host = pools()
        host.view("row", 0)[:] = 7
        hooks = Hooks()
        hooks.fail(OSError("planted"), stream="load", nth=1)
        sim = SimDriver(hooks=hooks, detect_races=True)
        seen: list[torch.Tensor] = []
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            with scheduler.hold():
                fenced = await scheduler.load(host_pages=[0], device_pages=[0])
                mate = await scheduler.load(host_pages=[1], device_pages=[1])
            async with anyio.create_task_group() as group:
                group.start_soon(fenced.issued, 0)
                await sim.advance(1e-6)
            fenced.fence(0)
            sim.compute(
                1e-6,
                lambda: seen.append(device.view("row", 0)[0].clone()),
                reads=[(device, 0, [0])],
            )
            await sim.run_until_idle()
            with pytest.raises(offload.TransferFailed, match="planted"):
                await fenced
            await mate
            assert (device.view("row", 0)[1] == 7).all()
            assert (seen[0] != 7).any()

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_while_another_task_lets_time_pass(backend: str) -> None:
    """`aclose` in one task and `run_until_idle` in another both come to an end."""

    async def body() -> None:
        device, host = pools()
        sim = SimDriver()
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            async with anyio.create_task_group() as group:
                group.start_soon(scheduler.aclose, True)
                await sim.run_until_idle()
            assert load.done

    run(backend, body)
