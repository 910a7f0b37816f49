"""Streaming backups: each layer goes when it is written, and nobody waits for the forward but who must."""

from __future__ import annotations

import itertools
import random

import anyio
import anyio.to_thread
import pytest

import offload
from offload.testing import Hooks
from tests.sched import contents, on_both, overwrite, sim_scheduler, state, threads_scheduler
from tests.test_cancel import outcome


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
@on_both
async def test_layers_go_when_they_are_written_in_any_order(order: tuple[int, ...]) -> None:
    """A layer is copied as soon as it is written, whatever the order, and the bytes are exact."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before, old = contents(device, [1]), contents(host, [5])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        written: set[int] = set()
        for layer in order:
            await sim.run_until_idle()
            assert not backup.done
            for each in range(4):
                expected = before if each in written else old
                assert contents(host, [5], [each]) == [expected[each]]
            backup.layer_written(layer)
            written.add(layer)
            await backup_layer(sim, backup, layer)
        await backup
        assert contents(host, [5]) == before


async def backup_layer(sim: object, backup: offload.Transfer, layer: int) -> None:
    """Let virtual time pass until a layer has landed."""
    async with anyio.create_task_group() as group:
        group.start_soon(backup.layer, layer)
        await sim.run_until_idle()  # type: ignore[attr-defined]


@on_both
async def test_a_layer_is_read_when_compute_has_written_it() -> None:
    """`layer_written` records the compute stream: what is queued there before it is in the backup."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        for layer in range(4):
            sim.compute(1e-3, lambda: overwrite(device, [1], 7), writes=[(device, layer, [1])])
            backup.layer_written(layer)
        await sim.run_until_idle()
        await backup
        assert set(b"".join(contents(host, [5]))) == {7}


@on_both
async def test_layer_written_checks() -> None:
    """Twice, on another transfer, or on an unknown layer, `layer_written` raises RequestError."""
    async with sim_scheduler() as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        backup.layer_written(2)
        with pytest.raises(offload.RequestError, match=r"layer 2 .* once a layer") as caught:
            backup.layer_written(2)
        assert caught.value.value == 2
        with pytest.raises(offload.RequestError, match="out of range"):
            backup.layer_written(4)
        other = await scheduler.backup(device_pages=[2], host_pages=[6])
        with pytest.raises(offload.RequestError, match="not a streaming backup"):
            other.layer_written(0)
        for layer in (0, 1, 3):
            backup.layer_written(layer)
        await sim.run_until_idle()
        with pytest.raises(offload.RequestError, match="once a layer"):
            backup.layer_written(0)


@on_both
async def test_an_empty_streaming_backup_takes_its_layers() -> None:
    """A streaming backup of no pages is done at once, and a forward may still say what it wrote."""
    async with sim_scheduler() as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[], host_pages=[], streaming=True)
        assert backup.done
        for layer in range(4):
            backup.layer_written(layer)
        await sim.run_until_idle()
        await backup


@on_both
async def test_an_unwritten_backup_holds_up_nobody() -> None:
    """Backups and loads of other pages pass a streaming backup that waits for its forward."""
    async with sim_scheduler() as (scheduler, sim, *_):
        waiting = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        others = [
            await scheduler.backup(device_pages=[1], host_pages=[6]),
            await scheduler.load(host_pages=[7], device_pages=[2]),
        ]
        await sim.run_until_idle()
        assert [state(t) for t in (waiting, *others)] == ["queued", "done", "done"]
        waiting.cancel()


@on_both
async def test_a_load_into_the_page_before_the_layer_is_written_goes_first() -> None:
    """What was loaded into the device page before the layer is written, is in the backup."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [7])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        load = await scheduler.load(host_pages=[7], device_pages=[1])
        for layer in range(4):
            backup.layer_written(layer)
        await sim.run_until_idle()
        assert (backup.done, load.done) == (True, True)
        assert contents(host, [5]) == before
        assert contents(device, [1]) == before


@on_both
async def test_a_load_into_the_page_after_the_layer_is_written_goes_behind() -> None:
    """A page that is backed up while it is given away: the backup has the old bytes, layer by layer."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        old, new = contents(device, [1]), contents(host, [7])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        for layer in range(4):
            backup.layer_written(layer)
        load = await scheduler.load(host_pages=[7], device_pages=[1])
        await sim.run_until_idle()
        assert (backup.done, load.done) == (True, True)
        assert contents(host, [5]) == old
        assert contents(device, [1]) == new


@on_both
async def test_loads_into_the_page_before_and_after_never_dead_lock() -> None:
    """A load before and one behind the written layers both end, in that order."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        first, last = contents(host, [7]), contents(host, [8])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        await scheduler.load(host_pages=[7], device_pages=[1])
        backup.layer_written(3)
        backup.layer_written(0)
        await sim.run_until_idle()
        await scheduler.load(host_pages=[8], device_pages=[1])
        backup.layer_written(1)
        backup.layer_written(2)
        await sim.run_until_idle()
        assert backup.done
        layers = [first[0], last[1], last[2], first[3]]
        assert contents(host, [5]) == layers
        assert contents(device, [1]) == last


@on_both
async def test_a_load_from_its_host_pages_follows_layer_by_layer() -> None:
    """A load of what is being backed up goes as far as the layers have landed."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        before = contents(device, [1])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        load = await scheduler.load(host_pages=[5], device_pages=[2])
        for layer in range(4):
            await sim.run_until_idle()
            assert load.landed_layers == layer
            backup.layer_written(layer)
        await sim.run_until_idle()
        assert contents(device, [2]) == before


@on_both
async def test_a_wait_that_could_never_end_is_refused() -> None:
    """A load from the backup's host pages into its device pages raises at submit, until all is written."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        before = contents(device, [1])
        backup = await scheduler.backup(device_pages=[1, 2], host_pages=[5, 6], streaming=True)
        for layer in range(4):
            with pytest.raises(offload.RequestError, match="neither could go first"):
                await scheduler.load(host_pages=[5], device_pages=[2])
            backup.layer_written(layer)
        assert scheduler.statistics().load.submitted == 0
        await scheduler.load(host_pages=[5], device_pages=[2])
        await sim.run_until_idle()
        assert contents(device, [2]) == before


@on_both
async def test_two_streams_whose_loads_cross_are_refused() -> None:
    """Two sessions that swap places through streaming backups would wait for each other: refused."""
    async with sim_scheduler() as (scheduler, sim, *_):
        one = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        two = await scheduler.backup(device_pages=[2], host_pages=[6], streaming=True)
        load = await scheduler.load(host_pages=[5], device_pages=[2])
        with pytest.raises(offload.RequestError, match="neither could go first"):
            await scheduler.load(host_pages=[6], device_pages=[1])
        for layer in range(4):
            one.layer_written(layer)
            two.layer_written(layer)
        await sim.run_until_idle()
        assert [state(t) for t in (one, two, load)] == ["done"] * 3


@pytest.mark.parametrize("written", range(5))
@on_both
async def test_a_forward_that_stops_half_way_cancels_the_rest(written: int) -> None:
    """Cancelled with some layers written, those that landed stay; late news from the forward is ignored."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before, old = contents(device, [1]), contents(host, [5])
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        for layer in range(written):
            backup.layer_written(layer)
        await sim.run_until_idle()
        backup.cancel()
        end = "done" if written == 4 else "cancelled"
        for layer in range(written, 4):
            backup.layer_written(layer)
        await sim.run_until_idle()
        assert await outcome(backup) == end
        for layer in range(4):
            assert await outcome(backup.layer(layer)) == ("done" if layer < written else end)
        assert contents(host, [5]) == before[:written] + old[written:]
        assert not scheduler.busy(device_pages=[1], host_pages=[5])


@pytest.mark.parametrize("bad", range(4))
@on_both
async def test_a_layer_that_fails_fails_the_backup(bad: int) -> None:
    """A failing layer settles the backup with its number; layers that had landed stay usable."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=bad)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        for layer in range(4):
            backup.layer_written(layer)
            await sim.run_until_idle()
        failed = f"failed at {bad}: OSError('no')"
        assert await outcome(backup) == failed
        ends = [await outcome(backup.layer(layer)) for layer in range(4)]
        assert ends == ["done" if layer < bad else failed for layer in range(4)]


@on_both
async def test_leaving_cancels_what_the_forward_has_not_written() -> None:
    """Closing, drained or not, does not wait for a forward that may never come."""
    for drain in (False, True):
        async with sim_scheduler() as (scheduler, sim, *_):
            backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
            backup.layer_written(0)
            await sim.run_until_idle()
            await scheduler.aclose(drain=drain)
            assert state(backup) == "cancelled"
            await backup.layer(0)


@on_both
async def test_layers_written_from_a_thread() -> None:
    """The forward may run on any thread, and finds its layers on the host afterwards."""
    async with threads_scheduler() as (scheduler, device, host):
        before = contents(device, [1, 2])
        backup = await scheduler.backup(device_pages=[1, 2], host_pages=[5, 6], streaming=True)

        def forward() -> None:
            for layer in (0, 2, 1, 3):
                backup.layer_written(layer)
                backup.wait_layer(layer)

        await anyio.to_thread.run_sync(forward)
        await backup
        assert contents(host, [5, 6]) == before


@pytest.mark.parametrize("seed", range(10))
@on_both
async def test_many_streams_at_once(seed: int) -> None:
    """Streaming backups of shared device pages, written in random orders, all end with exact bytes."""
    draw = random.Random(seed)
    async with sim_scheduler(jitter=0.5, seed=seed, ahead=draw.choice((1, 3))) as bed:
        before = {page: contents(bed.device, [page]) for page in range(8)}
        pages = [draw.randrange(8) for _ in range(10)]
        backups = [
            await bed.scheduler.backup(device_pages=[page], host_pages=[n], streaming=True)
            for n, page in enumerate(pages)
        ]
        todo = [(backup, layer) for backup in backups for layer in range(4)]
        draw.shuffle(todo)
        for backup, layer in todo:
            backup.layer_written(layer)
            if draw.random() < 0.3:
                await bed.sim.advance(draw.random() * 1e-4)
        await bed.sim.run_until_idle()
        assert all(backup.done for backup in backups)
        for n, page in enumerate(pages):
            assert contents(bed.host, [n]) == before[page]
