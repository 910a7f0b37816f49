"""Submitting: what is checked, what becomes one batch, who goes first, and how pages are handed on."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
import torch

import offload
from offload.testing import Hooks, SimDriver
from tests import oracle
from tests.sched import (
    Bed,
    check_left,
    check_still_open,
    contents,
    on_both,
    on_loops,
    pools,
    run,
    sim_scheduler,
    state,
)

# Bytes ------------------------------------------------------------------------------------------------

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_both
async def test_round_trip_is_exact(layout: str) -> None:
    """Back up, clear, load elsewhere: the bytes are those of the oracle, and nothing else was touched."""
    async with sim_scheduler(layout=layout) as (scheduler, sim, device, host):
        expected_host = pools(layout=layout)[1]
        oracle.copy(device, expected_host, [(0, 9), (3, 2), (1, 10)], range(device.num_layers))
        await scheduler.backup(device_pages=[0, 3, 1], host_pages=[9, 2, 10])
        await sim.run_until_idle()
        assert oracle.same_bytes(host, expected_host)
        expected_device = pools(layout=layout)[0]
        oracle.copy(host, expected_device, [(10, 7), (9, 4)], range(device.num_layers))
        await scheduler.load(host_pages=[10, 9], device_pages=[7, 4])
        await sim.run_until_idle()
        assert oracle.same_bytes(device, expected_device)


@pytest.mark.parametrize(
    "pages",
    [[2, 5], (2, 5), range(2, 8, 3), np.array([2, 5], np.int32), np.array([2, 5], np.uint64),
     torch.tensor([2, 5]), torch.tensor([2, 5], dtype=torch.int32)],
    ids=lambda pages: type(pages).__name__ + str(getattr(pages, "dtype", "")),
)  # fmt: skip
@on_both
async def test_pages_come_in_many_forms(pages: object) -> None:
    """Lists, tuples, ranges, arrays and integer tensors name the same pages."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [2, 5])
        await scheduler.load(host_pages=pages, device_pages=pages)  # type: ignore[arg-type]
        await sim.run_until_idle()
        assert contents(device, [2, 5]) == before


@on_both
async def test_page_arguments_are_copied_at_submit() -> None:
    """Changing an array after submit changes nothing."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [2])
        here, there = np.array([2]), np.array([3])
        await scheduler.load(host_pages=here, device_pages=there)
        here[:], there[:] = 0, 0
        await sim.run_until_idle()
        assert contents(device, [3]) == before


@on_both
async def test_source_pages_may_repeat() -> None:
    """One host page can be loaded into several device pages by one request."""
    async with sim_scheduler() as (scheduler, sim, device, host):
        before = contents(host, [2])
        await scheduler.load(host_pages=[2, 2, 2], device_pages=[0, 4, 1])
        await sim.run_until_idle()
        for page in (0, 4, 1):
            assert contents(device, [page]) == before


@on_both
async def test_an_empty_request_completes_at_once() -> None:
    """A request without pages is done in the caller's frame, moves nothing and makes no batch."""
    async with sim_scheduler() as (scheduler, sim, *_):
        for transfer in (
            scheduler.load_nowait(host_pages=[], device_pages=[]),
            scheduler.backup_nowait(host_pages=[], device_pages=[]),
            scheduler.backup_nowait(host_pages=[], device_pages=[], streaming=True),
            scheduler.load_nowait(host_pages=[], device_pages=[], join=True),
        ):
            assert (transfer.done, transfer.nbytes, state(transfer)) == (True, 0, "done")
            await transfer
            await transfer.layer(3)
            await transfer.issued()
            await transfer.source_reusable()
        assert scheduler.statistics().batches == 0
        assert sim.now() == 0.0


# Checks -----------------------------------------------------------------------------------------------

BAD = {
    "negative page": (
        {"host_pages": [0, -1], "device_pages": [0, 1]},
        "host page -1 at position 1",
    ),
    "page beyond": ({"host_pages": [0], "device_pages": [8]}, "device page 8 at position 0"),
    "page beyond int64": ({"host_pages": [1 << 70], "device_pages": [0]}, "out of range"),
    "page that wraps": ({"host_pages": [1 << 32], "device_pages": [0]}, "out of range"),
    "lengths": ({"host_pages": [0, 1], "device_pages": [0]}, "host_pages has 2"),
    "floats": ({"host_pages": [0.0], "device_pages": [0]}, "integers"),
    "booleans": ({"host_pages": [True], "device_pages": [0]}, "integers"),
    "two dimensions": ({"host_pages": [[0]], "device_pages": [0]}, "dimensions"),
    "deadline in the past": (
        {"host_pages": [0], "device_pages": [0], "deadline": -1.0},
        "not after",
    ),
    "deadline now": ({"host_pages": [0], "device_pages": [0], "deadline": 0.0}, "not after"),
    "deadline nan": (
        {"host_pages": [0], "device_pages": [0], "deadline": float("nan")},
        "not after",
    ),
    "after a word": ({"host_pages": [0], "device_pages": [0], "after": "forward"}, "'compute'"),
    "after a number": ({"host_pages": [0], "device_pages": [0], "after": 3}, "neither an event"),
}
CALLS = ["load", "backup", "load_nowait", "backup_nowait"]


async def call(scheduler: offload.Scheduler, name: str, **arguments: object) -> offload.Transfer:
    """Call one of the four ways to submit."""
    made = getattr(scheduler, name)(**arguments)
    return made if isinstance(made, offload.Transfer) else await made


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
@on_both
async def test_bad_requests_raise_before_anything_is_queued(
    name: str, arguments: dict[str, object], words: str
) -> None:
    """Every fault raises RequestError inside the call; nothing is queued and no byte moves."""
    async with sim_scheduler() as bed:
        with pytest.raises(offload.RequestError, match=words):
            await call(bed.scheduler, name, **arguments)
        await check_untouched(bed)


async def check_untouched(bed: Bed) -> None:
    numbers = bed.scheduler.statistics()
    assert (numbers.load.submitted, numbers.backup.submitted, numbers.queued_requests) == (0, 0, 0)
    await bed.sim.run_until_idle()
    device, host = pools()
    assert oracle.same_bytes(bed.device, device)
    assert oracle.same_bytes(bed.host, host)


@pytest.mark.parametrize("name", CALLS)
@on_both
async def test_destinations_are_written_once(name: str) -> None:
    """A destination page that appears twice is refused, a source page is not."""
    twice, apart = [1, 2, 1], [3, 4, 5]
    load = name.startswith("load")
    side, other = ("device_pages", "host_pages") if load else ("host_pages", "device_pages")
    async with sim_scheduler() as bed:
        with pytest.raises(offload.RequestError, match="page 1 twice") as caught:
            await call(bed.scheduler, name, **{side: twice, other: apart})
        assert (caught.value.value, caught.value.position) == (1, 2)
        many = [*range(8), 0] + ([*range(7)] if load else [])
        with pytest.raises(offload.RequestError, match="page 0 twice"):
            await call(bed.scheduler, name, **{side: many, other: [0] * len(many)})
        await check_untouched(bed)
        await call(bed.scheduler, name, **{side: apart, other: twice})
        await bed.sim.run_until_idle()


@pytest.mark.parametrize("name", CALLS)
@on_both
async def test_unknown_and_unsupported_io_backends_raise_at_submit(name: str) -> None:
    """An io backend that is misspelt or cannot copy the pair raises where it is given."""
    async with sim_scheduler(layout="page_head") as bed:
        with pytest.raises(offload.UnknownNameError, match="did you mean 'direct'"):
            await call(bed.scheduler, name, host_pages=[0], device_pages=[0], io_backend="drect")
        with pytest.raises(offload.UnsupportedPairError) as caught:
            await call(bed.scheduler, name, host_pages=[0], device_pages=[0], io_backend="direct")
        assert caught.value.layout == "page_head"
        assert caught.value.io_backends
        assert bed.scheduler.statistics().queued_requests == 0


def test_opening_checks_the_pair_and_the_names() -> None:
    """A default that can copy in no direction, or that nobody knows, raises from `open_scheduler`."""
    device, host = pools(layout="page_head")
    with pytest.raises(offload.UnsupportedPairError):
        offload.open_scheduler(device, host, io_backend="direct")
    with pytest.raises(offload.UnknownNameError, match="did you mean 'cpu'"):
        offload.open_scheduler(device, host, io_backend="cpuu")
    with pytest.raises(offload.UnknownNameError, match="did you mean 'threads'"):
        offload.open_scheduler(device, host, driver="thread")
    with pytest.raises(offload.RequestError, match="host"):
        offload.open_scheduler(device)


@on_both
async def test_io_backend_of_one_request_overrides_the_default() -> None:
    """Requests of different io backends are copied, each by its own, and never share a batch."""
    async with sim_scheduler(layout="page_first_direct") as (scheduler, sim, device, host):
        before = contents(host, [0, 1])
        await scheduler.load(host_pages=[0], device_pages=[0], io_backend="direct")
        await scheduler.load(host_pages=[1], device_pages=[1], io_backend="cpu")
        await sim.run_until_idle()
        assert contents(device, [0, 1]) == before
        assert scheduler.statistics().batches == 2


def test_a_pool_has_one_scheduler_at_a_time() -> None:
    """A second scheduler on the pools of an open one is refused, and allowed after it closed."""

    async def body() -> None:
        device, host = pools()
        async with offload.open_scheduler(device, host, driver=SimDriver()):
            with pytest.raises(offload.RequestError, match="belongs to a scheduler that is open"):
                async with offload.open_scheduler(device, host, driver=SimDriver()):
                    pass
            other = offload.HostPool.like(device, num_pages=3)
            with pytest.raises(offload.RequestError, match="belongs to a scheduler that is open"):
                async with offload.open_scheduler(device, other, driver=SimDriver()):
                    pass
            assert other.pages.table.owner is None
        async with offload.open_scheduler(device, host, driver=SimDriver()):
            pass

    run(body)


@pytest.mark.parametrize("use", ["load", "load_nowait", "aclose", "from_thread"])
@on_both
async def test_a_scheduler_that_was_not_entered_says_so(use: str) -> None:
    """Used without `async with`, a scheduler names what is missing."""
    device, host = pools()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver())

    async def used() -> None:
        if use == "aclose":
            await scheduler.aclose()
        elif use == "from_thread":
            scheduler.from_thread.load(host_pages=[0], device_pages=[0])
        else:
            await call(scheduler, use, host_pages=[0], device_pages=[0])

    with pytest.raises(offload.RequestError, match="async with open_scheduler"):
        await used()
    assert scheduler.statistics().queued_requests == 0
    assert not scheduler.busy(device_pages=[0])
    assert device.pages.table.owner is None


@on_both
async def test_a_scheduler_is_entered_once() -> None:
    """Entered again, an open scheduler keeps its pools and its tracer, and one that was left takes none."""
    device, host = pools()
    tracer = offload.Tracer()
    scheduler = offload.open_scheduler(device, host, driver=SimDriver(), tracer=tracer)
    async with scheduler:
        with pytest.raises(offload.RequestError, match="entered once"):
            await scheduler.__aenter__()
        await check_still_open(scheduler, device, host)
        with pytest.raises(offload.RequestError, match="this Tracer records"):
            await offload.open_scheduler(*pools(), tracer=tracer).__aenter__()
    with pytest.raises(offload.RequestError, match="entered once"):
        async with scheduler:
            pass
    check_left(scheduler, device, host)


@on_both
async def test_a_scheduler_that_was_refused_its_pools_may_be_entered_later() -> None:
    """Refused, because another one has its pools or its tracer, a scheduler opens when those are free."""
    device, host = pools()
    tracer = offload.Tracer()
    one, two = (
        offload.open_scheduler(device, host, driver=SimDriver(), tracer=tracer) for _ in range(2)
    )
    other = offload.open_scheduler(device, host, driver=SimDriver())
    async with one:
        for refused in (two, other):
            with pytest.raises(offload.RequestError, match="that is open"):
                await refused.__aenter__()
            await check_still_open(one, device, host)
    for each in (two, other):
        async with each:
            await check_still_open(each, device, host)
        check_left(each, device, host)


# Batches -------------------------------------------------------------------------------------------------


@on_loops("asyncio", "trio", "uvloop")
async def test_a_plain_loop_of_awaits_makes_one_batch() -> None:
    """`await load` does not yield when it is admitted at once: a loop of awaits is one batch."""
    async with sim_scheduler() as (scheduler, sim, *_):
        for page in range(6):
            await scheduler.load(host_pages=[page], device_pages=[page])
        scheduler.load_nowait(host_pages=[6], device_pages=[6])
        assert scheduler.statistics().queued_requests == 7
        await sim.run_until_idle()
        assert scheduler.statistics().batches == 1


@on_both
async def test_submit_raises_a_pending_cancellation_first() -> None:
    """In a cancelled scope `await load` submits nothing."""
    async with sim_scheduler() as (scheduler, _, *_rest):
        for name in ("load", "backup"):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await call(scheduler, name, host_pages=[0], device_pages=[0])
            assert scope.cancelled_caught
        numbers = scheduler.statistics()
        assert numbers.load.submitted == numbers.backup.submitted == 0


@on_both
async def test_hold_makes_one_batch_of_what_it_holds() -> None:
    """What is submitted inside `hold` waits for its end, checkpoints inside or not, and is one batch."""
    async with sim_scheduler() as (scheduler, sim, *_):
        with scheduler.hold():
            for page in range(4):
                await scheduler.load(host_pages=[page], device_pages=[page])
                await sim.run_until_idle()
            with scheduler.hold():
                await scheduler.load(host_pages=[4], device_pages=[4])
            await sim.run_until_idle()
            assert scheduler.statistics().batches == 0
        await sim.run_until_idle()
        assert scheduler.statistics().batches == 1
        assert scheduler.statistics().load.settled == 5


@on_both
async def test_hold_lets_go_when_its_body_raises() -> None:
    """An exception inside `hold` leaves it as itself, and what was held goes on."""
    async with sim_scheduler() as (scheduler, sim, *_):
        loads = []

        async def broken() -> None:
            with scheduler.hold():
                loads.append(await scheduler.load(host_pages=[0], device_pages=[0]))
                raise KeyError

        with pytest.raises(KeyError):
            await broken()
        await sim.run_until_idle()
        assert loads[0].done


@on_both
async def test_a_long_queue_is_issued_a_budget_per_turn() -> None:
    """Batches keep to their budget, and other tasks run between them."""
    limits = offload.Limits(max_batch_ops=2)
    async with sim_scheduler(limits=limits) as (scheduler, sim, *_):
        for page in range(8):
            await scheduler.load(host_pages=[page], device_pages=[page])
        await sim.run_until_idle()
        assert scheduler.statistics().batches == 4


@on_both
async def test_loads_land_layer_major_across_a_batch() -> None:
    """Layer 0 of every request of a batch lands before layer 1 of any."""
    async with sim_scheduler() as (scheduler, sim, *_):
        loads = [await scheduler.load(host_pages=[n], device_pages=[n]) for n in range(3)]
        for layers in range(1, 5):
            await sim.advance_to_layer(layers)
            assert {load.landed_layers for load in loads} == {layers}
        await sim.run_until_idle()


# Order -----------------------------------------------------------------------------------------------------


@on_both
async def test_an_urgent_load_overtakes_at_a_layer_boundary() -> None:
    """A small urgent load goes between two layers of a big batch that is under way."""
    hooks = Hooks()
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        big = await scheduler.load(host_pages=range(6), device_pages=range(6))
        await sim.advance_to_layer(1)
        small = await scheduler.load(host_pages=[9], device_pages=[7], priority=1)
        await sim.run_until_idle()
        flights = list(dict.fromkeys(op.flight for op in hooks.ops))
        order = [(flights.index(op.flight), op.layer) for op in hooks.ops]
        small_layers = [(1, layer) for layer in range(4)]
        assert order == [(0, 0), *small_layers, (0, 1), (0, 2), (0, 3)]
        await big
        await small


@on_both
async def test_priority_deadline_submission_decide_the_order() -> None:
    """Batches of one direction go by priority, then deadline, then submission."""
    hooks = Hooks()
    done: list[int] = []
    async with sim_scheduler(hooks=hooks, limits=offload.Limits(max_batch_ops=1)) as bed:
        scheduler, sim = bed.scheduler, bed.sim
        given = [(0, None), (0, 5.0), (1, None), (0, 4.0), (1, 5.0)]

        async def wait(number: int, transfer: offload.Transfer) -> None:
            await transfer
            done.append(number)

        async with anyio.create_task_group() as group:
            with scheduler.hold():
                for number, (priority, deadline) in enumerate(given):
                    transfer = await scheduler.load(
                        host_pages=[number], device_pages=[number],
                        priority=priority, deadline=deadline,
                    )  # fmt: skip
                    group.start_soon(wait, number, transfer)
            await sim.run_until_idle()
        assert done == [4, 2, 3, 1, 0]


@on_both
async def test_a_load_of_pages_whose_backup_is_unfinished_follows_it_layer_by_layer() -> None:
    """A load reads a host page's layer only when the backup that writes it has landed that layer."""
    hooks = Hooks()
    gate = hooks.gate(stream="backup", layer=2)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, _):
        before = contents(device, [0])
        await scheduler.backup(device_pages=[0], host_pages=[5])
        load = await scheduler.load(host_pages=[5], device_pages=[7])
        await sim.run_until_idle()
        assert load.landed_layers == 2
        gate.open()
        await sim.run_until_idle()
        assert contents(device, [7]) == before


@on_both
async def test_disjoint_requests_never_wait() -> None:
    """A load of other pages finishes while a backup is held up for ever."""
    hooks = Hooks()
    gate = hooks.gate(stream="backup")
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        backup = await scheduler.backup(device_pages=[0], host_pages=[5])
        blocked = await scheduler.load(host_pages=[5], device_pages=[7])
        free = await scheduler.load(host_pages=[6], device_pages=[1])
        await sim.run_until_idle()
        assert [state(t) for t in (backup, blocked, free)] == ["issued", "queued", "done"]
        gate.open()
        await sim.run_until_idle()


@on_both
async def test_after_an_event_waits_for_that_alone() -> None:
    """`after=` an event orders the request after it; `after=()` does not even wait for compute."""
    async with sim_scheduler() as (scheduler, sim, *_):
        event = sim.compute(1.0)
        ordered = await scheduler.load(host_pages=[0], device_pages=[0])
        free = await scheduler.load(host_pages=[1], device_pages=[1], after=())
        told = await scheduler.load(host_pages=[2], device_pages=[2], after=[event])
        await sim.advance(0.5)
        assert [state(t) for t in (ordered, free, told)] == ["queued", "done", "queued"]
        await sim.run_until_idle()
        assert [state(t) for t in (ordered, free, told)] == ["done"] * 3
        assert scheduler.statistics().batches == 2


@on_both
async def test_work_queued_on_compute_later_is_not_waited_for() -> None:
    """A load waits for what compute had queued at submit, and for nothing that came later."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        sim.compute(10.0)
        await sim.advance(1.0)
        assert load.done
        await sim.run_until_idle()


# Pages -------------------------------------------------------------------------------------------------------


@on_both
async def test_busy_and_idle_tell_traffic() -> None:
    """Pages are busy from submit until the last byte, draining included; `idle` waits for that."""
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[3], device_pages=[1])
        assert scheduler.busy(device_pages=[1])
        assert scheduler.busy(host_pages=[3])
        assert not scheduler.busy(device_pages=[0, 2], host_pages=[1])
        idle = anyio.Event()

        async def wait() -> None:
            await scheduler.idle(device_pages=[1], host_pages=[3])
            idle.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await sim.run_until_idle()
            load.cancel()
            await sim.run_until_idle()
            assert scheduler.busy(device_pages=[1])
            assert not idle.is_set()
            gate.open()
            await sim.run_until_idle()
        assert idle.is_set()
        assert not scheduler.busy(device_pages=[1], host_pages=[3])


@on_both
async def test_idle_never_raises_for_a_failure() -> None:
    """`idle` returns when the pages are free, although the transfer failed."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=1)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[3], device_pages=[1])
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: scheduler.idle(device_pages=[1]))
            await sim.run_until_idle()
        assert state(load) == "failed"


@on_both
async def test_questions_about_pages_check_them() -> None:
    """`busy` and `idle` refuse pages that the pool does not have."""
    async with sim_scheduler() as (scheduler, *_):
        with pytest.raises(offload.RequestError, match="device page 8"):
            scheduler.busy(device_pages=[8])
        with pytest.raises(offload.RequestError, match="host page -1"):
            await scheduler.idle(host_pages=[-1])


@on_both
async def test_a_page_freed_under_a_copy_is_handed_out_only_afterwards() -> None:
    """`pages.free` of a locked page keeps it from `alloc` until its traffic is over."""
    hooks = Hooks()
    gate = hooks.gate()
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, _):
        pages = device.pages.alloc(8)
        await scheduler.load(host_pages=[0, 1], device_pages=pages[:2])
        device.pages.free(pages)
        assert (device.pages.num_free, device.pages.num_locked) == (6, 2)
        with pytest.raises(offload.OutOfPagesError) as caught:
            device.pages.alloc(7)
        assert (caught.value.needed, caught.value.free, caught.value.locked) == (7, 6, 2)
        gate.open()
        await sim.run_until_idle()
        assert sorted(device.pages.alloc(8)) == list(range(8))


# Statistics -----------------------------------------------------------------------------------------------------


@on_both
async def test_statistics_count_what_happened() -> None:
    """Counts of requests, bytes, copies and batches are exact."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        await scheduler.load(host_pages=[0, 1, 2], device_pages=[0, 1, 2])
        await scheduler.backup(device_pages=[5], host_pages=[5])
        gone = await scheduler.load(host_pages=[3], device_pages=[6])
        before = scheduler.statistics()
        assert (before.queued_requests, before.queued_bytes) == (3, 5 * device.spec.page_bytes)
        gone.cancel()
        await sim.run_until_idle()
        after = scheduler.statistics()
        load, backup = after.load, after.backup
        assert (load.submitted, load.settled, load.cancelled, load.failed) == (2, 2, 1, 0)
        assert (backup.submitted, backup.settled) == (1, 1)
        assert load.nbytes == 3 * device.spec.page_bytes
        assert backup.nbytes == device.spec.page_bytes
        assert load.ops == 3 * 2 * device.num_layers  # k and v of each page
        assert after.batches == 2
        assert load.busy_s > 0
