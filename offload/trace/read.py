"""A file -> timeline: what `report` and `timeline` of the command line start from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import NotATrace
from offload.trace import lanes
from offload.trace import records as r
from offload.trace.clock import Anchor
from offload.trace.events import DERIVED_COUNTERS, FIRST_PID, MAX_RANKS
from offload.trace.records import Copy, Counter, Instant, Layer, Plan, Request, Step, Tick, Wait
from offload.trace.timeline import Timeline


def load(path: Path) -> dict[str, Any]:
    """Return a trace file's JSON object, strictly: no NaN, no Infinity, the object form.

    Raises:
        NotATrace: The file is something else, or is cut off.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        trace = json.loads(text, parse_constant=_no_constant)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise NotATrace(f"{path} is not a trace: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise NotATrace(f'{path} is not a trace: no "traceEvents" in a JSON object')
    return trace


def timeline(path: Path, rank: int | None = None) -> Timeline:
    """Return our lanes of a trace file, an overlay included. `rank` chooses among several.

    Raises:
        NotATrace: There are none.
    """
    trace = load(path)
    ranks = ranks_of(trace)
    if not ranks:
        raise NotATrace(
            f"{path} holds no lanes of offload: nothing was recorded, or it is another's"
        )
    if rank is not None and rank not in ranks:
        raise NotATrace(f"{path} holds no lanes of rank {rank}. It holds {told(ranks)}.")
    pid = FIRST_PID + (ranks[0] if rank is None else rank)
    events = [one for one in trace["traceEvents"] if _ours(one) and one["pid"] == pid]
    return _Reader(events, trace).timeline()


def ranks_of(trace: Mapping[str, Any]) -> list[int]:
    """Return the ranks whose lanes of ours a trace holds, in order."""
    return sorted({int(one["pid"]) - FIRST_PID for one in trace["traceEvents"] if _ours(one)})


def told(ranks: Sequence[int]) -> str:
    """Return ranks as prose: `rank 3`, `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ns(microseconds: float) -> int:
    """Return a trace's microseconds as nanoseconds, exactly."""
    return round(microseconds * 1000)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _ours(event: Mapping[str, Any]) -> bool:
    """Counters have no category; the process is what is left to tell them by."""
    if not str(event.get("cat", "")).startswith("offload."):
        pid = event.get("pid")
        if (
            event.get("ph") != "C"
            or not isinstance(pid, int)
            or not 0 <= pid - FIRST_PID < MAX_RANKS
        ):
            return False
    return True


class _Reader:
    """Turns events back into records."""

    def __init__(self, events: list[dict[str, Any]], trace: Mapping[str, Any]) -> None:
        self._events = events
        self._meta: Mapping[str, Any] = trace.get("metadata", {}) or {}
        self._records: list[r.Record] = []
        self._open: dict[tuple[str, str, str], dict[str, Any]] = {}

    def timeline(self) -> Timeline:
        for event in self._events:
            if event["ph"] == "X":
                self._slice(event)
            elif event["ph"] == "b":
                self._open[_span(event)] = event
            elif event["ph"] == "e":
                self._close(event)
            elif event["ph"] == "C" and event["name"] not in DERIVED_COUNTERS:
                at = ns(event["ts"])
                self._add(r.COUNTER, Counter(at, at, event["name"], event["args"]))
            elif event["ph"] == "i":
                at = ns(event["ts"])
                self._add(r.INSTANT, Instant(at, at, event["name"], event["args"]))
        built = Timeline.of(
            self._records,
            anchors=(Anchor(0, int(self._meta.get("offload.t0_unix_ns", 0))),),
            rank=self._events[0]["pid"] - FIRST_PID,
            device=str(self._meta.get("offload.device", "")),
            dropped=int(self._meta.get("offload.dropped", 0)),
            ready=int(self._meta.get("offload.ready_waits", 0)),
            unmeasured=int(self._meta.get("offload.unmeasured_waits", 0)),
        )
        return built

    def _slice(self, event: Mapping[str, Any]) -> None:
        kind, args = event["cat"].removeprefix("offload."), event.get("args", {})
        start = ns(event["ts"])
        end = start + ns(event["dur"]) + (1 if kind not in ("step", "tick") and event["dur"] else 0)
        lane = (event["tid"] - 1) // lanes.STRIDE
        if kind == "step":
            self._add(r.STEP, Step(start, end, lane, args["step"]))
        elif kind == "layer":
            self._add(r.LAYER, Layer(start, end, args["layer"], lane, _ids(args)))
        elif kind == "wait":
            self._wait(start, end, args, lane)
        elif kind == "tick":
            self._add(r.TICK, Tick(start, end))
        elif kind in ("load", "backup"):
            self._copy(start, end, kind, args)
        elif kind == "issue" and event["name"].startswith("plan "):
            direction = event["name"].removeprefix("plan ")
            self._add(r.PLAN, Plan(start, end, args["batch"], direction, direction, _ids(args)))

    def _copy(self, start: int, end: int, direction: str, args: Mapping[str, Any]) -> None:
        queued = ns(args["queue_us"]) if "queue_us" in args else None
        issue = start - queued if queued is not None else 0
        copy = Copy(
            start,
            end,
            issue,
            issue,
            args["batch"],
            direction,
            args["cuda_stream"],
            args["layer"],
            args["nbytes"],
            args["ops"],
            args["transfers"],
        )
        self._add(r.COPY, copy)

    def _wait(self, start: int, end: int, args: Mapping[str, Any], lane: int) -> None:
        queued = ns(args["queue_us"]) if "queue_us" in args else r.UNKNOWN
        self._add(r.WAIT, Wait(start, end, args["request"], "load", args["layer"], lane, queued))

    def _close(self, event: Mapping[str, Any]) -> None:
        begin = self._open.pop(_span(event), None)
        if begin is None:
            return
        start, end, args = ns(begin["ts"]), ns(event["ts"]), begin["args"]
        if event["cat"] == "offload.await":
            self._wait(start, end, args, r.ASYNC_LANE)
        elif event["name"] == "request":
            issued = start + ns(args["queue_us"]) if "queue_us" in args else 0
            tags = {k.removeprefix("tag."): v for k, v in args.items() if k.startswith("tag.")}
            request = Request(
                start,
                end,
                issued,
                args["request"],
                args["direction"],
                args["nbytes"],
                args["pages"],
                args["outcome"],
                tags or None,
            )
            self._add(r.REQUEST, request)

    def _add(self, kind: int, record: r.Record) -> None:
        self._records.append((kind, *record))


def _span(event: Mapping[str, Any]) -> tuple[str, str, str]:
    return event["cat"], event["id2"]["local"], event["name"]


def _ids(args: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, str(args.get("requests", "")).split()))
