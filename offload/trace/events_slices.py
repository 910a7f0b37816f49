"""Slices of the thread lanes: steps, waits, layers, turns, plans, issues and copies."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from offload.trace.events_frame import Event, Frame, layered, wait_args
from offload.trace.jsontext import quoted, us
from offload.trace.records import ASYNC_LANE, Copy


@attrs.frozen
class Slices:
    """Complete events, sorted within each source."""

    _frame: Frame

    def sources(self) -> list[Iterator[Event]]:
        """Return one sorted source of events per kind of slice."""
        return [
            self._steps(),
            self._waits(),
            self._layers(),
            self._ticks(),
            self._plans(),
            self._issues(),
            self._copies(),
        ]

    def _slice(
        self, thread: int, start: int, dur: int, cat: str, name: str, args: str, leaf: bool = True
    ) -> Event:
        if leaf and dur > 0:
            dur -= 1
        at = start - self._frame.zero
        return (
            at,
            -dur,
            (
                f'{{"ph":"X","cat":"offload.{cat}","name":"{name}","pid":{self._frame.pid},"tid":{thread},'
                f'"ts":{us(at)},"dur":{us(dur)},"args":{{{args}}}}}'
            ),
        )

    def _steps(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.steps, self._frame.lanes.steps, strict=True):
            args = f'"step":{one.number}'
            yield self._slice(
                thread, one.start, one.end - one.start, "step", f"step {one.number}", args, False
            )

    def _waits(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.waits, self._frame.lanes.waits, strict=True):
            if one.lane != ASYNC_LANE:
                args = wait_args(one.layer, one.request, one.queued, one.end - one.start)
                yield self._slice(
                    thread,
                    one.start,
                    one.end - one.start,
                    "wait",
                    layered("wait", one.layer),
                    args,
                )

    def _layers(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.layers, self._frame.lanes.layers, strict=True):
            args = f'"layer":{one.layer}' + self._frame.named(one.requests)
            yield self._slice(
                thread, one.start, one.end - one.start, "layer", f"layer {one.layer}", args
            )

    def _ticks(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.ticks, self._frame.lanes.ticks, strict=True):
            yield self._slice(thread, one.start, one.end - one.start, "tick", "tick", "", False)

    def _plans(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.plans, self._frame.lanes.plans, strict=True):
            args = f'"batch":{one.batch}' + self._frame.named(one.requests)
            yield self._slice(
                thread, one.start, one.end - one.start, "issue", f"plan {one.direction}", args
            )

    def _issues(self) -> Iterator[Event]:
        for i in self._frame.by_issue:
            one, thread = self._frame.timeline.copies[i], self._frame.lanes.issues[i]
            yield self._slice(
                thread,
                one.issue,
                one.issued - one.issue,
                "issue",
                f"issue {one.direction} L{one.layer}",
                f'"layer":{one.layer},"batch":{one.batch}',
            )

    def _copies(self) -> Iterator[Event]:
        for one, thread in zip(self._frame.timeline.copies, self._frame.lanes.copies, strict=True):
            yield self._slice(
                thread,
                one.start,
                one.end - one.start,
                one.direction,
                f"{one.direction} L{one.layer}",
                self._copy_args(one),
            )

    def _copy_args(self, one: Copy) -> str:
        dur = one.end - one.start
        text = (
            f'"layer":{one.layer},"batch":{one.batch},"nbytes":{one.nbytes},"ops":{one.ops},'
            f'"transfers":{one.transfers},"cuda_stream":{quoted(one.stream)}'
        )
        if dur:
            text += f',"gbps":{one.nbytes / dur:.3f}'
        if one.issue:
            text += f',"queue_us":{us(max(0, one.start - one.issue))}'
        return text + self._frame.named(self._frame.batch_requests.get(one.batch, ()))
