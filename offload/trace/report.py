"""Timeline -> the numbers: how much of the forward was spent waiting, why, and how fast the copies were.

Every number says what it is made of, because each has been got wrong somewhere:

    GB/s      bytes / the union of the copies' intervals. Overlapping copies never add up to more than the link.
    hidden    |union(copies) and union(layers)| / |union(copies)|: the share of copying that cost no forward time.
    stall     the sum of the waits that held a forward. A wait is queued until its copy starts, copying after that.
    coalesced copies asked for / copies made.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from offload.errors import counted, sized
from offload.trace.records import ASYNC_LANE, UNKNOWN, Copy, Layer, Step, Wait
from offload.trace.timeline import Timeline

Intervals = Sequence[tuple[int, int]]

BAR: Final = 24
"""Width of the longest bar."""


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same points of time as disjoint intervals, sorted."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> int:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersection(left: Intervals, right: Intervals) -> int:
    """Return the length that two sorted lists of disjoint intervals share."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


@attrs.frozen
class DirectionReport:
    """What one direction moved."""

    copies: int
    """Layers of batches that landed."""
    nbytes: int
    """Bytes that landed."""
    busy_ns: int
    """Time in which at least one copy ran."""
    hidden_ns: int
    """How much of that lay behind the compute of a layer."""
    requests: int = 0
    """Requests that settled, or were under way when the report was made."""
    failed: int = 0
    """How many of them failed."""
    cancelled: int = 0
    """How many of them were cancelled."""

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) per second of busy time."""
        return self.nbytes / self.busy_ns if self.busy_ns else 0.0

    @property
    def rate(self) -> str:
        """The same as text, in a unit that fits: `26.5 GB/s`."""
        return f"{sized(self.gbps * 1e9)}/s"

    @property
    def overlap(self) -> float:
        """Share of the busy time that was hidden behind compute."""
        return self.hidden_ns / self.busy_ns if self.busy_ns else 0.0


@attrs.frozen
class LayerReport:
    """What one layer waited for."""

    layer: int
    waits: int
    stall_ns: int
    queued_ns: int
    """How much of the stall passed before the layer's copy had started: bound by scheduling."""
    copying_ns: int
    """How much passed while it was copied: bound by bandwidth."""
    load_ns: int
    """Busy time of the loads of this layer."""
    load_nbytes: int

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) per second of this layer's loads."""
        return self.load_nbytes / self.load_ns if self.load_ns else 0.0


@attrs.frozen
class Report:
    """The stall report. Printed as text; `to_json` for machines."""

    steps: int
    """Forward passes."""
    forward_ns: int
    """Time inside forward passes; of the layers, where no passes were recorded."""
    stall_ns: int
    """Time that forwards spent waiting for layers."""
    waits: int
    """Waits that suspended a forward."""
    ready_waits: int
    """Waits that found their layer landed."""
    unmeasured_waits: int
    """Waits of compute streams whose length nobody measured: they are no part of the stall."""
    await_ns: int
    """Time that tasks spent awaiting layers; it held no forward."""
    load: DirectionReport
    backup: DirectionReport
    ops: int
    """Copies asked for, before requests were merged and pages coalesced."""
    transfers: int
    """Copies made."""
    requests: int
    """Requests that settled, or were under way when the report was made."""
    records: int
    dropped: int
    """Records lost because the ring was full: all numbers are of what is left."""
    layers: tuple[LayerReport, ...]

    @property
    def stall_ratio(self) -> float:
        """Share of the forward that was spent waiting."""
        return self.stall_ns / self.forward_ns if self.forward_ns else 0.0

    @property
    def overlap_load(self) -> float:
        """Share of the load time that was hidden behind compute."""
        return self.load.overlap

    @property
    def load_gbps(self) -> float:
        """Gigabytes (1e9) per second of loading."""
        return self.load.gbps

    @property
    def coalescing(self) -> float:
        """Copies asked for per copy made."""
        return self.ops / self.transfers if self.transfers else 0.0

    @classmethod
    def of(cls, timeline: Timeline) -> Report:
        """Sum a timeline up."""
        held = [wait for wait in timeline.waits if wait.lane != ASYNC_LANE]
        compute = union((one.start, one.end) for one in timeline.layers)
        spans: tuple[Step | Layer | Wait, ...] = timeline.steps or (*timeline.layers, *held)
        return cls(
            steps=len(timeline.steps),
            forward_ns=sum(one.end - one.start for one in spans),
            stall_ns=sum(wait.end - wait.start for wait in held),
            waits=len(held),
            ready_waits=timeline.ready,
            unmeasured_waits=timeline.unmeasured,
            await_ns=sum(wait.end - wait.start for wait in timeline.waits) - _total(held),
            load=_direction(timeline, "load", compute),
            backup=_direction(timeline, "backup", compute),
            ops=sum(copy.ops for copy in timeline.copies),
            transfers=sum(copy.transfers for copy in timeline.copies),
            requests=len(timeline.requests),
            records=timeline.records,
            dropped=timeline.dropped,
            layers=_layers(timeline.copies, held),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and all ratios, ready for JSON."""
        derived = ("stall_ratio", "overlap_load", "load_gbps", "coalescing")
        return attrs.asdict(self) | {name: getattr(self, name) for name in derived}

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def headline(self) -> str:
        """Return the four numbers in one line."""
        return (
            f"{self.stalled} of forward · load {self.load.rate}, "
            f"{self.load.overlap:.1%} hidden · backup {self.backup.rate} · "
            f"{self.coalescing:.2f}x coalesced"
        )

    @property
    def stalled(self) -> str:
        """The share of the forward that was spent waiting, as text: `stalled 15.5%`."""
        if not self.unmeasured_waits:
            return f"stalled {self.stall_ratio:.1%}"
        return f"stalled at least {self.stall_ratio:.1%}" if self.waits else "unmeasured stalls"

    def __str__(self) -> str:
        return "\n".join((*self._summary(), *self._table()))

    def _summary(self) -> list[str]:
        forward = f"{counted(self.steps, 'step')}, {self.forward_ns / 1e6:.2f} ms in forward"
        text = [
            f"offload report   {forward}   ({counted(self.records, 'record')})",
            "",
            _stall_line(self),
            _line("load", self.load),
            _line("backup", self.backup),
            f"  coalescing  {self.ops} ops -> {self.transfers} transfers   ({self.coalescing:.2f}x)",
        ]
        if any(one.failed or one.cancelled for one in (self.load, self.backup)):
            told = (_outcomes("load", self.load), _outcomes("backup", self.backup))
            text.append(f"  requests    {', '.join(each for each in told if each)}")
        if self.await_ns:
            text.append(f"  tasks awaited layers for {self.await_ns / 1e6:.3f} ms beside that")
        if self.unmeasured_waits and (self.waits or not self.forward_ns):
            text.append(
                f"  not measured: {counted(self.unmeasured_waits, 'wait')} of a compute stream"
            )
        if self.dropped:
            text.append(f"  RING FULL: oldest lost ({counted(self.dropped, 'record')})")
        return text

    def _table(self) -> list[str]:
        if not self.layers:
            return []
        longest = max(row.stall_ns for row in self.layers) or 1
        head = "  layer   waits   stall us   of it: queued   copying     load us   GB/s   stall"
        return ["", head, *(_row(row, longest).rstrip() for row in self.layers), "", *_LEGEND]


_LEGEND: Final = (
    "  stall: a forward waited for the layer; queued until its copy began, copying after that.",
    "  load: a load of the layer was running, whoever waited. All are sums over the steps.",
)


def _total(waits: Iterable[Wait]) -> int:
    return sum(wait.end - wait.start for wait in waits)


def _direction(timeline: Timeline, direction: str, compute: Intervals) -> DirectionReport:
    mine = [copy for copy in timeline.copies if copy.direction == direction]
    ended = [one.outcome for one in timeline.requests if one.direction == direction]
    busy = union((copy.start, copy.end) for copy in mine)
    return DirectionReport(
        copies=len(mine),
        nbytes=sum(copy.nbytes for copy in mine),
        busy_ns=length(busy),
        hidden_ns=intersection(busy, compute),
        requests=len(ended),
        failed=ended.count("failed"),
        cancelled=ended.count("cancelled"),
    )


def _layers(copies: Iterable[Copy], waits: Iterable[Wait]) -> tuple[LayerReport, ...]:
    loads: dict[int, list[Copy]] = defaultdict(list)
    held: dict[int, list[Wait]] = defaultdict(list)
    for copy in copies:
        if copy.direction == "load":
            loads[copy.layer].append(copy)
    for wait in waits:
        held[wait.layer].append(wait)
    return tuple(
        _layer(layer, loads.get(layer, []), held.get(layer, []))
        for layer in sorted(loads.keys() | held.keys())
    )


def _layer(layer: int, loads: Sequence[Copy], waits: Sequence[Wait]) -> LayerReport:
    told = [wait for wait in waits if wait.queued != UNKNOWN]
    queued = sum(wait.queued for wait in told)
    return LayerReport(
        layer=layer,
        waits=len(waits),
        stall_ns=_total(waits),
        queued_ns=queued,
        copying_ns=_total(told) - queued,
        load_ns=length(union((copy.start, copy.end) for copy in loads)),
        load_nbytes=sum(copy.nbytes for copy in loads),
    )


def _stall_line(report: Report) -> str:
    if not report.forward_ns:
        return "  no forward was recorded: layerwise.attach(...) records them"
    if report.unmeasured_waits and not report.waits:
        waits = counted(report.unmeasured_waits, "wait")
        return f"  stalled waiting for loads: not measured ({waits} of a compute stream)"
    ms = f"{report.stall_ns / 1e6:10.3f} ms"
    return f"  stalled waiting for loads {ms}  {report.stall_ratio:8.1%} of forward"


def _line(name: str, one: DirectionReport) -> str:
    if not one.copies:
        return f"  {name:7} nothing"
    return (
        f"  {name:7} {sized(one.nbytes):>13} {one.rate:>12}"
        f"  {one.overlap:7.1%} hidden behind compute"
    )


def _outcomes(name: str, one: DirectionReport) -> str:
    """Return how many requests there were and how many came to nothing: `8 loads (6 failed)`."""
    if not one.requests:
        return ""
    counts = {"failed": one.failed, "cancelled": one.cancelled}
    bad = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
    return f"{counted(one.requests, name)} ({bad})" if bad else counted(one.requests, name)


def _row(row: LayerReport, longest: int) -> str:
    name = "all" if row.layer < 0 else str(row.layer)
    bar = "#" * round(BAR * row.stall_ns / longest)
    return (
        f"  {name:>5} {row.waits:7} {row.stall_ns / 1e3:10.1f} {row.queued_ns / 1e3:15.1f}"
        f" {row.copying_ns / 1e3:9.1f} {row.load_ns / 1e3:11.1f} {row.gbps:6.2f}   {bar}"
    )
