"""The first half of a submit: every check, in the caller's frame, before anything is queued.

What comes out is an `Entry` without a number: checked, resolved, stamped, with the compute marks recorded on the
thread that called. Nothing in it belongs to the loop yet, so any thread may make one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from offload.arguments import real
from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike
from offload.core.request import PATIENCE, Request, due
from offload.driver.base import Driver, Event
from offload.entry import Entry
from offload.errors import RequestError, shown
from offload.group import PagePair

if TYPE_CHECKING:
    from offload.shell import Shell

After: TypeAlias = object
"""`"compute"`; an event, a stream, or a sequence of them; `()` for nothing."""


def checked(
    shell: Shell,
    direction: Direction,
    host_pages: PagesLike,
    device_pages: PagesLike,
    *,
    priority: float = 0,
    deadline: float | None = None,
    after: After = "compute",
    join: bool = False,
    streaming: bool = False,
    io_backend: str | None = None,
    members: Mapping[str, PagePair] | None = None,
) -> Entry:
    """Check a request and resolve its pair. Any thread.

    Raises:
        RequestError: Pages, deadline or `after` are wrong, or the stream captures a graph.
        UnsupportedPairError: The pair cannot be copied.
        UnknownNameError: No such io backend or member.
    """
    if join is not False or streaming is not False:
        for name, flag in (("join", join), ("streaming", streaming)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} is {shown(flag)}; it takes True or False", value=flag)
    driver, group = shell.driver, shell.group
    submitted_ns = driver.now_ns()
    route = shell.router.route(direction, io_backend)
    parts = group.parts(direction, host_pages, device_pages, members)
    when = _due(driver.now(), priority, deadline)
    if streaming and (not isinstance(after, str) or after != "compute"):
        raise RequestError(
            f"after={after!r} does not apply to a streaming backup: layer_written orders each layer "
            "after the compute that wrote it"
        )
    marks = () if streaming else compute_marks(driver, after)
    hold, tracer = shell.holds.current(), shell.tracer
    request = Request(
        0,
        direction,
        parts,
        route,
        group.nbytes(parts),
        len(parts[0][1]) if len(parts) == 1 else sum(len(hosts) for _, hosts, _ in parts),
        when,
        None if deadline is None or math.isinf(deadline) else float(deadline),
        streaming,
        0 if streaming else len(marks) + (hold is not None),
    )
    return Entry(
        shell,
        request,
        shell.counters.of(direction),
        submitted_ns,
        priority,
        join,
        after,
        marks,
        hold,
        tracer.tags() if tracer is not None and tracer.active else None,
    )


def compute_marks(driver: Driver, after: After = "compute") -> tuple[Event, ...]:
    """Return the events that must land first, recorded on the calling thread.

    Raises:
        RequestError: `after` is nothing to wait for, or the stream captures a graph.
    """
    if driver.fences and driver.capturing():
        raise RequestError(
            "a request was submitted on a stream that captures a graph: what it must follow cannot "
            "be recorded there. Submit before the capture, or around the replay."
        )
    if isinstance(after, str):
        if after != "compute":
            raise RequestError(
                f"after={after!r}: it takes 'compute', an event, a stream, a sequence of them, or ()",
                value=after,
            )
        found: Sequence[Event] = driver.marks()
    else:
        found = driver.events(after)
    return tuple(event for event in found if not event.query()) if found else ()


def _due(now: float, priority: float, deadline: float | None) -> float:
    """Return when a request counts as late.

    Raises:
        RequestError: Priority or deadline are no numbers, or the deadline has passed.
    """
    if deadline is None and type(priority) is int and not priority:
        return now + PATIENCE
    try:
        step, end = real(priority), None if deadline is None else real(deadline)
    except TypeError:
        raise RequestError(
            f"priority is {shown(priority)} and deadline is {shown(deadline)}; both take numbers, and a "
            "deadline may be None"
        ) from None
    when = due(now, step, end)
    if not math.isfinite(when) and end != -math.inf:
        raise RequestError(f"priority is {priority!r}; it takes a finite number", value=priority)
    if end is not None and not end > now:
        raise RequestError(
            f"deadline {end:.6f} is not after now() = {now:.6f}; it is a time on the "
            "scheduler's clock, such as scheduler.now() + 0.5",
            value=deadline,
        )
    return when
