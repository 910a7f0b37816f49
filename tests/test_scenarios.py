"""Faults that other projects had, as scenarios: each is told by its number in the list of known cases."""

from __future__ import annotations

import itertools
from contextvars import ContextVar

import anyio
import numpy as np
import pytest
import torch

import offload
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests import oracle
from tests.sched import (
    PAGE_BYTES,
    contents,
    on_both,
    overwrite,
    pools,
    run,
    sim_scheduler,
    state,
    threads_scheduler,
)
from tests.test_cancel import outcome

MHA = offload.PoolSpec.mha(
    num_layers=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float16
)
MLA = offload.PoolSpec.mla(
    num_layers=4, page_size=4, latent_dim=16, rope_dim=4, dtype=torch.float16
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")


@pytest.mark.parametrize("spec", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k01_every_pair_copies_exactly_or_is_refused_at_submit(
    spec: offload.PoolSpec, layout: str
) -> None:
    """Each io backend and direction: byte-equal, or an error that names a way that works; nothing else."""

    async def body() -> None:
        device, host = pools(spec, 8, 8, layout)
        sim = SimDriver()
        if (spec.kind, layout) == ("mla", "page_head"):  # nothing copies it: opening says so
            with pytest.raises(offload.UnsupportedPairError, match="page_head"):
                offload.open_scheduler(device, host, driver=sim)
            return
        async with offload.open_scheduler(device, host, driver=sim) as scheduler:
            for io_backend, load in itertools.product(offload.IoBackend, (True, False)):
                fresh_device, fresh_host = pools(spec, 8, 8, layout)
                oracle.fill(device, 1)
                oracle.fill(host, 2)
                submit = scheduler.load if load else scheduler.backup
                refused = None
                try:
                    await submit(
                        host_pages=[0, 1], device_pages=[0, 1], io_backend=io_backend.value
                    )
                except offload.UnsupportedPairError as error:
                    refused = error
                if refused is None:
                    source, target = (host, fresh_device) if load else (device, fresh_host)
                    oracle.copy(source, target, [(0, 0), (1, 1)], range(4))
                else:
                    assert layout in str(refused)
                    assert io_backend.value in str(refused)
                    assert refused.io_backends or refused.layouts or refused.pair
                await sim.run_until_idle()
                assert oracle.same_bytes(device, fresh_device)
                assert oracle.same_bytes(host, fresh_host)

    run(body)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@on_both
async def test_k06_all_256_patterns_of_fp8_survive(dtype: torch.dtype) -> None:
    """fp8 bytes are moved, never converted."""
    spec = offload.PoolSpec.mha(
        num_layers=1, page_size=16, num_kv_heads=1, head_dim=16, v_head_dim=0, dtype=dtype
    )
    async with sim_scheduler(spec=spec) as (scheduler, sim, device, _):
        patterns = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        tensors = device.tensors["k"]
        assert isinstance(tensors, list)
        flat = tensors[0].view(torch.uint8).view(8, 256)
        flat[2] = patterns
        await scheduler.backup(device_pages=[2], host_pages=[5])
        await scheduler.load(host_pages=[5], device_pages=[3])
        await sim.run_until_idle()
        assert torch.equal(flat[3], patterns)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 0, 2, 1)])
@on_both
async def test_k08_layers_are_awaited_in_any_order(order: tuple[int, ...]) -> None:
    """Each await returns when that layer's bytes are there, in whatever order, repeated or late."""
    hooks = Hooks()
    gate = hooks.gate(layer=3)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [4, 5])
        load = await scheduler.load(host_pages=[4, 5], device_pages=[0, 1])
        returned: list[int] = []

        async def consume() -> None:
            for layer in (*order, 2, 0):
                await load.layer(layer)
                assert contents(device, [0, 1], [layer]) == before[layer::4]
                returned.append(layer)

        async def once() -> None:
            await load.layer(1)
            returned.append(-1)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            for _ in range(10):
                group.start_soon(once)
            await sim.run_until_idle()
            early = [layer for layer in returned if layer >= 0]
            gate.open()
            await sim.run_until_idle()
        assert early == list(order[: order.index(3)])
        assert returned.count(-1) == 10
        assert [layer for layer in returned if layer >= 0] == [*order, 2, 0]


SLOTS = {
    "six slots": [0, 1, 2, 3, 4, 5],
    "misaligned": list(range(1, 9)),
    "unordered": [0, 1, 3, 2],
    "torn": [0, 1, 4, 5],
    "negative": [-4, -3, -2, -1],
    "beyond": list(range(28, 36)),
    "far beyond": [2**40 + 16 + n for n in range(4)],
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_k10_slots_outside_the_contract_are_refused(slots: list[int]) -> None:
    """Misaligned, torn, unordered and foreign slots raise and name the first bad value."""
    with pytest.raises(offload.RequestError) as caught:
        offload.pages_from_slots(slots, 4, num_pages=8)
    assert caught.value.position is not None
    assert caught.value.value == slots[caught.value.position]


@on_both
async def test_k10_a_thousand_empty_requests_leave_nothing() -> None:
    """Empty requests complete at once: no operation, no byte, no queue entry."""
    hooks = Hooks()
    tracer = offload.Tracer()
    async with sim_scheduler(hooks=hooks, tracer=tracer) as (scheduler, *_):
        for _ in range(1000):
            assert (await scheduler.load(host_pages=[], device_pages=[])).done
        numbers = scheduler.statistics()
        assert (numbers.queued_requests, numbers.batches, numbers.load.nbytes) == (0, 0, 0)
        assert hooks.ops == []


@pytest.mark.parametrize("seed", range(50))
@on_both
async def test_k16_a_load_waits_for_what_compute_has_queued(seed: int) -> None:
    """A checksum queued before the load sees the old bytes; a zero-fill queued before does not win."""
    async with sim_scheduler(seed=seed, jitter=0.9) as (scheduler, sim, device, host):
        old, new = contents(device, [2]), contents(host, [7])
        seen: list[list[bytes]] = []
        reads = [(device, layer, [2]) for layer in range(4)]
        sim.compute(0.05, lambda: seen.append(contents(device, [2])), reads=reads)
        await scheduler.load(host_pages=[7], device_pages=[2])
        await sim.run_until_idle()
        assert seen == [old]
        assert contents(device, [2]) == new
        sim.compute(0.05, lambda: overwrite(device, [2], 0), writes=reads)
        await scheduler.load(host_pages=[7], device_pages=[2])
        await sim.run_until_idle()
        assert contents(device, [2]) == new


@pytest.mark.parametrize("seed", range(25))
@on_both
async def test_k17_a_load_of_unfinished_backups_and_the_reverse(seed: int) -> None:
    """A load behind a backup of its host pages sees the new bytes, one in front the old; others pass."""
    hooks = Hooks()
    hooks.delay(0.03, nth=1)
    ahead = 1 + seed % 3
    async with sim_scheduler(seed=seed, jitter=0.9, hooks=hooks, ahead=ahead) as bed:
        scheduler, device, host = bed.scheduler, bed.device, bed.host
        old_device, old_host = contents(device, [0, 1]), contents(host, [4, 5])
        first = ("backup", "load") if seed % 2 else ("load", "backup")
        moved: dict[str, offload.Transfer] = {}
        for name in first:
            pages = [0, 1] if name == "backup" else [6, 7]
            moved[name] = await getattr(scheduler, name)(host_pages=[4, 5], device_pages=pages)
        calm = await scheduler.load(host_pages=[9], device_pages=[3], priority=1)
        await bed.sim.run_until_idle()
        assert {state(t) for t in (*moved.values(), calm)} == {"done"}
        assert contents(device, [6, 7]) == (old_device if first[0] == "backup" else old_host)
        assert contents(host, [4, 5]) == old_device


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
@on_both
async def test_k19_pages_under_a_load_are_no_victims(ending: str) -> None:
    """Host pages that a load reads are not handed out again before its last copy is over."""
    hooks = Hooks()
    gate = hooks.gate(stream="load", layer=1)
    if ending == "failed":
        hooks.fail(OSError("no"), stream="load", layer=1)
    async with sim_scheduler(host_pages=8, hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [2, 3])
        owned = host.pages.alloc(8)
        load = await scheduler.load(host_pages=[2, 3], device_pages=[0, 1])
        await sim.run_until_idle()
        host.pages.free(owned)
        taken = host.pages.alloc(6)
        assert {2, 3}.isdisjoint(taken.tolist())
        with pytest.raises(offload.OutOfPagesError) as caught:
            host.pages.alloc(1)
        assert (caught.value.free, caught.value.locked) == (0, 2)
        if ending == "cancelled":
            load.cancel()
            await sim.run_until_idle()
            assert host.pages.num_free == 0
        backup = await scheduler.backup(device_pages=range(2, 8), host_pages=taken)
        gate.open()
        await sim.run_until_idle()
        assert (await outcome(load)).startswith(ending)
        assert state(backup) == "done"
        assert sorted(host.pages.alloc(2)) == [2, 3]
        if ending == "done":
            assert contents(device, [0, 1]) == before


@on_both
async def test_k22_one_error_fails_one_request() -> None:
    """Of six backups the third's copy raises: five are byte-equal, and its pages are free."""
    hooks = Hooks()
    driver = ThreadsDriver(hooks=hooks)
    limits = offload.Limits(max_batch_ops=1)
    hooks.fail(OSError("disk"), stream="backup", nth=2 * 4 + 1)
    async with threads_scheduler(driver=driver, limits=limits) as (scheduler, device, host):
        before = contents(device, range(6))
        ends = []
        for page in range(6):
            backup = await scheduler.backup(device_pages=[page], host_pages=[page])
            ends.append(await outcome(backup))
        assert ends == [*["done"] * 2, "failed at 0: OSError('disk')", *["done"] * 3]
        await scheduler.idle(host_pages=range(6), device_pages=range(6))
        for page in (0, 1, 3, 4, 5):
            assert contents(host, [page]) == before[4 * page : 4 * page + 4]


@on_both
async def test_k24_a_failure_in_the_middle_reaches_all_who_wait() -> None:
    """Suspended waiters of later layers raise and name the layer; earlier layers stay usable."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=2)
    async with sim_scheduler(hooks=hooks) as (scheduler, sim, device, host):
        before = contents(host, [3], [0, 1])
        load = await scheduler.load(host_pages=[3], device_pages=[0])
        ends: dict[int, str] = {}

        async def wait(layer: int) -> None:
            ends[layer] = await outcome(load.layer(layer))

        async with anyio.create_task_group() as group:
            for layer in (1, 2, 3):
                group.start_soon(wait, layer)
            await sim.run_until_idle()
        failed = "failed at 2: OSError('no')"
        assert ends == {1: "done", 2: failed, 3: failed}
        assert contents(device, [0], [0, 1]) == before


@on_both
async def test_k34_tags_are_those_of_submit_time() -> None:
    """A context variable read at submit belongs to that request, in merged batches too."""
    rid: ContextVar[str] = ContextVar("rid", default="none")
    tracer = offload.Tracer(labels=lambda: {"rid": rid.get()})
    async with sim_scheduler(tracer=tracer) as (scheduler, sim, *_):
        wanted: list[tuple[offload.Transfer, str]] = []
        for name in ("req-7", "req-8", "req-9"):
            token = rid.set(name)
            load = await scheduler.load(host_pages=[len(wanted)], device_pages=[len(wanted)])
            wanted.append((load, name))
            rid.reset(token)
        wanted.append((await scheduler.load(host_pages=[5], device_pages=[5]), "none"))
        rid.set("other")
        await sim.run_until_idle()
        for load, name in wanted:
            assert load.tags == {"rid": name}


@on_both
async def test_k35_a_producer_is_held_to_the_bound() -> None:
    """With the link stalled, no more than eight pages wait, and the producer parks."""
    hooks = Hooks()
    gate = hooks.gate()
    limits = offload.Limits(max_queued_bytes=8 * PAGE_BYTES, max_inflight_requests=1)
    async with sim_scheduler(hooks=hooks, limits=limits) as (scheduler, sim, *_):
        peak = [0]

        async def produce() -> None:
            for number in range(100):
                await scheduler.backup(device_pages=[number % 8], host_pages=[number % 16])
                peak[0] = max(peak[0], scheduler.statistics().queued_bytes)

        async with anyio.create_task_group() as group:
            group.start_soon(produce)
            await sim.run_until_idle()
            submitted = scheduler.statistics().backup.submitted
            gate.open()
            await sim.run_until_idle()
        await sim.run_until_idle()
        assert submitted == 9
        assert peak == [8 * PAGE_BYTES]
        assert scheduler.statistics().backup.settled == 100


@on_both
async def test_k35_loads_go_before_queued_backups_and_backups_do_not_starve() -> None:
    """One request at a time: a load overtakes queued backups; endless loads do not starve a backup."""
    limits = offload.Limits(max_inflight_requests=1)
    async with sim_scheduler(limits=limits, latency=1.0) as (scheduler, sim, *_):
        backups = [await scheduler.backup(device_pages=[n], host_pages=[n]) for n in range(4)]
        await sim.advance(0.5)
        load = await scheduler.load(host_pages=[9], device_pages=[7])
        await sim.run_until_idle()
        assert state(load) == "done"
        assert {state(each) for each in backups} == {"done"}
        late = await scheduler.backup(device_pages=[0], host_pages=[0])
        rounds = 0
        while not late.done:
            rounds += 1
            await scheduler.load(host_pages=[8 + rounds % 4], device_pages=[1 + rounds % 4])
            await sim.advance(4.0)
        assert rounds <= 5  # a patience of ten seconds, and what was under way


def test_k36_pages_are_freed_once() -> None:
    """Bad frees raise and change nothing; what `alloc` returned is the caller's own."""
    _, host = pools(host_pages=8)
    pages = host.pages.alloc(3)
    p, q, r = pages.tolist()
    host.pages.free([q])
    bad: list[list[int]] = [[q], [p, q], [p, p], [7], [99]]
    for wrong in bad:
        with pytest.raises(ValueError, match="page"):
            host.pages.free(wrong)
        assert host.pages.num_free == 6
    pages[:] = 0
    host.pages.free([p, r])
    singles = [int(host.pages.alloc(1)[0]) for _ in range(8)]
    assert sorted(singles) == list(range(8))
    with pytest.raises(offload.OutOfPagesError):
        host.pages.alloc(1)
    assert isinstance(pages, np.ndarray)
    assert pages.base is None


@on_both
async def test_k38_an_exhausted_host_pool_loses_nothing() -> None:
    """Asking for more pages than are free takes none; the retry after a free is byte-equal."""
    async with sim_scheduler(host_pages=8) as (scheduler, sim, device, host):
        held = host.pages.alloc(7)
        before = contents(device, [0, 1])
        with pytest.raises(offload.OutOfPagesError) as caught:
            host.pages.alloc(2)
        assert (caught.value.needed, caught.value.free) == (2, 1)
        assert host.pages.num_free == 1
        host.pages.free(held[:2])
        target = host.pages.alloc(2)
        await scheduler.backup(device_pages=[0, 1], host_pages=target)
        await sim.run_until_idle()
        assert contents(host, target.tolist()) == before
