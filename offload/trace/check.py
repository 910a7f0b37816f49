"""Is this trace one that every reader takes as it is?

Readers drop what they do not like and say little about it: a slice that overlaps another, an arrow without
an end, a whole file with one NaN in it. `check` says it, in words, before they do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from offload.errors import NotATrace
from offload.trace.read import load, ns
from offload.trace.report import union

Event = Mapping[str, Any]

MAX_ID: Final = 2**32 - 1
"""Thread and process ids above it all become 0 in Perfetto, and share one lane."""

YEAR_NS: Final = 365 * 86_400 * 10**9
"""A slice longer than this has its unit wrong."""

SHOWN: Final = 5
"""Problems of one sort that are told one by one."""


@attrs.frozen
class Problem:
    """One thing that a reader would drop, misdraw or refuse."""

    sort: str
    """`json`, `slice`, `overlap`, `flow`, `async`, `number`, `unit`, `lane` or `counter`."""
    message: str

    def __str__(self) -> str:
        return f"{self.sort}: {self.message}"


def check(path: Path) -> list[Problem]:
    """Return everything wrong with a trace file; an empty list is the good answer.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    try:
        trace = load(path)
    except NotATrace as error:
        return [Problem("json", str(error))]
    return check_events(trace["traceEvents"])


def check_events(events: Sequence[Event]) -> list[Problem]:
    """Return everything wrong with a list of events."""
    problems: list[Problem] = []
    sound = []
    for index, event in enumerate(events):
        found = list(_shape(index, event))
        problems.extend(found)
        if not found:
            sound.append(event)
    for rule in (_overlaps, _flows, _async, _counters):
        problems.extend(rule(sound))
    return problems


def summary(problems: Iterable[Problem]) -> str:
    """Return the problems as text, the first few of each sort."""
    sorts: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        sorts[problem.sort].append(problem)
    lines: list[str] = []
    for sort, some in sorts.items():
        lines.extend(str(one) for one in some[:SHOWN])
        if len(some) > SHOWN:
            lines.append(f"{sort}: and {len(some) - SHOWN} more")
    return "\n".join(lines)


def _shape(index: int, event: Any) -> Iterator[Problem]:
    """Check one event by itself."""
    if not isinstance(event, Mapping) or not isinstance(event.get("ph"), str):
        yield Problem("json", f"event {index} is not an object with a phase")
        return
    ph, name = event["ph"], event.get("name")
    what = f"event {index} ({ph} {name!r})"
    if not name:
        yield Problem("slice", f"{what} has no name: chrome://tracing refuses the whole file")
    for field in ("pid", "tid"):
        value = event.get(field)
        if isinstance(value, int) and not 0 <= value <= MAX_ID:
            yield Problem("lane", f"{what}: {field} {value} is above {MAX_ID}: its lane is lost")
    if ph == "M":
        return
    yield from _numbers(what, event)


def _numbers(what: str, event: Event) -> Iterator[Problem]:
    for field in ("ts", "dur") if event["ph"] == "X" else ("ts",):
        value = event.get(field)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            yield Problem("number", f"{what}: {field} is {value!r}, not a number")
        elif value < 0:
            yield Problem("number", f"{what}: {field} is negative")
        elif field == "dur" and ns(value) > YEAR_NS:
            yield Problem("unit", f"{what}: {value / 1e6:.0f} s long; times are microseconds")
    if _is_ours(event) and event.get("ts", 0) > YEAR_NS / 1000 and _is_epoch(event["ts"]):
        yield Problem("unit", f"{what}: ts counts from 1970: floats lose nanoseconds there")


def _is_ours(event: Event) -> bool:
    return str(event.get("cat", "")).startswith("offload.")


def _is_epoch(ts: float) -> bool:
    return ts > 1e15


def _overlaps(events: Iterable[Event]) -> Iterator[Problem]:
    """Two slices of a thread are nested or disjoint."""
    threads: dict[tuple[Any, Any], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            threads[event.get("pid"), event.get("tid")].append(
                (start, -(start + ns(event["dur"])), str(event["name"]))
            )
    for (pid, tid), slices in threads.items():
        slices.sort()
        stack: list[tuple[int, str]] = []
        for start, minus_end, name in slices:
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack and -minus_end > stack[-1][0]:
                by = -minus_end - stack[-1][0]
                yield Problem(
                    "overlap",
                    f"{name!r} ends {by} ns after {stack[-1][1]!r}, which it began in "
                    f"(pid {pid}, tid {tid}): Perfetto drops it",
                )
                continue
            stack.append((-minus_end, name))


def _flows(events: Sequence[Event]) -> Iterator[Problem]:
    """An arrow starts once, ends once, goes forward, and touches a slice at every point."""
    slices: dict[tuple[Any, Any], list[tuple[int, int]]] = defaultdict(list)
    chains: dict[tuple[Any, Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            at = ns(event["ts"])
            slices[event.get("pid"), event.get("tid")].append((at, at + ns(event["dur"])))
        elif event["ph"] in "stf":
            chains[event.get("id"), event.get("cat"), event.get("name")].append(event)
    starts = {thread: _Cover(some) for thread, some in slices.items()}
    for (ident, _, name), chain in chains.items():
        what = f"{name!r} id {ident!r}"
        yield from _chain(what, ident, chain)
        for event in chain:
            cover = starts.get((event.get("pid"), event.get("tid")))
            if cover is None or not cover.holds(ns(event["ts"])):
                yield Problem("flow", f"{what} has no slice at its {event['ph']!r}")


def _chain(what: str, ident: Any, chain: Sequence[Event]) -> Iterator[Problem]:
    ordered = sorted(chain, key=lambda one: (one["ts"], "stf".index(one["ph"])))
    phases = "".join(event["ph"] for event in ordered)
    if isinstance(ident, str) and not _is_hex(ident):
        yield Problem("flow", f"{what}: text ids must be hexadecimal for Perfetto")
    if phases.count("s") != 1 or not phases.startswith("s"):
        yield Problem(
            "flow", f"{what} has the points {phases!r}: it does not start once, and first"
        )
    elif phases.count("f") != 1 or not phases.endswith("f"):
        yield Problem("flow", f"{what} has the points {phases!r}: it does not end once, and last")
    if any(event["ph"] == "f" and event.get("bp") != "e" for event in chain if _is_ours(event)):
        yield Problem("flow", f"{what} ends without bp=e: it would point at the next slice")


def _is_hex(text: str) -> bool:
    try:
        int(text, 16)
    except ValueError:
        return False
    return True


class _Cover:
    """The union of a thread's slices, asked for points."""

    def __init__(self, slices: list[tuple[int, int]]) -> None:
        self._merged = union(slices)
        self._starts = [start for start, _ in self._merged]

    def holds(self, at: int) -> bool:
        index = bisect_right(self._starts, at) - 1
        return index >= 0 and at <= self._merged[index][1]


def _async(events: Iterable[Event]) -> Iterator[Problem]:
    """Every begin has an end, of the same id and category."""
    open_spans: dict[tuple[Any, ...], int] = defaultdict(int)
    for event in events:
        if event["ph"] in ("b", "e"):
            ident = str(event.get("id2", event.get("id")))
            if ident == "None" or not event.get("cat"):
                yield Problem("async", f"{event['name']!r} has no id or no category: it is dropped")
                continue
            key = event.get("pid"), event["cat"], ident, event["name"]
            open_spans[key] += 1 if event["ph"] == "b" else -1
        elif event["ph"] in ("S", "F"):
            yield Problem(
                "async", f"{event['name']!r} uses the old phase {event['ph']}: it is dropped"
            )
    for (_, _, ident, name), balance in open_spans.items():
        if balance:
            yield Problem("async", f"{name!r} id {ident} has {balance:+} begins without end")


def _counters(events: Iterable[Event]) -> Iterator[Problem]:
    """Counter values are finite numbers."""
    for event in events:
        if event["ph"] == "C":
            for key, value in event.get("args", {}).items():
                if not isinstance(value, int | float):
                    yield Problem("counter", f"{event['name']!r} {key} is {value!r}, not a number")
