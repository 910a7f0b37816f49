"""Waiting for a request: in a task of the loop, or in a thread. Neither changes anything about it."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint

from offload.actions import refuse_waiting
from offload.arguments import real
from offload.asked import check_may_block
from offload.entry import Entry
from offload.errors import RequestError, shown
from offload.trace.forward import ForwardTrace


async def until(entry: Entry, what: int, reached: Callable[[], bool]) -> bool:
    """Suspend until `reached()`, true also when what it waits for can no longer come; return whether it did.

    Args:
        what: A layer, `SETTLED` or `RELEASED`.

    Raises:
        RequestError: The caller is not on the scheduler's loop, or keeps the request back himself.
    """
    shell = entry.shell
    shell.loop.check("await", "wait_layer, wait_issued, wait_source_reusable or result")
    suspended = False
    while not reached():
        if shell.holds.current() is not None:
            refuse_waiting(entry)
        signal = shell.loop.signal()
        entry.enter(signal, what)
        try:
            if what >= 0 and reached():  # what flights published before they knew of the waiter
                break
            suspended = True
            await signal.wait()
        finally:
            entry.leave(signal)
    if not suspended:
        await checkpoint()
    return suspended


def block(
    entry: Entry,
    reached: Callable[[], bool],
    what: str,
    timeout: float | None,
    *,
    whatever: bool = False,
    issue: bool = False,
) -> None:
    """Block this thread until `reached()`; raise when it is over before, unless `whatever`.

    Args:
        issue: Whether a layer that is issued may bring that about; else only one that lands.

    Raises:
        TransferFailed: It failed or was cancelled, or its loop or its device are gone.
        TimeoutError: Not within `timeout` seconds.
        RequestError: This is the loop's own thread, or the one that keeps the request back.
    """
    if reached():
        return
    if not whatever:
        entry.raise_if_over()
    shell = entry.shell
    check_may_block(shell, f"wait for {what}")
    check_timeout(timeout)
    refuse_waiting(entry)

    def news() -> bool:
        return reached() or (not whatever and entry.over())

    def arrived() -> bool:
        return news() or shell.over

    if not shell.waiting_threads.wait(arrived, timeout, news=news, issue=issue):
        raise TimeoutError(f"{entry!r}: {timeout} s passed while waiting for {what}")
    if not reached():
        entry.raise_if_over()
        raise entry.failure(
            shell.stuck or RuntimeError("the event loop of its scheduler has ended")
        )


def for_layer(entry: Entry, layer: int, timeout: float | None = None) -> int:
    """Block this thread until a layer has landed; return when a wait that blocked began, in ns, else 0."""
    if entry.landed(layer):
        return 0
    entry.follow_layers()
    start = entry.shell.driver.now_ns()
    block(entry, lambda: entry.landed(layer), f"layer {layer} to land", timeout)
    return start


def for_issue(entry: Entry, layer: int, timeout: float | None = None) -> int:
    """Block this thread until a layer is on its stream; return when a wait that blocked began, in ns, else 0."""
    if entry.issued(layer):
        return 0
    start = entry.shell.driver.now_ns()
    block(entry, lambda: entry.issued(layer), f"layer {layer} to be issued", timeout, issue=True)
    return start


def fence(entry: Entry, layer: int, timeout: float | None = None) -> int:
    """Order this thread's compute stream after a layer; where compute is the thread, wait for it.

    Returns:
        When a wait that blocked began, in ns, else 0.

    Raises:
        RequestError: The stream is capturing a graph; and as `block` does.
        TransferFailed: It is known to have failed or to have been cancelled.
    """
    driver = entry.shell.driver
    if not driver.fences:
        return for_layer(entry, layer, timeout)
    if driver.capturing():
        raise RequestError(
            "fence was called on a stream that captures a graph, and a wait made now would be "
            "lost or would break the capture. Fence just before the replay."
        )
    entry.follow_layers()
    start = 0
    while not entry.landed(layer):
        blocked = for_issue(entry, layer, timeout)
        start = start or blocked
        flight = entry.flight_of(layer)
        event = None if flight is None else flight.fence(entry.request.id, layer)
        if event is not None:
            driver.compute_stream().wait(event)
            break
    return start


def noted_fence(
    entry: Entry, layer: int, timeout: float | None = None, forward: ForwardTrace | None = None
) -> int:
    """Fence a layer, and write down what the host waited, and what its stream will have waited.

    Returns and raises as `fence` does.

    Args:
        forward: The one to which the wait is drawn.
    """
    ledger, driver = entry.shell.ledger, entry.shell.driver
    orders = driver.fences and not entry.landed(layer)
    before = ledger.point() if orders and forward is None else None
    start = fence(entry, layer, timeout)
    if orders:
        ledger.fenced(entry, layer, start, before, forward)
    else:
        ledger.waited(entry, layer, start, forward)
    return start


def check_timeout(timeout: float | None) -> None:
    """Raise unless this is a number of seconds from 0 up, or None.

    Raises:
        RequestError: It is not.
    """
    try:
        good = timeout is None or real(timeout) >= 0
    except TypeError:
        good = False
    if not good:
        raise RequestError(
            f"timeout is {shown(timeout)}; it takes seconds from 0 up, or None", value=timeout
        )
