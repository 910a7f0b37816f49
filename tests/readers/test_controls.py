"""Each check by a real reader, on a trace with the fault that it is there to find: silence means something."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offload.trace import Tracer
from offload.trace import lanes as laning
from offload.trace.read import load
from tests.readers import checks
from tests.readers.test_processor import EDGES
from tests.readers.tools import errors
from tests.trace.story import UNIX, Story, story_tracer, wild

Events = list[dict[str, Any]]
OURS = {"pid": 10_000_000, "tid": 2}


@pytest.fixture(scope="module")
def tracer() -> Tracer:
    """Three steps on the fake clock."""
    return Story().run(3)


def first(events: Events, phase: str, category: str) -> dict[str, Any]:
    """Return the first event of a phase and a category."""
    return next(e for e in events if e["ph"] == phase and e.get("cat") == f"offload.{category}")


def add(event: dict[str, Any], events: Events) -> None:
    """Put one more event at the end."""
    events.append(OURS | event)


def drop_last(name: str, events: Events) -> None:
    """Leave the last value of a counter out."""
    last = max(i for i, event in enumerate(events) if event["ph"] == "C" and event["name"] == name)
    del events[last]


def count_from_1970(events: Events) -> None:
    """Write times as microseconds since 1970, as floats hold them."""
    for event in events:
        if "ts" in event:
            event["ts"] = UNIX / 1000 + event["ts"]


def rename_an_end(events: Events) -> None:
    """Give one arrow another name at its end."""
    first(events, "f", "flow")["name"] = "other"


def point_back(events: Events) -> None:
    """Let one arrow end before it begins."""
    arrow = first(events, "f", "flow")
    start = next(e for e in events if e["ph"] == "s" and e["id"] == arrow["id"])
    arrow["ts"], start["ts"] = start["ts"], arrow["ts"]
    arrow["tid"], start["tid"] = start["tid"], arrow["tid"]


def nudge(events: Events) -> None:
    """Move one copy by a nanosecond."""
    first(events, "X", "load")["ts"] += 0.001


def lengthen(category: str, events: Events) -> None:
    """Make one slice a microsecond longer."""
    first(events, "X", category)["dur"] += 1.0


def shrink(events: Events) -> None:
    """Take one byte from one copy."""
    first(events, "X", "load")["args"]["nbytes"] -= 1


def swap_lanes(events: Events) -> None:
    """Exchange the names of two lanes."""
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name" and event["tid"] in (2, 3):
            event["args"]["name"] = {2: "backup D2H", 3: "load H2D"}[event["tid"]]


OVERLAP = {"ph": "X", "name": "load L9", "ts": 110.5, "dur": 100.0}
Check = Callable[[Path, Tracer], list[str]]
ALONE: dict[str, Check] = {
    "complaints": lambda path, _: checks.complaints(path),
    "arrivals": lambda path, _: checks.arrivals(path),
    "times": checks.times,
    "flows": lambda path, _: checks.flows(path, EDGES),
    "counters": lambda path, _: checks.counters_end_at_zero(path),
    "sums": checks.sums,
    "lanes": lambda path, _: checks.lanes(path),
}
SPOILED: list[tuple[str, Callable[[Events], None], str]] = [
    ("complaints", partial(add, OVERLAP), "slice_drop_overlapping_complete_event"),
    (
        "complaints",
        partial(
            add, {"ph": "s", "name": "load", "cat": "offload.flow", "id": "req-1", "ts": 110.0}
        ),
        "flow_invalid_id",
    ),
    (
        "complaints",
        partial(add, {"ph": "s", "name": "load", "cat": "offload.flow", "id": 1 << 50, "ts": 1.0}),
        "flow_no_enclosing_slice",
    ),
    ("arrivals", partial(add, OVERLAP), "slices"),
    ("times", count_from_1970, "is missing"),
    ("times", nudge, "is new"),
    ("flows", rename_an_end, "not"),
    ("flows", point_back, "not"),
    ("counters", partial(drop_last, "bytes in flight"), "bytes in flight"),
    ("counters", partial(drop_last, "queue"), "queue"),
    ("sums", partial(lengthen, "wait"), "stall"),
    ("sums", partial(lengthen, "step"), "forward"),
    ("sums", shrink, "loaded"),
    ("lanes", swap_lanes, "lanes"),
]


@pytest.mark.parametrize(("check", "spoil", "word"), SPOILED)
def test_each_check_bites(
    tracer: Tracer, tmp_path: Path, check: str, spoil: Callable[[Events], None], word: str
) -> None:
    """A trace with one fault is found out by the check that is there for it, which says so."""
    path = tracer.export(tmp_path / "run.json")
    trace = load(path)
    spoil(trace["traceEvents"])
    path.write_text(json.dumps(trace))
    found = ALONE[check](path, tracer)
    assert any(word in complaint for complaint in found), found


def test_every_check_has_a_control() -> None:
    """No check is without a trace that it refuses."""
    assert {check for check, _, _ in SPOILED} == ALONE.keys()


def test_without_lanes_of_their_own_overlaps_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for overlapping requests: on one lane the engine drops them."""
    tracer = story_tracer()
    wild(tracer, 30)
    monkeypatch.setattr(laning, "place", lambda slices, nested: [0 for _ in slices])
    path = tracer.export(tmp_path / "wild.json")
    assert "slice_drop_overlapping_complete_event" in errors(path)


def test_thread_identifiers_collapse(tmp_path: Path) -> None:
    """Lanes by `threading.get_ident` fall together in the engine: why ours are small numbers."""
    ident = threading.get_ident()
    events = [
        {"ph": "X", "pid": 1, "tid": ident + i, "name": "x", "ts": 10.0 + 5 * i, "dur": 10.0}
        for i in range(2)
    ]
    path = tmp_path / "idents.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert "slice_drop_overlapping_complete_event" in errors(path)
