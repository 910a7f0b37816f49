"""The checker finds what readers drop, and finds nothing in ours."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.trace.check import check, summary
from offload.trace.read import load
from tests.trace.story import Story

OURS = {"pid": 10_000_000, "tid": 2}
SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": ({"ph": "X", "name": "x", "ts": 60.5, "dur": 100.0}, "overlap"),
    "no name": ({"ph": "X", "ts": 1.0, "dur": 1.0}, "slice"),
    "no dur": ({"ph": "X", "name": "x", "ts": 1.0}, "number"),
    "negative dur": ({"ph": "X", "name": "x", "ts": 1.0, "dur": -1.0}, "number"),
    "text ts": ({"ph": "X", "name": "x", "ts": "1.0", "dur": 1.0}, "number"),
    "wrong unit": ({"ph": "X", "name": "x", "ts": 1.0, "dur": 9e13}, "unit"),
    "epoch": ({"ph": "X", "cat": "offload.x", "name": "x", "ts": 1.8e15, "dur": 1.0}, "unit"),
    "thread ident": (
        {"ph": "X", "name": "x", "tid": threading.get_ident(), "ts": 1.0, "dur": 1.0},
        "lane",
    ),
    "text flow id": ({"ph": "s", "name": "f", "id": "req-1", "ts": 100.0}, "flow"),
    "flow without end": ({"ph": "s", "name": "f", "id": 99, "ts": 100.0}, "flow"),
    "flow without start": ({"ph": "f", "name": "f", "id": 99, "ts": 100.0, "bp": "e"}, "flow"),
    "flow off slices": ({"ph": "s", "name": "f", "id": 99, "ts": 0.0}, "flow"),
    "span without end": ({"ph": "b", "cat": "c", "name": "n", "id": 5, "ts": 1.0}, "async"),
    "span without id": ({"ph": "b", "cat": "c", "name": "n", "ts": 1.0}, "async"),
    "old phase": ({"ph": "S", "cat": "c", "name": "n", "id": 5, "ts": 1.0}, "async"),
    "text counter": ({"ph": "C", "name": "c", "ts": 1.0, "args": {"v": "1"}}, "counter"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good trace."""
    return Story().run(1).export(tmp_path / "run.json")


def test_ours_is_good(path: Path) -> None:
    """A trace of ours has no problem."""
    assert check(path) == []


@pytest.mark.parametrize(("event", "sort"), SPOILED.values(), ids=SPOILED)
def test_each_fault_is_found(path: Path, event: dict[str, Any], sort: str) -> None:
    """One spoiled event makes problems of its sort, and of no other."""
    trace = load(path)
    trace["traceEvents"].append(OURS | event)
    path.write_text(json.dumps(trace))
    assert {problem.sort for problem in check(path)} == {sort}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"traceEvents":[{"ph":"X","ts":NaN}]}', '{"traceEvents":3}', "\ufeff{}"],
)
def test_no_trace_is_found(tmp_path: Path, text: str) -> None:
    """What is not strict JSON in object form is one problem."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert [problem.sort for problem in check(path)] == ["json"]


def test_summary_is_short(path: Path) -> None:
    """A hundred problems of a sort are five lines and a count."""
    trace = load(path)
    trace["traceEvents"] += [OURS | {"ph": "X", "name": "x", "ts": -1.0, "dur": 1.0}] * 100
    path.write_text(json.dumps(trace))
    lines = summary(check(path)).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "number: and 95 more"


def test_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` exits 0 with a line for a good file, and 1 with the problems of a bad one."""
    assert main(["check", str(path)]) == 0
    assert "nothing that a reader would drop" in capsys.readouterr().out
    bad = path.with_name("bad.json")
    bad.write_text("{")
    assert main(["check", str(bad)]) == 1
    assert "is not a trace" in capsys.readouterr().err
