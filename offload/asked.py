"""What the faces of a scheduler ask of it: why it is closed, who may block on it, its numbers, its pages in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.errors import RequestError, SchedulerClosedError, counted
from offload.statistics import DirectionStatistics, Statistics

if TYPE_CHECKING:
    from offload.shell import Places, Shell

_AWAIT = "Await instead (issued, layer, or the transfer itself), or wait in a worker thread."


def closed_error(shell: Shell, asked: str = "submit") -> SchedulerClosedError:
    """Return what callers are told once nothing will happen any more, and why."""
    if shell.lost is not None:
        remedy = (
            "Pages that it had in the air are never free again, and a lost CUDA device comes back in "
            "a new process only."
        )
        return SchedulerClosedError(asked, gone="the device is lost", remedy=remedy)
    if shell.fault is not None:
        gone = "an error in the scheduler has ended it"
        remedy = "Leave its block, which raises that error, and open another."
        return SchedulerClosedError(asked, gone=gone, remedy=remedy)
    if shell.dead and not shell.closing:
        gone = "the scheduler's event loop has ended"
        return SchedulerClosedError(asked, gone=gone, remedy="Open another.")
    return SchedulerClosedError(asked)


def check_may_block(shell: Shell, what: str, instead: str = _AWAIT) -> None:
    """Raise if blocking this thread would stop the loop that has to end the wait."""
    shell.loop.check_process(what)
    if shell.loop.here and not shell.dead:
        raise RequestError(
            f"this is the scheduler's own loop thread, and to {what} here would stop the loop. {instead}"
        )


def described(shell: Shell) -> str:
    """Return what every face's repr says of it."""
    state = "closed" if shell.closing else counted(len(shell.entries), "transfer")
    return f"{shell.group!r} on {shell.driver.name}, {state}"


def statistics(shell: Shell) -> Statistics:
    """Return the numbers as they are now."""
    budget = shell.machine.budget
    return Statistics(
        load=DirectionStatistics.of(shell.counters.load),
        backup=DirectionStatistics.of(shell.counters.backup),
        queued_requests=budget.queued_requests,
        queued_bytes=budget.queued_bytes,
        inflight_requests=budget.inflight_requests,
        inflight_bytes=budget.inflight_bytes,
        parked=shell.parking.parked,
        batches=shell.batches,
    )


def in_use(places: Places) -> bool:
    """Return whether some pages are claimed, without what other threads have posted. Any thread."""
    return any(table.busy(pages) for table, pages in places)
