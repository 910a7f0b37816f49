"""A batch in the air: what a stream carries, and where its progress is published.

The stream's threads write; the loop and waiting threads read. Every number here only grows and is
written by one thread, so readers need no lock: a count that has been seen is true for ever. The order
of writes is what makes that safe: bytes, then count, then whoever waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import attrs

from offload.core.batch import Batch
from offload.core.plan import plan_copy
from offload.counters import DirectionCounters
from offload.driver.base import Event, Work
from offload.route import Route
from offload.route_copies import Copies
from offload.trace import Tracer

if TYPE_CHECKING:
    from offload.entry import Entry


LOOK_S = 0.5
"""How often a thread that waits looks whether the loop still exists."""


Waiter: TypeAlias = tuple[Callable[[], bool], bool, SimpleQueue[None]]
"""Whether a wake-up is news for a thread, whether issues are, and where it sleeps."""


def _always() -> bool:
    return True


@attrs.define(eq=False)
class WaitingThreads:
    """Wakes threads that wait for progress. One per scheduler.

    A waiter enters itself before it looks, and progress is written before waiters are looked up; so either the
    waiter sees the progress or who wakes sees the waiter. Nothing is locked for that: where no global lock orders
    threads, a processor may look before its write is seen, and a waiter that was missed looks itself after `LOOK_S`.
    Who wakes asks for each whether that is news: a thread that is woken for nothing costs a switch there and back,
    on a core that a forward needs.
    """

    waiters: list[Waiter] = attrs.field(factory=list)

    def wake(self) -> None:
        """Wake the threads for which it is news that something landed, broke or ended. Any thread."""
        for news, _, sleeper in self.waiters.copy():
            if news():
                sleeper.put(None)

    def wake_for_issue(self) -> None:
        """Wake those for which it is news that something was issued. Any thread."""
        for news, issue, sleeper in self.waiters.copy():
            if issue and news():
                sleeper.put(None)

    def wake_all(self) -> None:
        """Wake all: nothing that they wait for will come. Any thread."""
        for *_, sleeper in self.waiters.copy():
            sleeper.put(None)

    def wait(
        self,
        reached: Callable[[], bool],
        timeout: float | None,
        *,
        news: Callable[[], bool] = _always,
        issue: bool = False,
    ) -> bool:
        """Block this thread until `reached()`; return whether it was.

        Args:
            news: Whether a wake-up concerns this thread. Asked by threads that wake, so a few reads.
            issue: Whether issues do too.
        """
        end = None if timeout is None else time.monotonic() + timeout
        sleeper = SimpleQueue[None]()
        waiter = (news, issue, sleeper)
        self.waiters.append(waiter)
        try:
            while not reached():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                # A loop that is closed wakes nobody: who waits looks for that himself.
                with suppress(Empty):
                    sleeper.get(timeout=LOOK_S if left is None else min(left, LOOK_S))
            return True
        finally:
            self.waiters.remove(waiter)


@attrs.define(eq=False, repr=False)
class Flight:
    """One batch on its stream; the runtime half of `core.batch.Batch`."""

    batch: Batch
    route: Route
    waiting_threads: WaitingThreads
    report: Callable[[Flight], None]
    """Tell the loop that something changed. Any thread; never blocks."""

    counters: DirectionCounters
    tracer: Tracer | None
    stream: str
    clock: Callable[[], int]
    """Nanoseconds, on the driver's clock."""

    urgency: tuple[float, ...] = attrs.field(init=False)
    limit: int = attrs.field(init=False)
    """Layers below it may be enqueued. Written by the loop."""

    stopped: bool = False
    issued_layers: int = attrs.field(init=False)
    """Layers below it have been enqueued."""

    landed_layers: int = attrs.field(init=False)
    """Layers below it have landed."""

    error: BaseException | None = None
    error_layer: int = 0
    unprepared: bool = False
    """Whether it failed while it was prepared."""

    over: bool = False
    """Nothing of it touches memory any more."""

    uncounted: Exception | None = None
    """What a backend raised that could not count its copies. They have landed all the same."""

    reported: bool = False
    heard: bool = False
    """Whether the loop existed when it was told of the latest news."""

    watched: bool = False
    """Whether the loop wants to hear of each layer, not only of the last: somebody waits there, or
    another batch follows this one."""

    by_layer: bool = False
    """Whether somebody waits for single layers of it, or another batch follows this one: its layers are
    then enqueued one by one, also where they could go together."""

    issue_watched: bool = False
    """Whether it wants to hear of issues too."""

    entries: list[Entry] = attrs.field(factory=list)
    events: dict[int, Event] = attrs.field(factory=dict)
    _fenced: dict[int, int] = attrs.field(factory=dict)
    """The last layer of a request that some compute stream was ordered after, by request."""

    _copies: Copies | None = None
    _next: int = attrs.field(init=False)
    _issue_ns: dict[int, tuple[int, int]] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        batch = self.batch
        return f"<Flight {batch.id} {batch.direction}, layers {batch.first}-{batch.last - 1}>"

    def __attrs_post_init__(self) -> None:
        batch = self.batch
        self.hasten()
        self.limit = batch.limit
        self.issued_layers = self.landed_layers = self._next = batch.first

    def hasten(self) -> None:
        """Go before others on its stream from the next layer on, as urgent as its batch has become."""
        self.urgency = (self.batch.due, self.batch.id)

    # Called by the stream ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Plan the batch and make its copies ready."""
        tracer = self.tracer
        start = self.clock() if tracer is not None else 0
        parts = [part for piece in self.batch.pieces for part in piece.request.parts]
        try:
            self._copies = self.route.prepare(plan_copy(self.batch.direction, parts))
        except BaseException:
            self.unprepared = True
            raise
        if tracer is not None and tracer.active:
            ids = tuple(piece.request.id for piece in self.batch.pieces)
            end = self.clock()
            tracer.plan(self.batch.id, self.batch.direction, self.stream, start, end, ids)

    @property
    def traced(self) -> bool:
        """Whether somebody records now. Busy time is counted all the same, by stamps that cost nothing."""
        return self.tracer is not None and self.tracer.active

    @property
    def untouched(self) -> bool:
        """Whether no layer was ever handed out, and so no byte moved."""
        return self._next == self.batch.first

    @property
    def vain(self) -> bool:
        """Whether no byte of it has moved, and none will."""
        return self.untouched and (self.over or self.unprepared)

    @property
    def exhausted(self) -> bool:
        """Whether every layer has been handed out."""
        return self._next >= self.batch.last

    def next_layer(self) -> tuple[int, Work] | None:
        """Hand out the next layer that may go, or several as one: under the number of the last."""
        layer, copies = self._next, self._copies
        if layer >= self.limit or copies is None:
            return None
        if self.route.spans and self._together():
            end = self._next = copies.reach(layer, self.limit)
            if end > layer + 1:
                return end - 1, copies.span(layer, end)
        self._next = layer + 1
        return layer, copies.work(layer)

    def _together(self) -> bool:
        """Return whether nobody needs to know of layers one by one: no waiter, no follower, no trace."""
        return not (self.by_layer or self.traced) and self.limit == self.batch.last

    def issued(self, layer: int, event: Event, began_ns: int = 0) -> None:
        """Publish that a layer has been enqueued, and those before it that went as one with it."""
        if began_ns and self.traced:
            self._issue_ns[layer] = (began_ns, self.clock())
        self.events[layer] = event
        if self.issued_layers < layer:
            for each in range(self.issued_layers, layer):
                self.events[each] = event
        self.issued_layers = layer + 1
        if self.waiting_threads.waiters:
            self.waiting_threads.wake_for_issue()
        if self.issue_watched:
            self.report(self)

    def landed(self, layer: int, start_ns: int, end_ns: int) -> None:
        """Publish that the bytes of a layer are there: to threads at once, to the loop soon."""
        assert self._copies is not None
        first = self.landed_layers
        if first == layer:
            nbytes, ops, copies = self._copies.size(layer)
        else:
            nbytes, ops, copies = self._copies.span_size(first, layer + 1)
        self.counters.moved(start_ns, end_ns, nbytes, ops, copies)  # before anybody can look
        self.landed_layers = layer + 1
        last = layer + 1 == self.batch.last
        if last:
            self._close()
        if self.waiting_threads.waiters:
            self.waiting_threads.wake()
        if last or self.watched:
            self.report(self)
        tracer = self.tracer
        if tracer is not None and tracer.active:
            issue, issued = self._issue_ns.pop(layer, (start_ns, start_ns))
            batch = self.batch
            tracer.copy(
                batch.id, batch.direction, self.stream, layer,
                issue, issued, start_ns, end_ns, nbytes, ops, copies,
            )  # fmt: skip

    def fence(self, request: int, layer: int) -> Event | None:
        """Return the event for compute to wait on; None when the flight has broken and it means nothing.

        Noted before the error is read, and read by the loop after the error was written: so a copy that
        fails is repeated, or fenced, never both.
        """
        self._fenced[request] = max(layer, self._fenced.get(request, 0))
        return self.events.get(layer) if self.error is None else None

    def spoiled(self) -> frozenset[int]:
        """Return the requests that compute was fenced on before they landed. The flight has broken."""
        fenced, landed = self._fenced.copy(), self.landed_layers
        return frozenset(request for request, layer in fenced.items() if layer >= landed)

    def failed(self, layer: int, error: BaseException) -> None:
        """Publish that the copy of a layer raised: of the first that has not landed, if several went as one."""
        self.error_layer, self.error = min(layer, self.landed_layers), error
        self.waiting_threads.wake()
        self.report(self)

    def ended(self) -> None:
        """Publish that nothing of this batch touches memory any more; its last landing has said so already."""
        if not self.over:
            self._close()
            self.waiting_threads.wake()
            self.report(self)

    def _close(self) -> None:
        if self._copies is not None:
            self.uncounted = self._copies.uncounted
        self.over = True
        self._copies = None
