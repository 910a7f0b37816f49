"""Waiting for a request: in a task of the loop, or in a thread. Neither changes anything about it."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint

from offload.acts import refuse_waiting
from offload.errors import RequestError
from offload.ride import Ride


async def until(ride: Ride, what: int, reached: Callable[[], bool]) -> bool:
    """Suspend until `reached()`, true also when what it waits for can no longer come; return whether it did.

    Args:
        what: A layer, `SETTLED` or `RELEASED`.

    Raises:
        RequestError: The caller is not on the scheduler's loop, or keeps the request back himself.
    """
    shell = ride.shell
    shell.home.check("await", "wait_layer, wait_issued, wait_source_reusable or result")
    suspended = False
    while not reached():
        if shell.holds.current() is not None:
            refuse_waiting(ride)
        signal = shell.home.signal()
        ride.enter(signal, what)
        try:
            if what >= 0 and reached():  # what flights published before they knew of the waiter
                break
            suspended = True
            await signal.wait()
        finally:
            ride.leave(signal)
    if not suspended:
        await checkpoint()
    return suspended


def block(
    ride: Ride,
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
        ride.raise_if_over()
    shell = ride.shell
    shell.check_may_block(f"wait for {what}")
    check_timeout(timeout)
    refuse_waiting(ride)

    def news() -> bool:
        return reached() or (not whatever and ride.over())

    def arrived() -> bool:
        return news() or shell.over

    if not shell.bell.wait(arrived, timeout, news=news, issue=issue):
        raise TimeoutError(f"{ride!r}: {timeout} s passed while waiting for {what}")
    if not reached():
        ride.raise_if_over()
        raise ride.failure(shell.stuck or RuntimeError("the event loop of its scheduler has ended"))


def for_layer(ride: Ride, layer: int, timeout: float | None = None) -> int:
    """Block this thread until a layer has landed; return when a wait that blocked began, in ns, else 0."""
    if ride.landed(layer):
        return 0
    ride.follow_layers()
    start = ride.shell.driver.now_ns()
    block(ride, lambda: ride.landed(layer), f"layer {layer} to land", timeout)
    return start


def for_issue(ride: Ride, layer: int, timeout: float | None = None) -> None:
    """Block this thread until a layer is on its stream."""
    what = f"layer {layer} to be issued"
    block(ride, lambda: ride.issued(layer), what, timeout, issue=True)


def fence(ride: Ride, layer: int, timeout: float | None = None) -> int:
    """Order this thread's compute stream after a layer; where compute is the thread, wait for it.

    Returns:
        When a wait that blocked began, in ns, else 0.

    Raises:
        RequestError: The stream is capturing a graph; and as `block` does.
        TransferFailed: It is known to have failed or to have been cancelled.
    """
    driver = ride.shell.driver
    if not driver.fences:
        return for_layer(ride, layer, timeout)
    if driver.capturing():
        raise RequestError(
            "fence was called on a stream that captures a graph, and a wait made now would be "
            "lost or would break the capture. Fence just before the replay."
        )
    ride.follow_layers()
    while not ride.landed(layer):
        for_issue(ride, layer, timeout)
        flight = ride.flight_of(layer)
        event = None if flight is None else flight.fence(ride.request.id, layer)
        if event is not None:
            driver.compute_stream().wait(event)
            break
    return 0


def check_timeout(timeout: float | None) -> None:
    """Raise unless this is a number of seconds from 0 up, or None.

    Raises:
        RequestError: It is not.
    """
    try:
        good = timeout is None or timeout >= 0
    except TypeError:
        good = False
    if not good:
        raise RequestError(
            f"timeout is {timeout!r}; it takes seconds from 0 up, or None", value=timeout
        )
