"""Faults of ours and signals where no caller waits: raised where the scheduler is left, or where the program ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio

import offload
from offload import actions
from offload.core.budget import Budget
from offload.driver.base import Stream
from offload.testing import Hooks, ThreadsDriver
from tests.sched import LOOPS, on_loops, pools, run
from tests.test_cancel import outcome


class Seam(ThreadsDriver):
    """Calls something where the scheduler asks for a stream, or whether the device is lost, once."""

    def __init__(self, act: Callable[[], object], asked: str, hooks: Hooks | None = None) -> None:
        super().__init__(hooks=hooks)
        self.act: Callable[[], object] | None = act
        self.asked = asked
        self.armed = False

    def pull(self, asked: str) -> None:
        """Do it, if this is where."""
        if self.armed and asked == self.asked and self.act is not None:
            act, self.act = self.act, None
            act()

    def stream(self, name: str) -> Stream:
        """Return the stream of that name."""
        self.pull("stream")
        return super().stream(name)

    @property
    def lost(self) -> None:  # type: ignore[override]
        """Never."""
        self.pull("lost")


def broken(*_: object) -> Any:
    """Fail as a defect of ours would."""
    raise ZeroDivisionError("ours")


# Faults ---------------------------------------------------------------------------------------------------

PATHS = ("deadline", "post", "let go", "turn")


async def set_off(path: str, scheduler: offload.Scheduler, patch: pytest.MonkeyPatch) -> None:
    """Have a fault of ours come up in a way that no caller waits for."""
    if path == "let go":
        patch.setattr(actions, "_LET_GO", 1)
        patch.setattr(actions, "Unblock", broken)
        with scheduler.hold():
            for page in (2, 3):
                await scheduler.load(host_pages=[page], device_pages=[page])
        return
    if path == "deadline":
        patch.setattr(actions, "Cancel", broken)
        deadline = scheduler.now() + 0.01
        await scheduler.load(host_pages=[0], device_pages=[0], deadline=deadline)
        return
    load = await scheduler.load(host_pages=[0], device_pages=[0])
    await load.layer(0)
    driver = scheduler._shell.driver
    assert isinstance(driver, Seam)
    driver.armed = True
    if path == "post":
        thread = threading.Thread(target=load.cancel)
        thread.start()
        thread.join()
    if path == "turn":
        await scheduler.load(host_pages=[1], device_pages=[1])


@pytest.mark.parametrize("path", PATHS)
@on_loops(*LOOPS)
async def test_a_fault_that_no_caller_waits_for_is_raised_where_it_is_left(path: str) -> None:
    """Everything settles, the loop hears nothing of it, and leaving raises it."""
    device, host = pools()
    hooks = Hooks()
    gate = hooks.gate(layer=1)
    driver = Seam(broken, "lost" if path == "turn" else "stream", hooks)
    heard: list[str] = []

    async def body(patch: pytest.MonkeyPatch) -> None:
        async with offload.open_scheduler(device, host, driver=driver) as scheduler:
            behind = await scheduler.load(host_pages=[5], device_pages=[5], after=mark)
            await set_off(path, scheduler, patch)
            heard.append(await outcome(behind))
            gate.open()

    mark = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(ZeroDivisionError, match="ours"):
            await body(patch)
        mark.set()
    assert ["ZeroDivisionError" in each for each in heard] == [True]
    for pool in (device, host):
        assert pool.pages.table.owner is None
        assert not pool.pages.table.held()


# Signals --------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], None]:
    """Return what raises, as the handler of a signal does wherever that lands."""

    def act() -> None:
        raise error

    return act


def has_in_it(raised: BaseException | None, error: BaseException) -> bool:
    """Return whether what was raised is an error, or a group of it or its consequence."""
    if raised is None or raised is error:
        return raised is error
    inner = raised.exceptions if isinstance(raised, BaseExceptionGroup) else ()
    return any(has_in_it(each, error) for each in (*inner, raised.__cause__))


@pytest.mark.parametrize("where", ["stream", "lost"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_signal_that_lands_in_a_turn_ends_the_program(
    loop: str, error: BaseException, where: str
) -> None:
    """It comes out of the loop at once, though the body waits for something else, and the pools are free."""
    device, host = pools()
    driver = Seam(raising(error), where)
    notes: list[str] = []

    async def body() -> None:
        try:
            async with offload.open_scheduler(device, host, driver=driver) as scheduler:
                driver.armed = True
                await scheduler.load(host_pages=[0], device_pages=[0])
                await anyio.sleep_forever()
        except BaseException as left:
            notes.extend(getattr(left, "__notes__", ()))
            raise

    expected = trio.TrioInternalError if loop == "trio" else type(error)
    with pytest.raises(expected) as caught:
        run(body, loop)
    assert has_in_it(caught.value, error)
    assert any(repr(error) in note for note in notes)
    for pool in (device, host):
        assert pool.pages.table.owner is None
        assert not pool.pages.table.held()


@pytest.mark.parametrize("where", ["stream", "lost"])
def test_an_interrupt_in_a_turn_of_trio_is_its_main_task_s(where: str) -> None:
    """Trio keeps Ctrl-C out of callbacks: the scheduler is whole, and the body is interrupted."""
    device, host = pools()
    driver = Seam(lambda: signal.raise_signal(signal.SIGINT), where)
    faults: list[object] = []

    async def body() -> None:
        async with offload.open_scheduler(device, host, driver=driver) as scheduler:
            driver.armed = True
            load = await scheduler.load(host_pages=[0], device_pages=[0])
            try:
                await anyio.sleep_forever()
            finally:
                faults.append(scheduler._shell.fault)
                with anyio.CancelScope(shield=True):
                    await load

    with pytest.raises(KeyboardInterrupt):
        anyio.run(body, backend="trio")
    assert faults == [None]
    assert device.pages.table.owner is None


@pytest.mark.parametrize("submit", ["load", "load_nowait"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_in_the_submit_of_a_thread_ends_the_loop_s_program_too(
    loop: str, submit: str
) -> None:
    """It was the loop's thread that was interrupted: the one that waits hears of it, and is not all that does."""
    device, host = pools()
    error, heard = KeyboardInterrupt(), list[BaseException]()

    async def body(patch: pytest.MonkeyPatch) -> None:
        async with offload.open_scheduler(device, host) as scheduler:

            def work() -> None:
                try:
                    getattr(scheduler.from_thread, submit)(host_pages=[0], device_pages=[0])
                except BaseException as raised:  # noqa: BLE001 - looked at below
                    heard.append(raised)

            def interrupted(*_: object) -> None:
                patch.undo()
                raise error

            patch.setattr(Budget, "queue", interrupted)
            threads.append(threading.Thread(target=work))
            threads[0].start()
            await anyio.sleep_forever()

    threads: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(KeyboardInterrupt) as caught:
            run(body, loop, patch=patch)
        threads[0].join()
    assert caught.value is error
    assert heard == [error]
    assert device.pages.table.owner is None
