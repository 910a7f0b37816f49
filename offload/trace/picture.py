"""Timeline -> a static picture: one bar per lane, stalls in red, the four numbers in the title."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from offload.trace import lanes
from offload.trace.layout import Placement, place
from offload.trace.records import ASYNC_LANE, Copy, Layer, Step, Tick, Wait
from offload.trace.report import Report
from offload.trace.timeline import Timeline
from offload.trace.write import replacing

WIDTH: Final = 1200
LEFT: Final = 116
RIGHT: Final = 24
TOP: Final = 64
ROW: Final = 34
GAP: Final = 8
MIN_PIXELS: Final = 0.4
"""Slices narrower than this are drawn together with their neighbours: a long run stays a small file."""
LETTER_PIXELS: Final = 7
"""A slice gets its text when it is this much wide for each letter, and one more."""

INK, QUIET, GRID, PAPER, BED = "#1f2933", "#64748b", "#e2e8f0", "#ffffff", "#f4f6f9"
STALL: Final = "#dc2626"
LAYERS: Final = ("#7a9cc6", "#94b1d4")
"""Two blues in turn, so that neighbouring layers stay apart without borders."""
LOADS: Final = ("#2f9e6e", "#55b68c")
BACKUPS: Final = ("#c98a2b", "#dca754")
STEP: Final = "#dbe5f1"

Slice: TypeAlias = "tuple[int, int, str, str, str]"
"""`(start, end, colour, text, tooltip)`."""


def write(timeline: Timeline, path: Path, steps: int | None = None) -> Path:
    """Draw a timeline into `path`, as a whole or not at all.

    Args:
        timeline: What to draw.
        path: The file, `.svg`.
        steps: Draw that many forward passes, up to the last one that met a load; None: everything.
    """
    with replacing(path) as file:
        file.write(svg(timeline, steps=steps).encode())
    return path


def svg(timeline: Timeline, steps: int | None = None) -> str:
    """Return the picture as text."""
    window = span(timeline, steps)
    shown = clip(timeline, *window)
    return _Canvas(shown, *window).text()


def span(timeline: Timeline, steps: int | None) -> tuple[int, int]:
    """Return the first and the last nanosecond to draw."""
    slices: list[Step | Layer | Wait | Copy | Tick] = [
        *timeline.steps,
        *timeline.layers,
        *timeline.waits,
        *timeline.copies,
    ]
    if not slices:
        return 0, 1
    if steps is not None and timeline.steps:
        chosen = _steps_with_loads(timeline, steps)
        start, end = chosen[0].start, max(step.end for step in chosen)
        early = [
            c.start for c in timeline.copies if start - (end - start) // 8 < c.start < start < c.end
        ]
        return min([start, *early]), end
    return min(one.start for one in slices), max(one.end for one in slices)


def _steps_with_loads(timeline: Timeline, count: int) -> Sequence[Step]:
    loads = [copy for copy in timeline.copies if copy.direction == "load"]
    last = len(timeline.steps)
    for at in range(last, 0, -1):
        step = timeline.steps[at - 1]
        if any(copy.start < step.end and copy.end > step.start for copy in loads):
            last = at
            break
    return timeline.steps[max(0, last - max(1, count)) : last]


def clip(timeline: Timeline, start: int, end: int) -> Timeline:
    """Return what lies at least partly between two times."""
    return attrs.evolve(
        timeline,
        steps=tuple(one for one in timeline.steps if one.start < end and one.end > start),
        layers=tuple(one for one in timeline.layers if one.start < end and one.end > start),
        waits=tuple(one for one in timeline.waits if one.start < end and one.end > start),
        copies=tuple(one for one in timeline.copies if one.start < end and one.end > start),
        plans=(),
        ticks=(),
    )


class _Canvas:
    def __init__(self, timeline: Timeline, start: int, end: int) -> None:
        self._t = timeline
        self._start, self._end = start, max(end, start + 1)
        self._scale = (WIDTH - LEFT - RIGHT) / (self._end - self._start)
        self._rows = self._lanes(place(timeline))

    def text(self) -> str:
        height = TOP + len(self._rows) * (ROW + GAP) + 46
        report = Report.of(self._t)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        title = f"<title>offload timeline: {escape(report.headline())}</title>"
        paper = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>'
        parts = [head, title, paper, *self._title(report), *self._grid()]
        for number, (name, slices) in enumerate(self._rows):
            parts.extend(self._lane(TOP + number * (ROW + GAP), name, slices))
        parts.extend(self._legend(height - 20))
        return "\n".join((*parts, "</svg>\n"))

    def _lanes(self, placed: Placement) -> list[tuple[str, list[Slice]]]:
        """Return what each lane shows, top to bottom; empty lanes are left out."""
        rows: dict[int, list[Slice]] = {}
        for step, thread in zip(self._t.steps, placed.steps, strict=True):
            tip = f"step {step.number}: {_duration(step.end - step.start)}"
            rows.setdefault(thread, []).append((step.start, step.end, STEP, "", tip))
        for layer, thread in zip(self._t.layers, placed.layers, strict=True):
            rows.setdefault(thread, []).append(_layer(layer))
        for wait, thread in zip(self._t.waits, placed.waits, strict=True):
            if wait.lane != ASYNC_LANE:
                rows.setdefault(thread, []).append(_wait(wait))
        for copy, thread in zip(self._t.copies, placed.copies, strict=True):
            rows.setdefault(thread, []).append(_copy(copy))
        return [(lanes.name(tid), rows[tid]) for tid in sorted(rows, key=lanes.sort_index)]

    def _x(self, ns: int) -> float:
        return LEFT + (min(max(ns, self._start), self._end) - self._start) * self._scale

    def _title(self, report: Report) -> Iterator[str]:
        measured = not report.unmeasured_waits
        stalled = f"{report.stall_ratio:.1%} stalled" if measured else report.stalled
        rest = (
            f" of {_duration(report.forward_ns)} forward  ·  load {report.load.rate}, "
            f"{report.load.overlap:.0%} hidden behind compute  ·  backup {report.backup.rate}"
            f"  ·  {report.coalescing:.1f}x coalesced"
        )
        yield (
            f'<text x="24" y="30" font-size="16" fill="{INK}"><tspan font-weight="700" '
            f'fill="{STALL}">{stalled}</tspan>{escape(rest)}</text>'
        )

    def _grid(self) -> Iterator[str]:
        bottom = TOP + len(self._rows) * (ROW + GAP)
        for ns in _ticks(self._end - self._start):
            x = self._x(self._start + ns)
            yield f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="{GRID}"/>'
            yield (
                f'<text x="{x:.1f}" y="{TOP - 13}" font-size="11" text-anchor="middle" '
                f'fill="{QUIET}">{_duration(ns)}</text>'
            )

    def _lane(self, y: int, name: str, slices: Iterable[Slice]) -> Iterator[str]:
        yield (
            f'<text x="{LEFT - 12}" y="{y + ROW / 2 + 4.5}" font-size="13" text-anchor="end" '
            f'fill="{INK}">{escape(name)}</text>'
        )
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" rx="3" fill="{BED}"/>'
        )
        for one in self._merged(slices):
            yield from self._box(y, one)

    def _merged(self, slices: Iterable[Slice]) -> Iterator[Slice]:
        """Join slices too narrow to see with their neighbours; steps lie below, stalls above the rest."""
        narrow: Slice | None = None
        for one in sorted(slices, key=lambda item: (_depth(item), item[0])):
            if (one[1] - one[0]) * self._scale >= MIN_PIXELS:
                yield one
                continue
            apart = (one[0] - narrow[1]) * self._scale if narrow else 0.0
            if narrow and _depth(narrow) == _depth(one) and apart < MIN_PIXELS:
                narrow = narrow[0], one[1], narrow[2], "", "several"
                continue
            if narrow:
                yield narrow
            narrow = one
        if narrow:
            yield narrow

    def _box(self, y: int, one: Slice) -> Iterator[str]:
        start, end, colour, label, tip = one
        x = self._x(start)
        width = max(self._x(end) - x, MIN_PIXELS)
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if label and width >= LETTER_PIXELS * (len(label) + 1):
            yield (
                f'<text x="{x + width / 2:.1f}" y="{y + ROW / 2 + 4}" font-size="11" '
                f'text-anchor="middle" fill="#ffffff" pointer-events="none">{escape(label)}</text>'
            )

    def _legend(self, y: int) -> Iterator[str]:
        x = LEFT
        for colour, text in (
            (LAYERS[0], "layer computes"),
            (STALL, "forward stalled, waiting for a layer"),
            (LOADS[0], "load"),
            (BACKUPS[0], "backup"),
            (STEP, "forward, outside the layers"),
        ):
            yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>'
            yield f'<text x="{x + 18}" y="{y}" font-size="12" fill="{QUIET}">{text}</text>'
            x += 42 + round(5.9 * len(text))


def _layer(one: Layer) -> Slice:
    tip = f"layer {one.layer}: {_duration(one.end - one.start)}"
    return one.start, one.end, LAYERS[one.layer % 2], str(one.layer), tip


def _wait(one: Wait) -> Slice:
    tip = f"wait for layer {one.layer}: {_duration(one.end - one.start)}"
    return one.start, one.end, STALL, "stall", tip


def _copy(one: Copy) -> Slice:
    colours = LOADS if one.direction == "load" else BACKUPS
    dur = one.end - one.start
    tip = f"{one.direction} layer {one.layer}: {_duration(dur)}, {one.nbytes / 1e6:.2f} MB"
    return one.start, one.end, colours[one.layer % 2], f"L{one.layer}", tip


def _depth(one: Slice) -> int:
    return 0 if one[2] == STEP else 2 if one[2] == STALL else 1


def _duration(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns} ns" if ns else "0"


def _ticks(length: int) -> Iterator[int]:
    """Yield round times from 0 to `length`, five to ten of them."""
    step = 1
    while length / step > 10:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    yield from range(0, length + 1, step)
