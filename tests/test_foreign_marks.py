"""Other people's events as `after=`: what tasks await is refused, and nobody's wait keeps what has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import anyio
import pytest
import trio

import offload
from offload.testing import FakeCuda
from tests.sched import LOOPS, on_both, on_loops, pools, sim_scheduler, state, threads_scheduler

PATIENCE = 20.0


def watching() -> list[threading.Thread]:
    """Return the threads that wait for somebody's event."""
    return [thread for thread in threading.enumerate() if thread.name == "offload-after"]


def check_none_watches(before: list[threading.Thread]) -> None:
    """Check that every such thread ends, but for those there were before."""
    for thread in watching():
        if thread not in before:
            thread.join(PATIENCE)
            assert not thread.is_alive()


class Coming:
    """Somebody's event whose `wait` is a coroutine function."""

    def is_set(self) -> bool:
        """Say no."""
        return False

    async def wait(self) -> None:
        """Never come."""


class Asked(Coming):
    """An event that has all that ours have, for tasks."""

    def query(self) -> bool:
        """Say no."""
        return False

    def watch(self, callback: Callable[[], object]) -> None:
        """Take no note."""


FOR_TASKS: dict[str, Callable[[], object]] = {
    "asyncio": asyncio.Event,
    "anyio": anyio.Event,
    "trio": trio.Event,
    "own": Coming,
    "own with watch": Asked,
    "a condition": asyncio.Condition,
    "in a sequence": lambda: [threading.Event(), asyncio.Event()],
    "a future": lambda: asyncio.Future(loop=asyncio.new_event_loop()),
}


@pytest.mark.parametrize("kind", FOR_TASKS)
@on_loops(*LOOPS)
async def test_what_tasks_await_is_refused_when_it_is_submitted(kind: str) -> None:
    """Nothing was queued, and the error says what to do instead: a thread cannot wait for such an event."""
    async with sim_scheduler() as (scheduler, *_):
        after = FOR_TASKS[kind]()
        with pytest.raises(
            offload.RequestError, match=r"Await it first, or pass a threading\.Event"
        ):
            await scheduler.load(host_pages=[0], device_pages=[0], after=after)
        with pytest.raises(offload.RequestError, match="Await it first"):
            scheduler.backup_nowait(host_pages=[0], device_pages=[0], after=after)
        assert scheduler.statistics().queued_requests == 0
    if isinstance(after, asyncio.Future):
        after.get_loop().close()


@on_both
async def test_a_transfer_is_awaited_first_too() -> None:
    """It orders nothing by itself: requests that share pages do that."""
    async with sim_scheduler() as (scheduler, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(offload.RequestError, match="Await it first"):
            await scheduler.load(host_pages=[1], device_pages=[1], after=load)


def test_the_cuda_driver_refuses_it_too() -> None:
    """Its own events and streams are asked for first, and this is none of them."""
    from offload.driver.cuda import CudaDriver

    driver = CudaDriver(0, calls=FakeCuda(seed=1))
    with pytest.raises(offload.RequestError, match="Await it first"):
        driver.events(asyncio.Event())
    driver.close()


@on_loops(*LOOPS)
async def test_one_thread_waits_for_an_event_however_many_requests_do() -> None:
    """Distinct events have one each; a thread ends when its event is set, and all who waited go."""
    before, gates = watching(), [threading.Event(), threading.Event()]
    async with threads_scheduler() as (scheduler, *_):
        loads = [
            await scheduler.load(host_pages=[n], device_pages=[n % 8], after=gates[n % 2])
            for n in range(16)
        ]
        assert len(watching()) - len(before) == 2
        assert all(thread.daemon for thread in watching())
        gates[0].set()
        for load in loads[::2]:
            await load
        assert {state(load) for load in loads[1::2]} == {"queued"}
        gates[1].set()
        for load in loads:
            await load
        check_none_watches(before)


@on_loops(*LOOPS)
async def test_a_scheduler_that_closed_is_not_kept_by_an_event_that_never_comes() -> None:
    """Cancelled loads, queued ones, and pools: without a garbage collection, while the thread still waits."""
    before, gate = watching(), threading.Event()
    gc.collect()
    gc.disable()
    try:
        device, host = pools()
        async with offload.open_scheduler(device, host) as scheduler:
            for _ in range(50):
                load = await scheduler.load(host_pages=[1], device_pages=[0], after=gate)
                load.cancel()
            await scheduler.load(host_pages=[2], device_pages=[2], after=gate)
        seen = [weakref.ref(each) for each in (scheduler, scheduler._shell, device, host)]
        del scheduler, load, device, host
        assert len(watching()) - len(before) == 1
        await anyio.wait_all_tasks_blocked()  # what tells when trio ends, ends
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()
        gate.set()
    check_none_watches(before)


@on_both
async def test_a_request_that_was_cancelled_is_let_go_while_others_wait_for_the_same_event() -> (
    None
):
    """What it holds goes with it; the others are let go by the event as ever."""
    gate = threading.Event()
    async with threads_scheduler() as (scheduler, *_):
        gone = await scheduler.load(host_pages=[0], device_pages=[0], after=gate)
        kept = await scheduler.load(host_pages=[1], device_pages=[1], after=gate)
        entry = weakref.ref(gone._entry)
        gone.cancel()
        await scheduler.idle(device_pages=[0])
        del gone
        gc.collect()
        assert entry() is None
        gate.set()
        await kept
        check_none_watches([])


@on_both
async def test_a_joined_load_goes_on_when_its_lead_was_cancelled_before_the_event() -> None:
    """The event lets the copy go that others still share."""
    gate = threading.Event()
    async with threads_scheduler() as (scheduler, *_):
        lead, other = [
            await scheduler.load(host_pages=[0], device_pages=[0], after=gate, join=True)
            for _ in range(2)
        ]
        assert lead.id == other.id
        lead.cancel()
        del lead
        gc.collect()
        gate.set()
        await other
        check_none_watches([])


def test_one_who_cannot_be_told_is_no_reason_not_to_tell_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A callback that raises is reported where threads report, and those behind it are called."""
    from offload.driver.foreign import ForeignEvent

    reports, told, gate = list[object](), threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", reports.append)
    first, second = ForeignEvent(gate), ForeignEvent(gate)

    def broken() -> None:
        raise OSError("no")

    first.watch(broken)
    second.watch(told.set)
    gate.set()
    assert told.wait(PATIENCE)
    assert len(reports) == 1


def test_where_no_thread_can_be_started_the_request_fails_and_the_next_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left behind that would look like a thread that waits."""
    with offload.start_scheduler(*pools()) as scheduler:
        gate, start = threading.Event(), threading.Thread.start

        def no(self: threading.Thread) -> None:
            if self.name == "offload-after":
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", no)
        load = scheduler.load(host_pages=[0], device_pages=[0], after=gate)
        with pytest.raises(offload.TransferFailed, match="can't start new thread"):
            load.result(PATIENCE)
        monkeypatch.undo()
        load = scheduler.load(host_pages=[0], device_pages=[0], after=gate)
        gate.set()
        load.result(PATIENCE)
