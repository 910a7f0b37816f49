"""Ours and torch.profiler's in one file, on one clock.

Kineto stamps the wall clock: `ts` is (unix ns - `baseTimeNanoseconds`) / 1000, or plain unix microseconds in
files that do not name a base. Our times are monotonic; the anchor nearest to our records says where they
lie on the wall clock. The profiler's text is copied as it is, event by event, so that what other tools
read from it does not change by a digit.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.errors import NotATrace, RequestError
from offload.trace import events
from offload.trace.read import load, ranks_of, told
from offload.trace.timeline import Timeline
from offload.trace.write import write


def merge(timeline: Timeline, profile: Path, path: Path) -> Path:
    """Write `profile` with our lanes added, to `path`.

    Raises:
        NotATrace: `profile` is no trace in object form.
        RequestError: It already holds our lanes of this rank.
    """
    trace = load(profile)
    if timeline.rank in ranks_of(trace):
        raise RequestError(
            f"{profile} already holds offload's lanes of rank {timeline.rank}. Pass a profile "
            "without them, or give each process its own rank=.",
            value=profile,
        )
    base = int(trace.get("baseTimeNanoseconds", 0))
    first = timeline.first_ns
    shift = timeline.unix_ns(first) - (first - timeline.origin_ns) - base
    return write(path, _pieces(profile, events.events(timeline, shift)))


def merge_files(first: Path, second: Path, path: Path) -> Path:
    """Write two trace files as one on the clock of `first`; each names its own origin.

    Either may be torch.profiler's or ours; two ranks of ours keep their own processes.

    Raises:
        NotATrace: One is no trace in object form.
        RequestError: They are one file, or hold our lanes of the same rank.
    """
    if first.samefile(second):
        raise RequestError(f"{first} is merged with itself. Pass two traces.", value=second)
    kept, added = load(first), load(second)
    both = sorted({*ranks_of(kept)} & {*ranks_of(added)})
    if both:
        raise RequestError(
            f"{first} and {second} both hold offload's lanes of {told(both)}. Pass traces of "
            "different ranks, or one of ours and a profile without our lanes.",
            value=second,
        )
    shift_us = (origin_ns(added) - origin_ns(kept)) / 1000
    moved = (_moved(event, shift_us) for event in added["traceEvents"])
    return write(path, _pieces(first, moved))


def origin_ns(trace: Mapping[str, Any]) -> int:
    """Return the wall-clock nanosecond that a trace's `ts` counts from."""
    if "baseTimeNanoseconds" in trace:
        return int(trace["baseTimeNanoseconds"])
    return int((trace.get("metadata") or {}).get("offload.t0_unix_ns", 0))


def _moved(event: dict[str, object], shift_us: float) -> str:
    ts = event.get("ts")
    if isinstance(ts, int | float):
        event["ts"] = round(ts + shift_us, 3)
    return json.dumps(event, allow_nan=False)


def _pieces(path: Path, added: Iterator[str]) -> Iterator[str]:
    """Yield a trace file's own text with events added at the end of its list of events."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    close, empty = _end_of_events(text)
    yield text[:close].rstrip()
    separator = "\n" if empty else ",\n"
    for event in added:
        yield separator + event
        separator = ",\n"
    yield "\n" + text[close:]


def _end_of_events(text: str) -> tuple[int, bool]:
    """Return where the `]` of `traceEvents` stands, and whether the list is empty."""
    opening = text.find("[", text.index('"traceEvents"'))
    decoder = json.JSONDecoder()
    listed, after = decoder.raw_decode(text, opening)
    if not isinstance(listed, list):
        raise NotATrace('"traceEvents" is not a list')
    return after - 1, not listed
