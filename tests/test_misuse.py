"""Mistakes that newcomers make: each gets a typed error at once, and changes nothing."""

from __future__ import annotations

import threading

import anyio
import pytest
import torch

import offload
from offload.testing import SimDriver
from tests.sched import check_still_open


def pools() -> tuple[offload.DevicePool, offload.HostPool]:
    """Return a small pair of pools."""
    spec = offload.PoolSpec.mha(
        num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float16
    )
    device = offload.DevicePool.allocate(spec, num_pages=8)
    return device, offload.HostPool.like(device, num_pages=8, layout="page_first")


def test_pools_in_the_wrong_order_are_refused() -> None:
    """A host pool passed as the device pool is named, not used the wrong way round."""
    device, host = pools()
    with pytest.raises(offload.RequestError, match="a device pool comes first"):
        offload.open_scheduler(host, device)  # type: ignore[arg-type]


def test_the_cuda_driver_refuses_pools_in_host_memory() -> None:
    """`driver="cuda"` for CPU tensors says what to use instead."""
    with pytest.raises(offload.RequestError, match="driver='threads'"):
        offload.open_scheduler(*pools(), driver="cuda")


@pytest.mark.parametrize(
    "wrong", [{"priority": "high"}, {"priority": float("nan")}, {"deadline": "soon"}]
)
def test_priorities_and_deadlines_that_are_no_numbers_are_refused(wrong: dict[str, object]) -> None:
    """A priority or a deadline of the wrong type is refused before anything is queued."""

    async def body() -> None:
        device, host = pools()
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            with pytest.raises(offload.RequestError):
                await scheduler.load(host_pages=[0], device_pages=[0], **wrong)  # type: ignore[arg-type]
            assert scheduler.statistics().load.submitted == 0
            await check_still_open(scheduler, device, host)

    anyio.run(body)


def test_attach_names_a_forgotten_await() -> None:
    """A coroutine in place of a transfer is told from one."""

    async def body() -> None:
        device, host = pools()
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            coroutine = scheduler.load(host_pages=[0], device_pages=[0])
            with pytest.raises(offload.RequestError, match="await"):
                offload.layerwise.attach([torch.nn.Identity()], load=coroutine)  # type: ignore[arg-type]
            coroutine.close()
            await check_still_open(scheduler, device, host)

    anyio.run(body)


def test_attach_refuses_what_could_only_fail_under_the_forward() -> None:
    """A backup that is not streaming, and a module that comes twice, are refused when attached."""

    async def body() -> None:
        layers = [torch.nn.Identity(), torch.nn.Identity()]
        sim, (device, host) = SimDriver(), pools()
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            plain = await scheduler.backup(host_pages=[0], device_pages=[0])
            with pytest.raises(offload.RequestError, match="streaming=True"):
                offload.layerwise.attach(layers, backup=plain)
            load = await scheduler.load(host_pages=[1], device_pages=[1])
            with pytest.raises(offload.RequestError, match="more than once"):
                offload.layerwise.attach([layers[0]] * 2, load=load)
            await sim.run_until_idle()
            await check_still_open(scheduler, device, host)

    anyio.run(body)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_wait_on_another_loop_is_refused(backend: str) -> None:
    """Awaiting a transfer on another thread's loop raises there, and harms nobody."""
    caught: list[BaseException] = []

    async def body() -> None:
        sim, (device, host) = SimDriver(), pools()
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            transfer = await scheduler.load(host_pages=[0], device_pages=[0])

            async def foreign() -> None:
                try:
                    await transfer
                except offload.RequestError as error:
                    caught.append(error)

            thread = threading.Thread(target=anyio.run, args=(foreign,))
            thread.start()
            thread.join()
            await sim.run_until_idle()
            await transfer
            await check_still_open(scheduler, device, host)

    anyio.run(body, backend=backend)
    assert "wait_layer" in str(caught[0])


def test_a_single_layer_is_named_without_a_position() -> None:
    """A layer that is out of range, or named where layers have no names, says what to pass."""

    async def body() -> None:
        device, host = pools()
        async with offload.open_scheduler(device, host, driver=SimDriver()) as scheduler:
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            with pytest.raises(offload.RequestError) as caught:
                await load.layer(4)
            assert str(caught.value) == "layer 4 is out of range. The pool has layers 0 to 1."
            for call in (load.wait_layer, device.spec.layer_index):
                with pytest.raises(offload.UnknownNameError) as unknown:
                    call("model.layers.0")
                assert str(unknown.value) == (
                    "unknown layer 'model.layers.0'. Layers have no names here: use 0 to 1, or give "
                    "layer_names=."
                )

    anyio.run(body)


def test_a_member_that_is_not_there_is_told() -> None:
    """Pages for a member of a group that has none of its own are refused with what it has."""
    group = offload.PoolGroup(kv=offload.Pair(*pools()))
    with pytest.raises(offload.UnknownNameError) as caught:
        group.alloc("host", 1, {"x": 1})
    assert str(caught.value) == (
        "unknown member 'x'. The group has no member with pages of its own."
    )
