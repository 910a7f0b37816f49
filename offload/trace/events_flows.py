"""Arrows: from the issue of a copy to the copy, and from there to each layer that read what it brought."""

from __future__ import annotations

from collections.abc import Iterator

from offload.trace.events_frame import FLOW_END, FLOW_START, FLOW_STEP, Event, Frame
from offload.trace.joins import readers_of
from offload.trace.jsontext import us
from offload.trace.records import Copy


class Flows:
    """Flow events, sorted within each source."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._edges = list(readers_of(frame.timeline))
        self._consumed = {copy for copy, _, first in self._edges if first}

    def sources(self) -> list[Iterator[Event]]:
        """Return one sorted source of events per kind of point."""
        return [
            self._flow_issues(),
            self._flow_copies(),
            self._flow_extra_starts(),
            self._flow_layers(),
        ]

    def _flow(self, ph: str, name: str, ident: int, thread: int, ns: int) -> Event:
        at = ns - self._frame.zero
        order = {"s": FLOW_START, "t": FLOW_STEP, "f": FLOW_END}[ph]
        enclosing = ',"bp":"e"' if ph == "f" else ""
        return (
            at,
            order,
            (
                f'{{"ph":"{ph}","cat":"offload.flow","name":"{name}","id":{self._flow_id(ident)},'
                f'"pid":{self._frame.pid},"tid":{thread},"ts":{us(at)}{enclosing}}}'
            ),
        )

    def _flow_id(self, ident: int) -> int:
        """Return an id of its own for each chain, apart from those of other ranks: flow ids are global."""
        return (self._frame.timeline.rank << 40) + ident + 1

    def _starts_at_issue(self, copy: Copy) -> bool:
        return 0 < copy.issue <= copy.start

    def _flow_issues(self) -> Iterator[Event]:
        for i in self._frame.by_issue:
            one = self._frame.timeline.copies[i]
            if self._starts_at_issue(one):
                yield self._flow("s", one.direction, i, self._frame.lanes.issues[i], one.issue)

    def _flow_copies(self) -> Iterator[Event]:
        for i, one in enumerate(self._frame.timeline.copies):
            from_issue, onward = self._starts_at_issue(one), i in self._consumed
            if from_issue or onward:
                ph = "s" if not from_issue else "t" if onward else "f"
                yield self._flow(ph, one.direction, i, self._frame.lanes.copies[i], one.start)

    def _flow_extra_starts(self) -> Iterator[Event]:
        extras = [
            (copy, number) for number, (copy, _, first) in enumerate(self._edges) if not first
        ]
        for copy, number in sorted(extras):
            one = self._frame.timeline.copies[copy]
            ident = len(self._frame.timeline.copies) + number
            yield self._flow("s", one.direction, ident, self._frame.lanes.copies[copy], one.start)

    def _flow_layers(self) -> Iterator[Event]:
        timeline, lanes = self._frame.timeline, self._frame.lanes
        for number, (copy, layer, first) in enumerate(self._edges):
            ident = copy if first else len(timeline.copies) + number
            direction, start = timeline.copies[copy].direction, timeline.layers[layer].start
            yield self._flow("f", direction, ident, lanes.layers[layer], start)
