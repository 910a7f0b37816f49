"""What a transfer says and how it is waited for: in tasks, in threads, late, often, together."""

from __future__ import annotations

import anyio
import pytest

import offload
from offload.testing import Hooks
from tests.sched import contents, on_both, on_loops, sim_scheduler, state


@on_loops("asyncio", "trio", "uvloop")
async def test_load_settles_after_its_last_layer() -> None:
    """A load settles when its last layer lands, not when it is issued, and its bytes are there."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [7, 3])
        load = await scheduler.load(host_pages=[7, 3], device_pages=[0, 5])
        assert (load.state, load.done) == (offload.State.QUEUED, False)
        await sim.advance_to_layer(2)
        assert (load.state, load.done, load.landed_layers) == (offload.State.ISSUED, False, 2)
        await sim.run_until_idle()
        assert (load.state, load.done, load.landed_layers) == (offload.State.DONE, True, 4)
        await load
        assert contents(device, [0, 5]) == before


@on_both
async def test_nbytes_counts_all_layers() -> None:
    """A transfer's bytes are those of its pages over all layers."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        load = scheduler.load_nowait(host_pages=[1, 2, 3], device_pages=[1, 2, 3])
        assert load.nbytes == 3 * device.spec.page_bytes
        await sim.run_until_idle()


@on_both
async def test_waiting_consumes_nothing() -> None:
    """Awaiting a settled transfer or a landed layer again returns, from many tasks at once too."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        seen: list[int] = []

        async def wait(number: int) -> None:
            await load.layer(1)
            await load
            seen.append(number)

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(wait, number)
            await sim.run_until_idle()
        await load
        await load
        for layer in (3, 0, 0):
            await load.layer(layer)
        assert sorted(seen) == list(range(10))


@on_both
async def test_layer_waiters_wake_layer_by_layer() -> None:
    """A task that waits for a layer wakes when that layer lands, and not before."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        log: list[tuple[int, int]] = []

        async def wait(layer: int) -> None:
            await load.layer(layer)
            log.append((layer, load.landed_layers))

        async with anyio.create_task_group() as group:
            for layer in (3, 1, 0, 2):
                group.start_soon(wait, layer)
            await sim.run_until_idle()
        assert log == [(0, 1), (1, 2), (2, 3), (3, 4)]


@on_both
async def test_issued_comes_before_landed() -> None:
    """`issued` returns while the layer's copy is held at a gate."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        log: list[object] = []

        async def wait() -> None:
            await load.issued()
            log.append(("issued", load.landed_layers))
            await load.issued(1)
            log.append(("issued 1", load.landed_layers))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await sim.run_until_idle()
            assert log == [("issued", 0), ("issued 1", 1)]
            gate.open()
            await sim.run_until_idle()
        await load


@on_both
async def test_riders_hear_of_issues_too() -> None:
    """`issued` of a joined load returns when the load that it shares is issued."""
    hooks = Hooks()
    gate = hooks.gate(layer=0)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        lead = await scheduler.load(host_pages=[0], device_pages=[0])
        joiner = await scheduler.load(host_pages=[0], device_pages=[0], join=True)
        issued = anyio.Event()

        async def wait() -> None:
            await joiner.issued()
            issued.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await sim.run_until_idle()
            assert issued.is_set()
            gate.open()
            await sim.run_until_idle()
        await lead
        await joiner


@on_both
async def test_cancelling_a_waiter_cancels_the_wait_only() -> None:
    """A cancelled wait leaves the transfer and its other waiters alone."""
    hooks = Hooks()
    gate = hooks.gate(layer=2)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [4])
        load = await scheduler.load(host_pages=[4], device_pages=[0])
        done: list[str] = []

        async def stay() -> None:
            await load
            done.append("stayed")

        async def wait_cancelled(scope: anyio.CancelScope) -> None:
            with scope:
                await load.layer(2)
                done.append("never")

        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(stay)
            group.start_soon(wait_cancelled, scope)
            await sim.run_until_idle()
            scope.cancel()
            await sim.run_until_idle()
            assert done == []
            assert not load.done
            gate.open()
            await sim.run_until_idle()
        assert done == ["stayed"]
        assert contents(device, [0]) == before


@on_both
@pytest.mark.parametrize("layer", [-1, 4, 1 << 40])
async def test_layer_out_of_range_is_refused(layer: int) -> None:
    """A layer that the model does not have raises in every call that takes one."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        for call in (load.fence, load.wait_layer, load.wait_issued, load.layer_written):
            with pytest.raises(offload.RequestError, match=r"layer .* is out of range"):
                call(layer)
        for wait in (load.layer, load.issued):
            with pytest.raises(offload.RequestError, match=r"layer .* is out of range"):
                await wait(layer)
        await sim.run_until_idle()


@on_both
async def test_waits_are_checkpoints() -> None:
    """`await transfer`, `layer` and `issued` let other tasks run even when nothing is to wait for."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.run_until_idle()

        async def whole() -> None:
            await load

        async def layer() -> None:
            await load.layer(0)

        for wait in (whole, layer, load.issued, load.source_reusable):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await wait()
            assert scope.cancelled_caught


@on_both
async def test_source_reusable_waits_for_the_last_read() -> None:
    """`source_reusable` returns when no copy can read the source any more, after a cancel too."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        free = anyio.Event()

        async def wait() -> None:
            await load.source_reusable()
            free.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await sim.run_until_idle()
            load.cancel()
            await sim.run_until_idle()
            assert load.done
            assert state(load) == "draining"
            assert not free.is_set()
            gate.open()
            await sim.run_until_idle()
            assert free.is_set()
            assert state(load) == "cancelled"


@on_both
async def test_fence_orders_compute_after_the_layer() -> None:
    """What a fenced compute stream runs next sees the layer's bytes, while the host goes on."""
    hooks = Hooks()
    gate = hooks.gate(layer=2)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [6], [2])
        load = await scheduler.load(host_pages=[6], device_pages=[1])
        await sim.run_until_idle()
        assert load.landed_layers == 2
        load.fence(2)
        seen: list[list[bytes]] = []
        sim.compute(1e-6, lambda: seen.append(contents(device, [1], [2])), reads=[(device, 2, [1])])
        await sim.run_until_idle()
        assert seen == []
        gate.open()
        await sim.run_until_idle()
        assert seen == [before]


@on_both
async def test_fence_on_the_loop_names_issued() -> None:
    """On the loop's own thread a fence of a layer that is not issued raises and names `issued`."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(offload.RequestError, match="issued"):
            load.fence(3)
        await sim.run_until_idle()
        load.fence(3)


@on_both
async def test_repr_tells_direction_progress_and_state() -> None:
    """A transfer's repr says what it is and how far it came."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        await sim.advance_to_layer(1)
        assert repr(load) == f"<Transfer {load.id} load 1/4 layers, issued>"
        await sim.run_until_idle()


@on_both
async def test_layer_names_work_where_layers_do() -> None:
    """Every call that takes a layer takes its name, and an unknown one is refused with a hint."""
    spec = offload.PoolSpec.mha(
        num_layers=2, page_size=2, num_kv_heads=1, head_dim=2, layer_names=["first", "second"]
    )
    async with sim_scheduler(spec=spec) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(offload.UnknownNameError, match="did you mean 'second'"):
            await load.layer("secnd")
        await sim.run_until_idle()
        await load.layer("second")
        load.wait_layer("first")
        load.fence("second")
