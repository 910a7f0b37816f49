"""Joining: several loads of the same pages share one copy, each with a life of its own."""

from __future__ import annotations

import anyio
import pytest
import torch

import offload
from offload.testing import Hooks
from tests.sched import LOOPS, Bed, contents, on_both, on_loops, sim_scheduler, state
from tests.test_cancel import outcome


async def lead_and_joiners(bed: Bed, joiners: int = 1) -> list[offload.Transfer]:
    """Submit a load and others that join it."""
    return [
        await bed.scheduler.load(host_pages=[3, 4], device_pages=[0, 1], join=True)
        for _ in range(1 + joiners)
    ]


@pytest.mark.parametrize("landed", range(4))
@on_both
async def test_joined_loads_move_the_bytes_once(landed: int) -> None:
    """Loads that join a running one, queued or half way, settle with it, and the bytes move once."""
    async with sim_scheduler() as bed:
        before = contents(bed.host, [3, 4])
        lead = await bed.scheduler.load(host_pages=[3, 4], device_pages=[0, 1])
        if landed:
            await bed.sim.advance_to_layer(landed)
        joiners = (await lead_and_joiners(bed, 2))[1:]
        for joiner in joiners:
            assert joiner.landed_layers == landed
            await_layers = [await outcome(joiner.layer(layer)) for layer in range(landed)]
            assert await_layers == ["done"] * landed
        await bed.sim.run_until_idle()
        assert [await outcome(each) for each in (lead, *joiners)] == ["done"] * 3
        numbers = bed.scheduler.statistics().load
        assert numbers.nbytes == lead.nbytes
        assert (numbers.submitted, numbers.settled) == (4, 4)
        assert contents(bed.device, [0, 1]) == before


@on_both
async def test_join_is_off_by_default() -> None:
    """Without `join` the same pages are copied again, in order."""
    async with sim_scheduler() as (scheduler, sim, *_):
        one = await scheduler.load(host_pages=[3], device_pages=[0])
        other = await scheduler.load(host_pages=[3], device_pages=[0])
        await sim.run_until_idle()
        assert scheduler.statistics().load.nbytes == one.nbytes + other.nbytes


@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("landed", [0, 2])
@on_both
async def test_each_is_cancelled_alone(who: int, landed: int) -> None:
    """Cancelling one, the first or a later one, leaves the copy to the others."""
    async with sim_scheduler() as bed:
        before = contents(bed.host, [3, 4])
        all_of_them = await lead_and_joiners(bed, 2)
        if landed:
            await bed.sim.advance_to_layer(landed)
        all_of_them[who].cancel()
        assert all_of_them[who].done
        for layer in range(4):
            expected = "done" if layer < landed else "cancelled"
            assert await outcome(all_of_them[who].layer(layer)) == expected
        await bed.sim.run_until_idle()
        expected_all = ["done"] * 3
        expected_all[who] = "cancelled"
        assert [await outcome(each) for each in all_of_them] == expected_all
        assert contents(bed.device, [0, 1]) == before
        numbers = bed.scheduler.statistics().load
        assert (numbers.settled, numbers.cancelled) == (3, 1)


@on_both
async def test_the_copy_is_cancelled_when_the_last_one_leaves() -> None:
    """When all have left, the rest of the copy is not made."""
    hooks = Hooks()
    async with sim_scheduler(hooks=hooks) as bed:
        all_of_them = await lead_and_joiners(bed, 2)
        await bed.sim.advance_to_layer(1)
        for each in (all_of_them[1], all_of_them[0], all_of_them[2]):
            each.cancel()
        await bed.sim.run_until_idle()
        assert [state(each) for each in all_of_them] == ["cancelled"] * 3
        assert len(hooks.ops) <= 2
        assert bed.scheduler.statistics().load.cancelled == 3


@on_both
async def test_a_failure_fails_all() -> None:
    """When the copy fails, everybody who shares it hears the cause."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=2)
    async with sim_scheduler(hooks=hooks) as bed:
        all_of_them = await lead_and_joiners(bed, 2)
        await bed.sim.run_until_idle()
        ends = [await outcome(each) for each in all_of_them]
        assert ends == ["failed at 2: OSError('no')"] * 3
        assert bed.scheduler.statistics().load.failed == 3


@on_both
async def test_each_keeps_its_own_deadline() -> None:
    """The deadline of one fails that one only, whichever it is, and the copy goes on for the others."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        deadlines = [1.0, None, 2.0]
        loads = [
            await scheduler.load(host_pages=[3], device_pages=[0], join=True, deadline=deadline)
            for deadline in deadlines
        ]
        await sim.advance(1.5)
        assert [load.done for load in loads] == [True, False, False]
        await sim.advance(1.0)
        assert [load.done for load in loads] == [True, False, True]
        gate.open()
        await sim.run_until_idle()
        ends = [await outcome(load) for load in loads]
        assert ends[1] == "done"
        for end in (ends[0], ends[2]):
            assert end.startswith("failed at None: TimeoutError")
        numbers = scheduler.statistics().load
        assert (numbers.submitted, numbers.settled, numbers.failed) == (3, 3, 2)


DISTURBED = {
    "other order": {"host_pages": [4, 3], "device_pages": [1, 0]},
    "fewer pages": {"host_pages": [3], "device_pages": [0]},
    "other source": {"host_pages": [3, 5], "device_pages": [0, 1]},
    "other after": {"host_pages": [3, 4], "device_pages": [0, 1], "after": ()},
    "other io backend": {"host_pages": [3, 4], "device_pages": [0, 1], "io_backend": "cpu"},
}


@pytest.mark.parametrize("request_", DISTURBED.values(), ids=DISTURBED)
@on_both
async def test_what_differs_is_copied_again(request_: dict[str, object]) -> None:
    """A load that is not the very same one does not join."""
    async with sim_scheduler(layout="page_first_direct") as (scheduler, sim, *_):
        one = await scheduler.load(host_pages=[3, 4], device_pages=[0, 1], io_backend="direct")
        request_ = {"io_backend": "direct", **request_}
        other = await scheduler.load(join=True, **request_)  # type: ignore[arg-type]
        await sim.run_until_idle()
        assert scheduler.statistics().load.nbytes == one.nbytes + other.nbytes


@pytest.mark.parametrize("between", ["backup over its source", "load over its target"])
@on_both
async def test_a_write_in_between_is_not_skipped(between: str) -> None:
    """When somebody was ordered to write the pages since, a load does not join and sees what they wrote."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        await scheduler.load(host_pages=[3], device_pages=[0])
        if between == "backup over its source":
            expected = contents(device, [5])
            await scheduler.backup(device_pages=[5], host_pages=[3])
        else:
            expected = contents(host, [3])
            await scheduler.load(host_pages=[7], device_pages=[0])
        await scheduler.load(host_pages=[3], device_pages=[0], join=True)
        await sim.run_until_idle()
        assert contents(device, [0]) == expected


@pytest.mark.parametrize("landed", [0, 2])
@on_both
async def test_a_load_whose_lead_was_cancelled_is_joined_while_it_is_copied(landed: int) -> None:
    """As long as somebody shares a copy, others may: whoever asked for it first."""
    async with sim_scheduler() as bed:
        before = contents(bed.host, [3, 4])
        lead, joiner = await lead_and_joiners(bed)
        lead.cancel()
        if landed:
            await bed.sim.advance_to_layer(landed)
        (late,) = await lead_and_joiners(bed, 0)
        assert (late.id, late.landed_layers) == (joiner.id, landed)
        joiner.cancel()
        await bed.sim.run_until_idle()
        assert [state(each) for each in (lead, joiner, late)] == ["cancelled", "cancelled", "done"]
        assert bed.scheduler.statistics().load.nbytes == lead.nbytes
        assert contents(bed.device, [0, 1]) == before


@on_both
async def test_a_load_that_nobody_wants_any_more_is_not_joined() -> None:
    """When all have left, the next load of the same pages copies again."""
    async with sim_scheduler() as bed:
        before = contents(bed.host, [3, 4])
        both = await lead_and_joiners(bed)
        await bed.sim.advance_to_layer(1)
        for each in both:
            each.cancel()
        (late,) = await lead_and_joiners(bed, 0)
        assert late.id != both[0].id
        await bed.sim.run_until_idle()
        assert state(late) == "done"
        assert contents(bed.device, [0, 1]) == before


@on_both
async def test_a_load_that_has_ended_is_not_joined() -> None:
    """A settled load is over: the next one copies again."""
    async with sim_scheduler() as (scheduler, sim, *_):
        one = await scheduler.load(host_pages=[3], device_pages=[0], join=True)
        await sim.run_until_idle()
        other = await scheduler.load(host_pages=[3], device_pages=[0], join=True)
        assert not other.done
        await sim.run_until_idle()
        assert scheduler.statistics().load.nbytes == one.nbytes + other.nbytes


@on_both
async def test_compute_queued_between_two_loads_keeps_them_apart() -> None:
    """A load does not share one that compute has written the same pages behind."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        lead = await scheduler.load(host_pages=[1], device_pages=[1])
        view = device.view("k", 0)

        def wipe() -> None:
            view[1].zero_()

        sim.compute(1e-3, wipe)
        again = await scheduler.load(host_pages=[1], device_pages=[1], join=True)
        await sim.run_until_idle()
        await lead
        await again
        assert torch.equal(view[1], host.view("k", 0)[1])


NARROW = offload.Limits(max_inflight_requests=1)
"""One request is in the air, and the others are queued."""


async def order_of(bed: Bed, loads: dict[str, offload.Transfer]) -> list[str]:
    """Return the names of transfers in the order in which they settle."""
    order: list[str] = []

    async def wait(name: str, load: offload.Transfer) -> None:
        await load
        order.append(name)

    async with anyio.create_task_group() as tasks:
        for name, load in loads.items():
            tasks.start_soon(wait, name, load)
        await bed.sim.run_until_idle()
    return order


@pytest.mark.parametrize("urgency", [{"priority": 5}, {"deadline": 1.0}], ids=str)
@on_loops(*LOOPS)
async def test_a_queued_load_is_as_urgent_as_the_most_urgent_who_shares_it(
    urgency: dict[str, float],
) -> None:
    """Joining a load that is queued far behind takes it to the front: nobody waits longer for having joined."""
    async with sim_scheduler(bandwidth=1e6, limits=NARROW) as bed:
        submit = bed.scheduler.load
        loads = {
            f"ahead {page}": await submit(host_pages=[page], device_pages=[page])
            for page in range(6)
        }
        loads["lead"] = await submit(host_pages=[7], device_pages=[7], priority=-5)
        loads["patient"] = await submit(host_pages=[7], device_pages=[7], priority=-9, join=True)
        loads["urgent"] = await submit(
            host_pages=[7],
            device_pages=[7],
            join=True,
            **urgency,  # type: ignore[arg-type]
        )
        assert loads["lead"].id == loads["patient"].id == loads["urgent"].id
        order = await order_of(bed, loads)
        assert set(order[:3]) == {"lead", "patient", "urgent"}
        assert order[3:] == [f"ahead {page}" for page in range(6)]


@on_both
async def test_a_load_in_the_air_overtakes_at_the_next_layer_when_one_more_urgent_joins() -> None:
    """Behind a batch that its stream carries already, too: from the next layer on it goes first."""
    async with sim_scheduler(bandwidth=1e6) as bed:
        big = await bed.scheduler.load(host_pages=[0, 1], device_pages=[0, 1])
        await bed.sim.advance_to_layer(1)
        lead = await bed.scheduler.load(host_pages=[7], device_pages=[7], priority=-5)
        await bed.sim.advance(0.0)
        urgent = await bed.scheduler.load(host_pages=[7], device_pages=[7], priority=5, join=True)
        assert urgent.id == lead.id
        assert await order_of(bed, {"big": big, "lead": lead, "urgent": urgent}) in (
            ["lead", "urgent", "big"],
            ["urgent", "lead", "big"],
        )


@on_both
async def test_who_joins_keeps_its_own_deadline_and_leaves_the_urgency() -> None:
    """When the one that was more urgent has left, the load that it joined stays in front and is done."""
    async with sim_scheduler(bandwidth=1e6, limits=NARROW) as bed:
        submit = bed.scheduler.load
        loads = {
            str(page): await submit(host_pages=[page], device_pages=[page]) for page in range(4)
        }
        loads["lead"] = await submit(host_pages=[7], device_pages=[7], priority=-5)
        urgent = await submit(host_pages=[7], device_pages=[7], deadline=1e-9, join=True)
        order = await order_of(bed, loads)
        assert (await outcome(urgent)).startswith("failed at None: TimeoutError")
        assert order.index("lead") <= 1


@on_both
async def test_joining_keeps_the_order_of_those_who_share_a_page() -> None:
    """An urgent joiner does not take its load past the one that it must follow."""
    async with sim_scheduler(bandwidth=1e6, limits=NARROW) as bed:
        submit = bed.scheduler.load
        before = contents(bed.host, [3, 7])
        loads = {"ahead": await submit(host_pages=[0], device_pages=[1])}
        loads["first"] = await submit(host_pages=[3], device_pages=[7], priority=-5)
        loads["lead"] = await submit(host_pages=[7], device_pages=[7], priority=-5)
        loads["urgent"] = await submit(host_pages=[7], device_pages=[7], priority=5, join=True)
        order = await order_of(bed, loads)
        assert order.index("first") < min(order.index("lead"), order.index("urgent"))
        assert contents(bed.device, [7]) == before[4:]
