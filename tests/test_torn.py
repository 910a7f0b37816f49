"""Half-written host pages, as callers see them: what is loaded from them fails and says why."""

from __future__ import annotations

import pytest

import offload
from offload.testing import Hooks
from tests.sched import Bed, contents, on_both, sim_scheduler, state
from tests.test_cancel import outcome


async def half_a_backup(bed: Bed, how: str) -> offload.Transfer:
    """Stream two layers of device page 0 into host page 5, and end it."""
    backup = await bed.scheduler.backup(device_pages=[0], host_pages=[5], streaming=True)
    for layer in range(2):
        backup.layer_written(layer)
    await bed.sim.run_until_idle()
    if how == "cancel":
        backup.cancel()
    return backup


@pytest.mark.parametrize("join", [False, True])
@on_both
async def test_a_load_behind_half_a_streaming_backup_fails(join: bool) -> None:
    """Submitted before the forward gave up, a load keeps the layers that had landed and fails for the rest."""
    async with sim_scheduler() as bed:
        backup = await bed.scheduler.backup(device_pages=[0], host_pages=[5], streaming=True)
        load = await bed.scheduler.load(host_pages=[5], device_pages=[1])
        joiner = await bed.scheduler.load(host_pages=[5], device_pages=[1], join=join)
        for layer in range(2):
            backup.layer_written(layer)
        await bed.sim.run_until_idle()
        expected = contents(bed.device, [0], [0, 1])
        await load.layer(1)
        backup.cancel()
        await bed.sim.run_until_idle()
        for each in (load, joiner):
            with pytest.raises(offload.TransferFailed) as caught:
                await each
            assert str(caught.value.__cause__) == (
                f"it was to read what comes from backup {backup.id}, which was cancelled when 2 of 4 "
                "layers had landed."
            )
            assert state(each) == "failed"
        await load.layer(1)
        assert contents(bed.device, [1], [0, 1]) == expected
        assert bed.scheduler.statistics().load.failed == 2


@on_both
async def test_later_loads_fail_at_once_until_the_page_is_whole() -> None:
    """A load of a torn page fails as any load does, awaited and in threads, and a fresh backup mends it."""
    async with sim_scheduler() as bed:
        scheduler, sim, device, host = bed
        torn = await half_a_backup(bed, "cancel")
        load = await scheduler.load(
            host_pages=[5, 6], device_pages=[1, 2], deadline=scheduler.now() + 1
        )
        assert load.done
        assert not scheduler.busy(device_pages=[1, 2], host_pages=[5, 6])
        with pytest.raises(offload.TransferFailed) as caught:
            load.result()
        assert str(caught.value) == (
            f"load {load.id} failed: host page 5 holds part of backup {torn.id}, which was cancelled when "
            "2 of 4 layers had landed. Back that page up again, or free it. Nothing was copied."
        )
        with pytest.raises(
            offload.TransferCancelled, match="host pages hold part of it, and cannot be"
        ):
            await torn
        again = await scheduler.backup(device_pages=[3], host_pages=[5])
        fine = await scheduler.load(host_pages=[5], device_pages=[1])
        await sim.run_until_idle()
        assert [state(each) for each in (again, fine)] == ["done", "done"]
        assert contents(device, [1]) == contents(device, [3]) == contents(host, [5])


@pytest.mark.parametrize("how", ["alloc", "mend"])
@on_both
async def test_a_page_with_a_new_owner_may_be_loaded(how: str) -> None:
    """Who takes a page from the allocator, or says that he has written it, answers for what it holds."""
    async with sim_scheduler() as bed:
        scheduler, sim, device, host = bed
        pages = host.pages.alloc(16)
        await half_a_backup(bed, "cancel")
        if how == "alloc":
            host.pages.free(pages)
            host.pages.alloc(16)
        else:
            host.pages.mend([5])
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        await sim.run_until_idle()
        await load
        assert contents(device, [1]) == contents(host, [5])


@pytest.mark.parametrize("layer", range(4))
@on_both
async def test_a_load_behind_a_backup_that_fails_fails_with_it(layer: int) -> None:
    """A backup that breaks at a layer takes the load along that was submitted to read it."""
    hooks = Hooks()
    hooks.fail(OSError("no"), stream="backup", layer=layer, torn=True)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[0], host_pages=[5])
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        onward = await scheduler.backup(device_pages=[1], host_pages=[6])
        await sim.run_until_idle()
        assert [state(each) for each in (backup, load, onward)] == ["failed"] * 3
        for number in range(4):
            ended = await outcome(load.layer(number))
            assert ended == "done" if number < layer else "OSError('no')" in ended
        numbers = scheduler.statistics()
        assert (numbers.load.failed, numbers.backup.failed) == (1, 2)


@on_both
async def test_torn_pages_stay_torn_for_the_next_scheduler() -> None:
    """What one scheduler left half written is known to the next one on the same pools."""
    async with sim_scheduler() as bed:
        await half_a_backup(bed, "leave")
        await bed.scheduler.aclose()
        sim = offload.testing.SimDriver()
        async with offload.open_scheduler(bed.device, bed.host, driver=sim) as scheduler:
            load = await scheduler.load(host_pages=[5], device_pages=[1])
            assert "host page 5 holds part" in await outcome(load)
