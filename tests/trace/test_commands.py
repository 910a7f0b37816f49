"""The command line's share: report, timeline, merge, view."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

import pytest

import offload
from offload.cli import main
from offload.trace import picture, view
from offload.trace.overlay import merge
from offload.trace.read import load
from tests.trace.story import Story, story_tracer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three steps in a file."""
    return Story().run(3).export(tmp_path / "run.trace.json.gz")


def test_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` prints what the tracer would; `--json` the same for machines."""
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"{Story().run(3).report()}\n"
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_report_of_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without our lanes is refused in one paragraph and with exit code 2."""
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents":[]}')
    assert main(["report", str(other)]) == 2
    assert "holds no lanes of offload" in capsys.readouterr().err


def test_timeline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`timeline` writes well-formed SVG where it was told to, or beside the trace."""
    assert main(["timeline", str(path)]) == 0
    beside = path.with_name("run.trace.svg")
    assert capsys.readouterr().out == f"{beside}\n"
    out = path.with_name("out.svg")
    assert main(["timeline", str(path), "-o", str(out), "--steps", "1"]) == 0
    for file in (beside, out):
        ElementTree.parse(file)


def test_picture_shows_stalls_and_numbers() -> None:
    """The picture has a red box for each stall, a lane for each direction, and the four numbers on top."""
    tracer = Story().run(3)
    text = picture.svg(tracer.timeline())
    report = tracer.report()
    assert text.count(f'height="{picture.ROW}" fill="{picture.STALL}"') == report.waits == 6
    assert f"{report.stall_ratio:.1%} stalled" in text
    assert f"load {report.load.rate}, " in text
    for lane in ("forward", "load H2D", "backup D2H"):
        assert f">{lane}</text>" in text


def test_picture_of_one_step_has_its_numbers() -> None:
    """Drawn for one step, the numbers are those of that step: two stalls."""
    text = picture.svg(Story().run(3).timeline(), steps=1)
    assert text.count(f'height="{picture.ROW}" fill="{picture.STALL}"') == 2


def test_picture_of_a_long_run_stays_small() -> None:
    """A run of 2,000 steps is drawn in less than a megabyte: what cannot be seen is joined."""
    story = Story()
    for _ in range(500):
        story.step()
    assert len(picture.svg(story.tracer.timeline())) < 1_000_000


def test_picture_of_nothing() -> None:
    """An empty recording is an empty picture, not an error."""
    ElementTree.fromstring(picture.svg(story_tracer().timeline()))


def test_merge(path: Path, tmp_path: Path) -> None:
    """`merge` keeps the first file's clock and moves the second one's events onto it."""
    profile = tmp_path / "torch.json"
    base = load(path)["metadata"]["offload.t0_unix_ns"] - 5_000_000
    event = {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5000.0, "dur": 1.0}
    profile.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]}))
    out = tmp_path / "both.json"
    assert main(["merge", str(profile), str(path), "-o", str(out)]) == 0
    ours = [e for e in load(out)["traceEvents"] if e.get("name") == "tick"]
    assert ours[0]["ts"] == 5000.0 + 40.0
    assert load(out)["traceEvents"][0] == event


def test_view_serves_one_file(path: Path) -> None:
    """The server has that file, for the Perfetto UI's origin alone, and nothing else."""
    with view.serve(path, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_port}"
            with urllib.request.urlopen(f"{root}/{path.name}") as response:
                assert response.read() == path.read_bytes()
                assert response.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{root}/../pyproject.toml")
            refused.value.close()
        finally:
            server.shutdown()
            thread.join()
    assert view.link(path, 9001).endswith("#!/?url=http://127.0.0.1:9001/run.trace.json.gz")


def test_timeline_writes_svg_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another suffix than .svg is refused in one line, and nothing is written."""
    out = path.with_name("x.png")
    assert main(["timeline", str(path), "-o", str(out)]) == 2
    assert not out.exists()
    err = capsys.readouterr().err
    assert err == f"offload timeline: cannot write {out}: a picture ends in .svg.\n"


@pytest.mark.parametrize("command", ["timeline", "merge"])
def test_a_missing_folder_is_refused(
    command: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output in a folder that does not exist is refused, and the folder is not made."""
    out = path.with_name("nofolder") / ("o.svg" if command == "timeline" else "o.json")
    files = [str(path)] * (1 if command == "timeline" else 2)
    assert main([command, *files, "-o", str(out)]) == 2
    assert not out.parent.exists()
    err = capsys.readouterr().err
    assert err == f"offload {command}: cannot write {out}: there is no folder {out.parent}.\n"


def test_merge_refuses_a_rank_that_is_there(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace merged with itself, or with one that holds the same rank, would show everything twice."""
    out = tmp_path / "both.json"
    assert main(["merge", str(path), str(path), "-o", str(out)]) == 2
    assert "is merged with itself" in capsys.readouterr().err
    other = Story().run(1).export(tmp_path / "other.json")
    assert main(["merge", str(path), str(other), "-o", str(out)]) == 2
    assert "both hold offload's lanes of rank 0" in capsys.readouterr().err
    with pytest.raises(offload.RequestError, match="already holds offload's lanes of rank 0"):
        merge(Story().run(1).timeline(), path, out)
    assert not out.exists()


def test_a_rank_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--rank` of a trace that holds other ranks names them."""
    path = Story(story_tracer(rank=3)).run(1).export(tmp_path / "r3.json")
    assert main(["report", "--rank", "7", str(path)]) == 2
    err = capsys.readouterr().err
    assert err == f"offload report: {path} holds no lanes of rank 7. It holds rank 3.\n"
