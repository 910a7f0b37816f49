"""The first half of a submit: every check, in the caller's frame, before anything is queued.

What comes out is a `Submission`: checked, resolved, stamped, with the compute marks recorded on the
thread that called. Nothing in it belongs to the loop yet, so any thread may make one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike
from offload.core.request import PATIENCE, Part, Request, due
from offload.driver.base import Driver, Event
from offload.errors import RequestError
from offload.group import PagePair, PoolGroup
from offload.route import Route, Router
from offload.trace import Tracer

After: TypeAlias = object
"""`"compute"`; an event, a stream, or a sequence of them; `()` for nothing."""

Tags: TypeAlias = "Mapping[str, str | int | float | bool | None]"


@attrs.define(eq=False)
class Hold:
    """Requests of one thread that are kept back until its `hold` block ends."""

    depth: int = 0
    pieces: list[int] = attrs.field(factory=list)
    inside: list[object] = attrs.field(factory=list)
    """The tasks, or threads, that are in the block."""


class _Held(threading.local):
    """The hold of each thread; it goes when the thread does."""

    hold: Hold | None = None


@attrs.define(eq=False)
class Submission:
    """A request that passed all checks and has no id yet."""

    direction: Direction
    parts: tuple[Part, ...]
    route: Route
    nbytes: int
    num_pages: int
    priority: float
    due: float
    deadline: float | None
    submitted_ns: int
    streaming: bool
    join: bool
    after: After
    marks: tuple[Event, ...]
    hold: Hold | None
    tags: Tags | None

    def request(self, number: int) -> Request:
        """Return the request, which takes its place in the order of submission now."""
        blockers = len(self.marks) + (self.hold is not None)
        return Request(
            number,
            self.direction,
            self.parts,
            self.route,
            self.nbytes,
            self.num_pages,
            self.due,
            self.deadline,
            self.streaming,
            0 if self.streaming else blockers,
        )


@attrs.define(eq=False)
class Desk:
    """Takes what callers ask for and makes submissions of it."""

    group: PoolGroup
    router: Router
    driver: Driver
    tracer: Tracer | None
    _held: _Held = attrs.field(factory=lambda: _Held())

    def submission(
        self,
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
    ) -> Submission:
        """Check a request and resolve its pair.

        Raises:
            RequestError: Pages, deadline or `after` are wrong, or the stream captures a graph.
            UnsupportedPairError: The pair cannot be copied.
            UnknownNameError: No such io backend or member.
        """
        submitted_ns = self.driver.now_ns()
        route = self.router.route(direction, io_backend)
        parts = self.group.parts(direction, host_pages, device_pages, members)
        now = self.driver.now()
        when = _due(now, priority, deadline)
        if streaming and (not isinstance(after, str) or after != "compute"):
            raise RequestError(
                f"after={after!r} does not apply to a streaming backup: layer_written orders each layer "
                "after the compute that wrote it"
            )
        tracer = self.tracer
        return Submission(
            direction,
            parts,
            route,
            self.group.nbytes(parts),
            len(parts[0][1]) if len(parts) == 1 else sum(len(hosts) for _, hosts, _ in parts),
            priority,
            when,
            None if deadline is None or math.isinf(deadline) else deadline,
            submitted_ns,
            streaming,
            join,
            after,
            () if streaming else self.marks(after),
            self.holding(),
            tracer.tags() if tracer is not None and tracer.active else None,
        )

    def marks(self, after: After) -> tuple[Event, ...]:
        """Return the events that must land first, recorded on the calling thread.

        Raises:
            RequestError: `after` is nothing to wait for, or the stream captures a graph.
        """
        if self.driver.fences and self.driver.capturing():
            raise RequestError(
                "a request was submitted on a stream that captures a graph: what it must follow cannot "
                "be recorded there. Submit before the capture, or around the replay."
            )
        if after == "compute":
            found: Sequence[Event] = self.driver.marks()
        elif isinstance(after, str):
            raise RequestError(
                f"after={after!r}: it takes 'compute', an event, a stream, a sequence of them, or ()",
                value=after,
            )
        else:
            found = self.driver.events(after)
        return tuple(event for event in found if not event.query()) if found else ()

    def hold(self) -> Hold:
        """Keep back what the calling thread submits from now on, until `release`."""
        hold = self.holding()
        if hold is None:
            hold = self._held.hold = Hold()
        hold.depth += 1
        return hold

    def holding(self) -> Hold | None:
        """Return what keeps back the requests of the calling thread, if anything does."""
        hold = self._held.hold
        return hold if hold is not None and hold.depth else None

    def release(self, hold: Hold) -> list[int]:
        """End one level of a hold, on whatever thread; return the pieces to let go when it was the last."""
        hold.depth -= 1
        if hold.depth:
            return []
        pieces, hold.pieces = hold.pieces, []
        return pieces


def _due(now: float, priority: float, deadline: float | None) -> float:
    """Return when a request counts as late.

    Raises:
        RequestError: Priority or deadline are no numbers, or the deadline has passed.
    """
    if deadline is None and priority == 0:
        return now + PATIENCE
    try:
        when = due(now, priority, deadline)
        if not math.isfinite(when) and deadline != -math.inf:
            raise RequestError(
                f"priority is {priority!r}; it takes a finite number", value=priority
            )
        if deadline is None or deadline > now:
            return when
    except TypeError:
        raise RequestError(
            f"priority is {priority!r} and deadline is {deadline!r}; both take numbers, and a "
            "deadline may be None"
        ) from None
    raise RequestError(
        f"deadline {deadline:.6f} is not after now() = {now:.6f}; it is a time on the "
        "scheduler's clock, such as scheduler.now() + 0.5",
        value=deadline,
    )
