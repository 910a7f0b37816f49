"""Spans that cross an `await`: requests from submit to settled, and tasks that awaited a layer."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from offload.trace import lanes
from offload.trace.events_frame import ASYNC, Event, Frame, layered, wait_args
from offload.trace.jsontext import arguments, quoted, us
from offload.trace.records import ASYNC_LANE, Request, Wait


@attrs.frozen
class Spans:
    """Asynchronous begin and end events, sorted within each source."""

    _frame: Frame

    def sources(self) -> list[Iterator[Event]]:
        """Return one sorted source of events per kind of begin or end."""
        return [
            self._submits(),
            self._leaves_queue(),
            self._settles(),
            self._awaits_begin(),
            self._awaits_end(),
        ]

    def _span(
        self, ph: str, cat: str, ident: int, name: str, ns: int, order: int, args: str = ""
    ) -> Event:
        at = ns - self._frame.zero
        return (
            at,
            order,
            (
                f'{{"ph":"{ph}","cat":"offload.{cat}","id2":{{"local":"{ident:#x}"}},"name":"{name}",'
                f'"pid":{self._frame.pid},"tid":{lanes.SCHEDULER},"ts":{us(at)},"args":{{{args}}}}}'
            ),
        )

    def _submits(self) -> Iterator[Event]:
        for one in self._frame.timeline.requests:
            yield self._span(
                "b", "request", one.request, "request", one.start, ASYNC, _request_args(one)
            )
            yield self._span("b", "request", one.request, "queued", one.start, ASYNC)

    def _leaves_queue(self) -> Iterator[Event]:
        for one in sorted(self._frame.timeline.requests, key=left_queue):
            yield self._span("e", "request", one.request, "queued", left_queue(one), ASYNC + 1)
            if one.issued:
                yield self._span("b", "request", one.request, moving(one), one.issued, ASYNC + 1)

    def _settles(self) -> Iterator[Event]:
        for one in sorted(self._frame.timeline.requests, key=lambda request: request.end):
            if one.issued:
                yield self._span("e", "request", one.request, moving(one), one.end, ASYNC + 2)
            yield self._span("e", "request", one.request, "request", one.end, ASYNC + 2)

    def _awaits_begin(self) -> Iterator[Event]:
        for ident, one in self._awaits():
            args = wait_args(one.layer, one.request, one.queued, one.end - one.start)
            name = layered("await", one.layer)
            yield self._span("b", "await", ident, name, one.start, ASYNC, args)

    def _awaits_end(self) -> Iterator[Event]:
        for ident, one in sorted(self._awaits(), key=lambda item: item[1].end):
            name = layered("await", one.layer)
            yield self._span("e", "await", ident, name, one.end, ASYNC + 2)

    def _awaits(self) -> Iterator[tuple[int, Wait]]:
        return (
            (i + 1, wait)
            for i, wait in enumerate(self._frame.timeline.waits)
            if wait.lane == ASYNC_LANE
        )


def left_queue(request: Request) -> int:
    return request.issued or request.end


def moving(request: Request) -> str:
    return "loading" if request.direction == "load" else "backing up"


def _request_args(one: Request) -> str:
    text = (
        f'"request":{one.request},"direction":"{one.direction}","nbytes":{one.nbytes},'
        f'"pages":{one.pages},"outcome":{quoted(one.outcome)}'
    )
    if one.issued:
        text += f',"queue_us":{us(max(0, one.issued - one.start))}'
    if one.outcome == "unfinished":
        text += ',"unfinished":true'
    if one.tags:
        text += "," + arguments(one.tags, prefix="tag.")
    return text
