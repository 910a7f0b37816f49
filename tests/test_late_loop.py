"""The loop is busy with something else while many threads come: whoever came first goes first, and nobody is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

import offload
from tests.sched import LOOPS, PAGE_BYTES, on_both, on_loops, state, threads_scheduler
from tests.test_foreign_marks import check_none_watches

PATIENCE = 20.0
MANY = 300
"""Threads: more than a recursion would bear that is a few calls deep for each of them."""


class Crowd:
    """Threads that each call something while the loop is busy; what came of it is in `answers`."""

    def __init__(self, scheduler: offload.Scheduler) -> None:
        self._inbox = scheduler._shell._inbox
        self.threads: list[threading.Thread] = []
        self.answers: dict[int, object] = {}

    def come(self, call: Callable[[], object]) -> None:
        """Start a thread; block the loop until its call has been posted."""
        number, posted = len(self.threads), len(self._inbox)

        def run() -> None:
            try:
                self.answers[number] = call()
            except Exception as error:  # noqa: BLE001 - it is the answer
                self.answers[number] = error

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        while len(self._inbox) == posted and thread.is_alive():
            thread.join(0.0005)

    async def gone(self) -> list[object]:
        """Let the loop go on until every thread has its answer; return them in the order of coming."""
        for thread in self.threads:
            await anyio.to_thread.run_sync(thread.join, PATIENCE)
            assert not thread.is_alive()
        return [self.answers[number] for number in range(len(self.threads))]


@on_loops(*LOOPS)
async def test_hundreds_of_threads_that_came_while_the_loop_was_busy_go_in_order() -> None:
    """None is admitted inside another's admission: neither backwards, nor beyond what a stack bears."""
    async with threads_scheduler() as (scheduler, *_):
        crowd = Crowd(scheduler)
        for number in range(MANY):
            crowd.come(
                lambda n=number: scheduler.from_thread.load(  # type: ignore[misc]
                    host_pages=[n % 16], device_pages=[n % 8]
                )
            )
        loads = await crowd.gone()
        numbers = [load.id for load in loads if isinstance(load, offload.Transfer)]
        assert len(numbers) == MANY, loads
        assert numbers == sorted(numbers)
        for load in loads:
            await load  # type: ignore[misc]


@on_loops(*LOOPS)
async def test_threads_that_came_while_the_loop_was_busy_keep_the_bound() -> None:
    """As many go as there is room for; the others wait in line, each for its own."""
    gate, room = threading.Event(), 2
    limits = offload.Limits(max_queued_bytes=room * PAGE_BYTES)
    async with threads_scheduler(limits=limits) as (scheduler, *_):
        crowd = Crowd(scheduler)
        for number in range(40):
            crowd.come(
                lambda n=number: scheduler.from_thread.load(  # type: ignore[misc]
                    host_pages=[n % 16], device_pages=[n % 8], after=gate
                )
            )
        await anyio.wait_all_tasks_blocked()
        while scheduler.statistics().parked + scheduler.statistics().queued_requests < 40:
            await anyio.lowlevel.checkpoint()
        numbers = scheduler.statistics()
        assert (numbers.queued_bytes, numbers.parked) == (room * PAGE_BYTES, 40 - room)
        gate.set()
        for load in await crowd.gone():
            assert isinstance(load, offload.Transfer)
            await load
        check_none_watches([])


@on_loops(*LOOPS)
async def test_what_threads_ask_while_the_loop_is_busy_keeps_its_order() -> None:
    """Submits, cancels and written layers of many threads: what was cancelled before it was issued never moves."""
    async with threads_scheduler() as (scheduler, *_):
        backup = await scheduler.backup(host_pages=[0], device_pages=[0], streaming=True)
        crowd = Crowd(scheduler)
        queued = [scheduler.load_nowait(host_pages=[n], device_pages=[n % 8]) for n in range(2, 8)]
        for transfer in queued[::2]:
            crowd.come(transfer.cancel)
        for layer in range(4):
            threading.Thread(target=backup.layer_written, args=(layer,)).start()
        await crowd.gone()
        await backup
        for transfer in queued[1::2]:
            await transfer
        assert [state(transfer) for transfer in queued] == ["cancelled", "done"] * 3
        assert scheduler.statistics().load.nbytes == 3 * PAGE_BYTES


@on_loops(*LOOPS)
async def test_a_thread_that_does_not_wait_is_told_whether_it_was_room_or_the_loop() -> None:
    """With `timeout=0`, a loop that is busy is no full queue; and a full queue is told at once."""
    gate = threading.Event()
    limits = offload.Limits(max_queued_bytes=PAGE_BYTES)
    async with threads_scheduler(limits=limits) as (scheduler, *_):

        def hasty() -> object:
            return scheduler.from_thread.load(host_pages=[1], device_pages=[1], timeout=0)

        crowd = Crowd(scheduler)
        crowd.come(hasty)
        crowd.threads[0].join(PATIENCE)  # on the loop's thread
        (late,) = await crowd.gone()
        assert isinstance(late, TimeoutError)
        assert "loop was busy" in str(late)
        assert scheduler.statistics().queued_requests == 0
        await (await scheduler.load(host_pages=[0], device_pages=[0]))
        full = await scheduler.load(host_pages=[0], device_pages=[0], after=gate)
        with pytest.raises(TimeoutError, match="no room within 0 s"):
            await anyio.to_thread.run_sync(hasty)
        assert scheduler.statistics().parked == 0
        gate.set()
        await full
        load = await anyio.to_thread.run_sync(hasty)
        assert isinstance(load, offload.Transfer)
        await load
        check_none_watches([])


@on_both
async def test_a_thread_that_waited_is_told_of_the_loop_too() -> None:
    """Whatever the timeout, it says "no room" only where somebody has looked."""
    async with threads_scheduler() as (scheduler, *_):
        crowd = Crowd(scheduler)
        crowd.come(
            lambda: scheduler.from_thread.load(host_pages=[1], device_pages=[1], timeout=0.02)
        )
        crowd.threads[0].join(PATIENCE)
        (late,) = await crowd.gone()
        assert isinstance(late, TimeoutError)
        assert "loop was busy and has not looked for room within 0.02 s" in str(late)
