"""Catapult, the reader behind chrome://tracing, imports our traces without a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload.trace.read import load
from tests.readers.tools import chromium, run, viztracer
from tests.trace.story import Story, story_tracer, wild


def read(path: Path) -> Any:
    """Return what catapult makes of a trace."""
    viewer = viztracer() / "html" / "trace_viewer_full.html"
    found = run("catapult.mjs", chromium(), viewer, path)
    assert found.pop("failures") == []
    return found


def test_import_is_clean(tmp_path: Path) -> None:
    """No warning, every slice on its lane and finished, layers and waits inside steps, all 108 arrows."""
    found = read(Story().run(3).export(tmp_path / "run.json"))
    assert found["warnings"] == []
    assert found["flows"] == 108
    lanes = {name: (one["slices"], one["nested"]) for name, one in found["threads"].items()}
    assert lanes == {
        "forward": (45, 42),
        "load H2D": (36, 0),
        "backup D2H": (36, 0),
        "scheduler": (81, 0),
    }
    assert all(one["unfinished"] == 0 for one in found["threads"].values())


def test_wild_run_is_clean(tmp_path: Path) -> None:
    """Overlaps of every kind and labels that bite import without a warning, too."""
    tracer = story_tracer()
    wild(tracer, 100)
    assert read(tracer.export(tmp_path / "wild.json"))["warnings"] == []


def test_catapult_bites(tmp_path: Path) -> None:
    """A span without an end raises a warning: the silence about ours means something."""
    path = Story().run(1).export(tmp_path / "run.json")
    trace = load(path)
    trace["traceEvents"].append(
        {
            "ph": "f",
            "bp": "e",
            "cat": "x",
            "name": "x",
            "id": 1 << 51,
            "pid": 1,
            "tid": 1,
            "ts": 1.0,
        }
    )
    path.write_text(json.dumps(trace))
    assert read(path)["warnings"] != []
