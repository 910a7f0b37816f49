"""Marks that raise when they are asked: a request that was queued is let go, or fails, and holds nobody up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import anyio
import pytest

import offload
from offload.driver.cuda import CudaDriver
from offload.testing import FakeCuda
from tests.backend.test_joined import on_fake_gpu, windows
from tests.driver.test_cuda_scheduler import pools as gpu_pools
from tests.sched import LOOPS, on_both, on_loops, sim_scheduler, state, threads_scheduler
from tests.test_foreign_marks import check_none_watches
from tests.test_groups import MADE

PATIENCE = 20.0


class Broken:
    """Somebody's event that answers once."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        """Say no, then raise."""
        self.asked += 1
        if self.asked > 1:
            raise OSError("the other side is gone")
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Never come back with an answer."""
        raise AssertionError(timeout)


@on_both
async def test_a_mark_that_cannot_be_watched_fails_its_request_alone() -> None:
    """The request is queued by then: it fails with the event's error, and its pages are free."""
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0], after=Broken())
        later = await scheduler.load(host_pages=[1], device_pages=[0])
        await sim.run_until_idle()
        with pytest.raises(offload.TransferFailed, match="the other side is gone"):
            await load
        await later
        assert state(later) == "done"
        with anyio.fail_after(5):
            await scheduler.idle(device_pages=[0])


class Lost:
    """Somebody's event that is waited for in vain: its wait raises, when somebody says so, or its query after that."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.said = threading.Event()

    def query(self) -> bool:
        """Say no."""
        if self.said.is_set() and self.how == "query":
            raise OSError("the other side is gone")
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Raise, or come back without an answer."""
        self.said.wait(timeout)
        if self.how == "wait":
            raise OSError("the other side is gone")
        return False


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("how", ["wait", "query"])
@on_loops(*LOOPS)
async def test_a_mark_that_raises_while_it_is_waited_for_fails_its_request_at_once(
    how: str, joined: bool
) -> None:
    """With its error as the cause, whoever shares it too; others go on, and no thread dies of it."""
    event, stray = Lost(how), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", stray.append)
        async with threads_scheduler() as (scheduler, *_):
            loads = [
                await scheduler.load(host_pages=[0], device_pages=[0], after=event, join=True)
                for _ in range(1 + joined)
            ]
            later = await scheduler.load(host_pages=[1], device_pages=[0])
            other = await scheduler.load(host_pages=[2], device_pages=[2])
            await other
            event.said.set()
            for load in loads:
                with pytest.raises(offload.TransferFailed) as caught:
                    await load
                assert isinstance(caught.value.__cause__, OSError)
            await later
            await scheduler.idle(device_pages=[0])
    assert stray == []


class Chatty:
    """Somebody's event that calls back as often as it likes."""

    def __init__(self) -> None:
        self.called: list[Callable[[], object]] = []

    def query(self) -> bool:
        """Say no."""
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Never come back with an answer."""
        raise AssertionError(timeout)

    def watch(self, callback: Callable[[], object]) -> None:
        """Call back at once, and again."""
        callback()
        callback()


@on_both
async def test_a_mark_that_calls_twice_does_not_stand_for_another() -> None:
    """A request that waits for two marks waits for the second, however often the first one calls."""
    gate = threading.Event()
    async with sim_scheduler() as (scheduler, sim, *_):
        load = await scheduler.load(host_pages=[0], device_pages=[0], after=[Chatty(), gate])
        await sim.run_until_idle()
        assert state(load) == "queued"
        load.cancel()
        gate.set()
        check_none_watches([])


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_query_of_compute_that_fails_once_leaves_nothing_queued_for_ever(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised in the caller's frame, nothing was queued; later, the thread that waits for the mark judges it."""
    monkeypatch.setattr("offload.route._place", lambda device: "cuda")
    device, host = gpu_pools()
    host.pinned = True
    fake = FakeCuda(seed=nth)
    with (
        fake.using(fake.new_stream()),
        offload.start_scheduler(
            device, host, driver=CudaDriver(0, calls=fake), io_backend="memcpy_batch"
        ) as scheduler,
    ):
        fake.compute(lambda: None)
        fake.fail(1, nth=nth, name="query")
        try:
            first = scheduler.load(host_pages=[0], device_pages=[0])
        except RuntimeError:
            assert nth == 1
        else:
            assert nth > 1
        with fake.running():
            if nth > 1:
                first.result(PATIENCE)
            scheduler.load(host_pages=[1], device_pages=[0]).result(PATIENCE)
            scheduler.wait_idle(device_pages=[0], timeout=PATIENCE)
    fake.check()


def test_copies_whose_end_cannot_be_marked_keep_what_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler gives the device up, and the device may still read page ids and addresses."""
    group, fake = MADE["v4"]("page_first"), FakeCuda(seed=1)
    members, others = (
        windows(group, [2, 9]),
        {"swa": offload.PagePair(host_pages=[8], device_pages=[8])},
    )
    with on_fake_gpu(group, "memcpy_batch", fake, monkeypatch, paused=True) as scheduler:
        load = scheduler.load(host_pages=[1, 3], device_pages=[4, 2], members=members, after=())
        load.wait_issued(group.num_layers - 1, timeout=PATIENCE)
        fake.fail(700, nth=1, name="new_event")
        backup = scheduler.backup(host_pages=[7], device_pages=[7], members=others, after=())
        for each in (load, backup):
            with pytest.raises(offload.TransferFailed, match="new_event"):
                each.result(PATIENCE)
        del each
        gc.collect()
        fake.run()
        assert fake.faults == []
