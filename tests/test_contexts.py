"""Context variables: what runs for everybody runs under nobody's, and nothing keeps what a task has set."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token, copy_context
from functools import partial

import anyio
import pytest

import offload
from offload import logs
from offload.testing import Hooks, ThreadsDriver
from tests.sched import LOOPS, on_loops, pools, threads_scheduler
from tests.test_foreign_marks import check_none_watches

PATIENCE = 20.0
WHO: ContextVar[object] = ContextVar("who", default="nobody")


class Told(logging.Handler):
    """Notes under whose context variables something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.under: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Look who it is."""
        self.under.append(WHO.get())


@contextmanager
def listening() -> Iterator[list[object]]:
    """Collect who was set while offload logged that transfers failed."""
    told, logger = Told(), logging.getLogger("offload")
    told.setLevel(logging.WARNING)
    logger.addHandler(told)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logs, "WARN_EVERY_NS", 0)
            yield told.under
    finally:
        logger.removeHandler(told)


async def ends(scheduler: offload.Scheduler, page: int, **more: object) -> None:
    """Submit as a task of its own name, and wait for the failure."""
    WHO.set(page)
    load = await scheduler.load(host_pages=[page], device_pages=[page], **more)  # type: ignore[arg-type]
    with pytest.raises(offload.TransferFailed):
        await load


@on_loops(*LOOPS)
async def test_no_request_expires_under_the_variables_of_another_task() -> None:
    """Whoever set the alarm: it rings under those of the scheduler's opening."""
    gate = threading.Event()
    WHO.set("opener")
    with listening() as under:
        async with threads_scheduler() as (scheduler, *_):
            async with anyio.create_task_group() as tasks:
                for page in range(3):
                    deadline = scheduler.now() + 0.25 - 0.02 * page
                    wait = partial(ends, scheduler, page, after=gate, deadline=deadline)
                    tasks.start_soon(wait)
            gate.set()
            check_none_watches([])
    assert under == ["opener"] * 3


@on_loops(*LOOPS)
async def test_no_request_settles_under_the_variables_of_another_task() -> None:
    """Whoever asked for the turn, from a task or from a worker."""
    hooks = Hooks()
    for _ in range(3):
        hooks.fail(OSError("no"), layer=2)
    WHO.set("opener")
    driver = ThreadsDriver(hooks=hooks)
    with listening() as under:
        async with (
            threads_scheduler(driver=driver, limits=offload.Limits(max_batch_requests=1)) as (
                scheduler,
                *_,
            ),
            anyio.create_task_group() as tasks,
        ):
            for page in range(3):
                tasks.start_soon(ends, scheduler, page)
    assert under == ["opener"] * 3


class Thing:
    """What a task holds on to."""


@on_loops(*LOOPS)
async def test_nothing_keeps_what_a_task_has_set_when_its_request_is_over() -> None:
    """Not the alarm of a far deadline, not the thread that waits for its event, not a turn."""
    gate = threading.Event()

    async def request(how: str) -> weakref.ref[Thing]:
        thing = Thing()
        WHO.set(thing)
        if how == "cancelled":
            load = await scheduler.load(
                host_pages=[0], device_pages=[0], after=gate, deadline=scheduler.now() + 3600
            )
            load.cancel()
        else:
            await (
                await scheduler.load(
                    host_pages=[1], device_pages=[1], deadline=scheduler.now() + 7200
                )
            )
        return weakref.ref(thing)

    seen: list[weakref.ref[Thing]] = []

    async def note(how: str) -> None:
        seen.append(await request(how))

    async with threads_scheduler() as (scheduler, *_):
        for how in ("cancelled", "done"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note, how)
        await anyio.wait_all_tasks_blocked()
        gc.collect()
        assert [ref() for ref in seen] == [None, None]
        gate.set()
        check_none_watches([])


@on_loops(*LOOPS)
async def test_labels_are_those_of_the_submit() -> None:
    """A tracer's labels are read in the submitting task's own frame, from any thread, whoever runs the turn."""
    tracer = offload.Tracer(labels=lambda: {"who": str(WHO.get())})
    WHO.set("opener")

    seen: dict[object, object] = {}

    async def submit(page: int) -> None:
        WHO.set(page)
        load = await scheduler.load(host_pages=[page], device_pages=[page])
        await load
        seen[page] = load.tags

    def submit_from_thread() -> None:
        WHO.set("thread")
        load = scheduler.from_thread.load(host_pages=[5], device_pages=[5])
        load.result(PATIENCE)
        seen["thread"] = load.tags

    async with threads_scheduler(tracer=tracer) as (scheduler, *_):
        tracer.start()
        async with anyio.create_task_group() as tasks:
            for page in range(3):
                tasks.start_soon(submit, page)
            tasks.start_soon(anyio.to_thread.run_sync, submit_from_thread)
        tracer.stop()
    assert seen == {who: {"who": str(who)} for who in (0, 1, 2, "thread")}


@pytest.fixture
def inheriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads inherit the context of whoever starts them, as they do on free-threaded Python 3.14."""
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def inherit(self: threading.Thread) -> None:
        context, run = copy_context(), self.run
        self.run = lambda: context.run(run)  # type: ignore[method-assign]
        start(self)

    monkeypatch.setattr(threading.Thread, "start", inherit)


@pytest.mark.usefixtures("inheriting")
@on_loops(*LOOPS)
async def test_a_scheduler_of_its_own_thread_starts_inside_a_loop_whose_context_it_inherits() -> (
    None
):
    """It is not taken for a part of the loop that runs where it is started."""
    with offload.start_scheduler(*pools()) as scheduler:
        await anyio.to_thread.run_sync(
            lambda: scheduler.load(host_pages=[0], device_pages=[0]).result(PATIENCE)
        )


class Asked:
    """Somebody's event that notes who waits for it."""

    def __init__(self) -> None:
        self.under: list[object] = []
        self.set = threading.Event()

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self.set.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, under somebody's variables."""
        self.under.append(WHO.get())
        return self.set.wait(timeout)


@pytest.mark.usefixtures("inheriting")
@on_loops(*LOOPS)
async def test_threads_run_under_nobodys_variables() -> None:
    """The worker that copies, and the thread that waits for somebody's event."""
    under: list[object] = []

    class Looking(Hooks):
        """Hooks that look who copies."""

        def begin(self, *args: object) -> object:  # type: ignore[override]
            """Look, and go on."""
            under.append(WHO.get())
            return super().begin(*args)  # type: ignore[arg-type]

    WHO.set("opener")
    event = Asked()
    async with threads_scheduler(driver=ThreadsDriver(hooks=Looking())) as (scheduler, *_):
        token: Token[object] = WHO.set("task")
        load = await scheduler.load(host_pages=[0], device_pages=[0], after=event)
        WHO.reset(token)
        event.set.set()
        await load
        check_none_watches([])
    assert under == ["nobody"] * 4
    assert event.under == ["nobody"]


def test_a_loop_that_is_started_again_is_served_under_the_same_variables() -> None:
    """A scheduler may outlive the call that opened it, on one loop."""
    loop = asyncio.new_event_loop()
    with listening() as under:
        hooks = Hooks()
        hooks.fail(OSError("no"))
        made = offload.open_scheduler(*pools(), driver=ThreadsDriver(hooks=hooks))

        async def opening() -> offload.Scheduler:
            WHO.set("opener")
            return await made.__aenter__()

        scheduler = loop.run_until_complete(opening())
        loop.run_until_complete(ends(scheduler, 0))
        loop.run_until_complete(made.__aexit__(None, None, None))
    loop.close()
    assert under == ["opener"]
