"""What all writers of trace events share: the clock, the process, the lanes, and who asked for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from offload.trace.joins import requests_of
from offload.trace.jsontext import quoted, us
from offload.trace.layout import Placement, place
from offload.trace.records import UNKNOWN, Request, Tags
from offload.trace.timeline import Timeline

NAMED_REQUESTS: Final = 16
"""Request ids named by one slice; a batch of hundreds would dwarf its own timings."""

ASYNC, FLOW_START, FLOW_STEP, FLOW_END, COUNT, INSTANT = 1, 4, 5, 6, 7, 8
"""Order of the rest at one instant: after the slices (which sort by minus their length), begins before ends."""

Event: TypeAlias = "tuple[int, int, str]"
"""`(ns since the origin, order at that instant, text)`."""


@attrs.frozen
class Frame:
    """One timeline, as its events are written."""

    timeline: Timeline
    zero: int
    """The nanosecond that `ts` counts from."""
    pid: int
    lanes: Placement
    batch_requests: Mapping[int, tuple[int, ...]]
    requests: Mapping[int, Request]
    by_issue: Sequence[int]
    """Indices of the copies whose enqueueing was stamped, in its order."""
    _told: dict[tuple[int, ...], str] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, timeline: Timeline, pid: int, shift_ns: int) -> Frame:
        """Lay the timeline out; every `ts` is moved by `shift_ns`."""
        copies = timeline.copies
        stamped = (index for index, copy in enumerate(copies) if copy.issue)
        return cls(
            timeline,
            timeline.origin_ns - shift_ns,
            pid,
            place(timeline),
            requests_of(timeline.plans),
            {one.request: one for one in timeline.requests},
            sorted(stamped, key=lambda index: copies[index].issue),
        )

    def named(self, requests: tuple[int, ...]) -> str:
        """Return the args that name requests and show the labels their callers gave them."""
        told = self._told.get(requests)  # all layers of a batch ask for the same
        if told is None:
            told = self._told[requests] = self._name(requests)
        return told

    def _name(self, requests: tuple[int, ...]) -> str:
        if not requests:
            return ""
        ids = requests[:NAMED_REQUESTS]
        text = f',"requests":"{" ".join(map(str, ids))}"'
        pages = [self.requests[i].pages for i in requests if i in self.requests]
        if len(pages) == len(requests):
            text += f',"pages":{sum(pages)}'
        tags = [tag_text(self.requests[i].tags) for i in ids if i in self.requests]
        if any(tags):
            text += f',"tags":{quoted("; ".join(filter(None, tags)))}'
        return text


def layered(verb: str, layer: int) -> str:
    return f"{verb} all" if layer < 0 else f"{verb} L{layer}"


def wait_args(layer: int, request: int, queued: int, length: int) -> str:
    text = f'"layer":{layer},"request":{request}'
    if queued != UNKNOWN:
        cause = "queue" if 2 * queued > length else "copy"
        text += f',"queue_us":{us(queued)},"cause":"{cause}"'
    return text


def tag_text(tags: Tags | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in (tags or {}).items())
