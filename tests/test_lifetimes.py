"""What must not outlive its use, and what must not be broken by a wrong argument."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch

import offload
from offload.flight import Flight
from offload.shell import Shell
from offload.testing import Hooks, SimDriver

SPEC = offload.PoolSpec.mha(
    num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float16
)


def pools() -> tuple[offload.DevicePool, offload.HostPool]:
    """Return a small pair of pools."""
    device = offload.DevicePool.allocate(SPEC, num_pages=8)
    return device, offload.HostPool.like(device, num_pages=8, layout="page_first")


async def open_and_close(seen: list[weakref.ref[object]]) -> None:
    """Use a scheduler once."""
    device, host = pools()
    seen += [weakref.ref(device), weakref.ref(host)]
    tracer = offload.Tracer()
    async with offload.open_scheduler(device, host, tracer=tracer) as scheduler:
        await (
            await scheduler.load(host_pages=[0], device_pages=[0], deadline=scheduler.now() + 60)
        )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_closed_scheduler_keeps_no_pool(backend: str) -> None:
    """Pools are freed with their last user, without the help of a garbage collection."""
    seen: list[weakref.ref[object]] = []
    gc.collect()
    gc.disable()
    try:
        anyio.run(open_and_close, seen, backend=backend)
        offload.open_scheduler(*pools())  # never entered
        with offload.start_scheduler(*pools()) as blocking:
            blocking.load(host_pages=[0], device_pages=[0]).result(5.0)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_settled_transfers_leave_no_alarm_behind() -> None:
    """A far deadline holds nothing once its transfer has settled."""

    async def body() -> None:
        sim = SimDriver()
        async with offload.open_scheduler(*pools(), driver=sim) as scheduler:
            refs = []
            for _ in range(600):
                transfer = scheduler.load_nowait(
                    host_pages=[0], device_pages=[0], deadline=scheduler.now() + 3600
                )
                refs.append(weakref.ref(transfer))
                await sim.run_until_idle()
                await transfer
            del transfer
            gc.collect()
            assert sum(ref() is not None for ref in refs) <= 1

    anyio.run(body)


@pytest.mark.parametrize("limits", [{"max_batch_bytes": None}, {"max_batch_ops": None}])
def test_batch_limits_may_be_unbounded(limits: dict[str, None]) -> None:
    """None is unbounded for every limit."""
    with offload.start_scheduler(*pools(), limits=offload.Limits(**limits)) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(5.0)


@pytest.mark.parametrize("wrong", ["x", 0, -1, 1.5])
def test_limits_that_are_no_counts_are_refused(wrong: object) -> None:
    """A limit is an integer from 1 up, or None."""
    with pytest.raises(offload.RequestError, match="max_queued_bytes"):
        offload.Limits(max_queued_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [2.0, "2", None])
def test_alloc_of_no_integer_changes_nothing(wrong: object) -> None:
    """The allocator works on after a wrong number."""
    pages = offload.PageAllocator(8)
    with pytest.raises(offload.RequestError):
        pages.alloc(wrong)  # type: ignore[arg-type]
    assert len(pages.alloc(np.int64(8))) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [-1, 8])
def test_page_memory_refuses_pages_that_are_not_there(page: int) -> None:
    """No address outside the pool is ever handed out."""
    with pytest.raises(offload.RequestError, match="out of range"):
        pools()[1].page_memory(page)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("wrong", ["soon", float("nan")])
def test_a_wrong_deadline_of_aclose_leaves_the_scheduler_open(backend: str, wrong: float) -> None:
    """A refused `aclose` has begun nothing, and the exit closes as ever."""

    async def body() -> None:
        async with offload.open_scheduler(*pools()) as scheduler:
            with pytest.raises(offload.RequestError):
                await scheduler.aclose(drain=True, deadline=wrong)
            await (await scheduler.load(host_pages=[0], device_pages=[0]))

    anyio.run(body, backend=backend)


def test_a_hold_may_end_on_another_thread() -> None:
    """Whoever ends it lets go what the first thread kept back, and nothing else."""

    async def body() -> None:
        sim = SimDriver()
        async with offload.open_scheduler(*pools(), driver=sim) as scheduler:
            hold = scheduler.hold()
            hold.__enter__()
            held = scheduler.load_nowait(host_pages=[0], device_pages=[0])
            await sim.run_until_idle()
            assert not held.done
            thread = threading.Thread(target=hold.__exit__, args=(None, None, None))
            thread.start()
            thread.join()
            free = scheduler.load_nowait(host_pages=[1], device_pages=[1])
            await sim.run_until_idle()
            assert held.done
            assert free.done

    anyio.run(body)


def test_idle_looks_at_the_pages_that_it_was_given() -> None:
    """Changing the list while waiting does not change the question."""

    async def body() -> None:
        sim, pages, order = SimDriver(), [0], list[str]()
        async with offload.open_scheduler(*pools(), driver=sim) as scheduler:
            scheduler.load_nowait(host_pages=[0], device_pages=[0])

            async def wait() -> None:
                await scheduler.idle(device_pages=pages)
                order.append("busy" if scheduler.busy(device_pages=[0]) else "idle")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await sim.advance(0)
                pages[0] = 5
                await sim.run_until_idle()
            assert order == ["idle"]

    anyio.run(body)


def test_threads_do_not_wait_for_a_scheduler_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault of the library, blocking waits raise instead of hanging."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = offload.testing.ThreadsDriver(hooks=hooks)
    scheduler = offload.start_scheduler(*pools(), driver=driver)
    transfer = scheduler.load(host_pages=[0], device_pages=[0])
    gate.wait_arrived(1, 5.0)
    machine = scheduler._shell.machine

    def broken(_: object) -> list[object]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(type(machine), "handle", lambda _, event: broken(event))
    gate.open()
    with contextlib.suppress(offload.TransferFailed):
        transfer.result(5.0)  # returns if its bytes landed before the fault was seen
    with pytest.raises(offload.TransferFailed):
        transfer.wait_source_reusable(5.0)
    with pytest.raises(offload.SchedulerClosedError):
        scheduler.wait_idle(device_pages=[0], timeout=5.0)
    with pytest.raises(ZeroDivisionError):
        scheduler.close(timeout=5.0)


def late_reports(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold back what streams report to the loop until the event is set: threads see landings first."""
    gate, report = threading.Event(), Shell.report

    def late(shell: Shell, flight: Flight) -> None:
        assert gate.wait(5.0)
        report(shell, flight)

    monkeypatch.setattr(Shell, "report", late)
    return gate


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_awaited_transfer_has_given_its_pages_back(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages freed after the `await` can be allocated at once, whoever saw the last byte land first."""
    gate = late_reports(monkeypatch)

    async def body() -> None:
        device, host = pools()
        async with (
            offload.open_scheduler(device, host) as scheduler,
            anyio.create_task_group() as tg,
        ):
            pages = device.pages.alloc(8)
            transfer = await scheduler.backup(device_pages=pages, host_pages=range(8))
            while not transfer.done:
                await anyio.lowlevel.checkpoint()

            async def waiter() -> None:
                await transfer
                device.pages.free(pages)
                assert len(device.pages.alloc(8)) == 8

            tg.start_soon(waiter)
            try:
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
            finally:
                gate.set()

    anyio.run(body, backend=backend)


def test_a_result_means_that_the_pages_were_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages freed after `result()` can be allocated at once."""
    gate = late_reports(monkeypatch)
    device, host = pools()
    with offload.start_scheduler(device, host) as scheduler:
        pages = device.pages.alloc(8)
        transfer = scheduler.backup(device_pages=pages, host_pages=range(8))
        transfer.wait_layer(1, timeout=5.0)
        with pytest.raises(TimeoutError):
            transfer.result(timeout=0.0)
        gate.set()
        transfer.result(timeout=5.0)
        device.pages.free(pages)
        assert len(device.pages.alloc(8)) == 8
