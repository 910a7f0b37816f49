"""Counters made from the records, those that were recorded, and instants."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import attrs

from offload.trace import lanes
from offload.trace.events_frame import COUNT, INSTANT, Event, Frame
from offload.trace.jsontext import arguments, quoted, us

DERIVED_COUNTERS: Final = ("bytes in flight", "queue")
"""Counters made at export from the records, rather than recorded."""


@attrs.frozen
class Counts:
    """Counter and instant events, sorted within each source."""

    _frame: Frame

    def sources(self) -> list[Iterator[Event]]:
        """Return one sorted source of events per kind."""
        return [self._bytes_in_flight(), self._queue(), self._counters(), self._instants()]

    def _count(self, name: str, ns: int, values: str) -> Event:
        at = ns - self._frame.zero
        return (
            at,
            COUNT,
            f'{{"ph":"C","name":{quoted(name)},"pid":{self._frame.pid},"ts":{us(at)},"args":{{{values}}}}}',
        )

    def _bytes_in_flight(self) -> Iterator[Event]:
        # One of no length would end before it began: it is in flight at no time.
        copies = [one for one in self._frame.timeline.copies if one.end > one.start]
        begins = ((one.start, one.nbytes, one.direction) for one in copies)
        ends = [(one.end, -one.nbytes, one.direction) for one in copies]
        ends.sort()
        level = {"load": 0, "backup": 0}
        for ns, change, direction in heapq.merge(ends, begins, key=lambda item: item[0]):
            level[direction] += change
            yield self._count(
                "bytes in flight", ns, f'"h2d":{level["load"]},"d2h":{level["backup"]}'
            )

    def _queue(self) -> Iterator[Event]:
        requests = self._frame.timeline.requests
        begins = ((one.start, 1, one.direction) for one in requests)
        ends = sorted((one.issued or one.end, -1, one.direction) for one in requests)
        level = {"load": 0, "backup": 0}
        for ns, change, direction in heapq.merge(begins, ends, key=lambda item: item[0]):
            level[direction] += change
            yield self._count("queue", ns, f'"load":{level["load"]},"backup":{level["backup"]}')

    def _counters(self) -> Iterator[Event]:
        for one in self._frame.timeline.counters:
            yield self._count(one.name, one.start, arguments(one.values))

    def _instants(self) -> Iterator[Event]:
        for one in self._frame.timeline.instants:
            at = one.start - self._frame.zero
            yield (
                at,
                INSTANT,
                (
                    f'{{"ph":"i","s":"t","cat":"offload.event","name":{quoted(one.name)},'
                    f'"pid":{self._frame.pid},"tid":{lanes.SCHEDULER},"ts":{us(at)},'
                    f'"args":{{{arguments(one.args or {})}}}}}'
                ),
            )
