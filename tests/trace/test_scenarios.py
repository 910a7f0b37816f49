"""Ways in which traces went wrong elsewhere: units and clocks, overlaps, files without bound."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from offload.errors import NotATrace
from offload.trace import Tracer, write
from offload.trace.check import check
from offload.trace.read import load, ns, timeline
from tests.trace.story import START, US, Story, story_tracer, wild

MS = 1_000_000


def slices(path: Path, category: str) -> list[dict[str, Any]]:
    """Return the complete events of one category."""
    return [e for e in load(path)["traceEvents"] if e.get("cat") == f"offload.{category}"]


def test_units_are_microseconds(tmp_path: Path) -> None:
    """A copy of 20 ms has dur 20,000 less the nanosecond of a leaf; starts a second apart differ by 1,000,000."""
    tracer = story_tracer()
    for start in (START + MS, START + 1001 * MS):
        tracer.copy(1, "load", "load", 0, start, start, start, start + 20 * MS, 64)
    first, second = slices(tracer.export(tmp_path / "a.json"), "load")
    assert first["dur"] == 19_999.999
    assert second["ts"] - first["ts"] == 1_000_000


def test_native_values_are_a_thousand_times_the_files(tmp_path: Path) -> None:
    """What the file says in microseconds is what the timeline says in nanoseconds, exactly."""
    tracer = Story().run(3)
    path = tracer.export(tmp_path / "a.json")
    native = [(copy.start - START, copy.end - copy.start - 1) for copy in tracer.timeline().copies]
    events = [*slices(path, "load"), *slices(path, "backup")]
    assert sorted((ns(e["ts"]), ns(e["dur"])) for e in events) == sorted(native)


def test_wall_clock_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock going back an hour while recording moves no event and makes none go backwards."""
    plain = Story().run(2).export(tmp_path / "plain.json").read_bytes()
    wall = time.time_ns
    story = Story()
    story.step()
    monkeypatch.setattr(time, "time_ns", lambda: wall() - 3_600_000 * MS)
    story.tracer.start()
    story.step()
    story.tracer.device = "cuda:0"
    assert story.tracer.export(tmp_path / "stepped.json").read_bytes() == plain


def test_one_clock_for_all_of_a_request(tmp_path: Path) -> None:
    """A request is submitted, copied and waited for in that order in the file, too."""
    path = Story().run(1).export(tmp_path / "a.json")
    begin = next(e for e in load(path)["traceEvents"] if e["ph"] == "b" and e["name"] == "request")
    copy = slices(path, "load")[0]
    wait = slices(path, "wait")[0]
    assert begin["ts"] <= copy["ts"] <= wait["ts"] + wait["dur"]


def test_overlapping_copies_get_lanes_of_their_own(tmp_path: Path) -> None:
    """Two copies at once on one stream, 100-110 us and 105-115 us, are both there and 10 us long."""
    tracer = story_tracer()
    for batch, at in ((1, 100), (2, 105)):
        tracer.copy(batch, "load", "load", 0, 0, 0, START + at * US, START + (at + 10) * US, 64)
    tracer.step(START + 90 * US, START + 130 * US)
    tracer.wait(1, "load", 0, START + 95 * US, START + 107 * US, 0)
    path = tracer.export(tmp_path / "a.json")
    first, second = slices(path, "load")
    assert (first["dur"], second["dur"]) == (9.999, 9.999)
    assert (first["tid"], second["tid"]) == (2, 12)
    assert check(path) == []


def test_a_copy_inside_another_is_not_its_child(tmp_path: Path) -> None:
    """A copy within the time of another one gets a lane of its own: nested, it would read as its part."""
    tracer = story_tracer()
    tracer.copy(1, "load", "load", 0, 0, 0, START, START + 100 * US, 64)
    tracer.copy(2, "load", "load", 0, 0, 0, START + 10 * US, START + 20 * US, 64)
    assert [e["tid"] for e in slices(tracer.export(tmp_path / "a.json"), "load")] == [2, 12]


def test_wild_overlaps_pass_the_checker(tmp_path: Path) -> None:
    """Whatever is recorded, slices of a lane nest or are disjoint."""
    tracer = story_tracer()
    wild(tracer)
    assert check(tracer.export(tmp_path / "a.json")) == []


def test_ring_keeps_the_cap_and_counts_the_rest(tmp_path: Path) -> None:
    """2,000,000 records into a ring of 100,000: memory stays bounded, 1,900,000 are said to be lost."""
    tracer = story_tracer(capacity=100_000)
    tracemalloc.start()
    for i in range(150_000):
        tracer.wait(i, "load", 0, START + i, START + i + 1, 0)
    half, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for i in range(150_000, 2_000_000):
        tracer.wait(i, "load", 0, START + i, START + i + 1, 0)
    assert half < 100_000 * 300
    assert len(tracer._ring) == 100_000
    assert tracer.dropped == 1_900_000
    for name in ("a.json", "a.json.gz"):
        trace = load(tracer.export(tmp_path / name))
        assert trace["metadata"]["offload.dropped"] == 1_900_000
        assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 100_000


def test_export_streams(tmp_path: Path) -> None:
    """An export's memory grows by less than the size of the file that it writes."""
    tracer = story_tracer()
    story = Story(tracer)
    for _ in range(150):
        story.step()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    path = tracer.export(tmp_path / "a.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < path.stat().st_size


KILLED = """
import os, signal, sys
from pathlib import Path
from offload.trace import write as writing
from offload.trace.write import write

if sys.argv[2] == "named":
    writing._nameless = lambda folder: None

def pieces():
    yield '{"traceEvents":['
    for i in range(100_000):
        yield '{"ph":"X","name":"half","pid":1,"tid":1,"ts":1,"dur":1},' * 20
        if i == 2_000:
            os.kill(os.getpid(), signal.SIGKILL)

write(Path(sys.argv[1]), pieces())
"""


@pytest.mark.parametrize(("way", "files"), [("nameless", 1), ("named", 2)])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_sigkill_leaves_the_old_file(tmp_path: Path, name: str, way: str, files: int) -> None:
    """A process killed in the middle of an export leaves the good file that was there, and nothing beside it.

    The control: where files cannot be nameless, what was cut off lies beside it, under another name.
    """
    found = write._nameless(tmp_path)
    if found is None:
        pytest.skip("this file system has no nameless files")
    found.close()
    path = Story().run(1).export(tmp_path / name)
    good = path.read_bytes()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", KILLED, path, way], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == good
    assert len(list(tmp_path.iterdir())) == files


@pytest.mark.parametrize("named", [False, True])
def test_an_export_replaces_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Either way the file is new, readable by those whom the umask lets, and alone."""
    if named:
        monkeypatch.setattr(write, "_nameless", lambda folder: None)
    path = tmp_path / "a.json"
    path.write_text("old")
    plain = tmp_path / "plain"
    plain.touch()
    Story().run(1).export(path)
    assert check(path) == []
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(tmp_path.iterdir()) == [path, plain]


@pytest.mark.parametrize("named", [False, True])
def test_failed_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """An export that raises keeps the old file and removes what it had begun."""
    if named:
        monkeypatch.setattr(write, "_nameless", lambda folder: None)
    path = Story().run(1).export(tmp_path / "a.json")
    good = path.read_bytes()

    def broken() -> Any:
        yield "{"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write.write(path, broken())
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 1, 500, -1])
def test_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    """A file that was cut off is said to be one, plain or compressed."""
    path = Story().run(1).export(tmp_path / "a.json.gz")
    cut = tmp_path / "cut.json"
    for data in (gzip.decompress(path.read_bytes()).rstrip(), path.read_bytes()):
        cut.write_bytes(data[:keep])
        with pytest.raises(NotATrace, match="is not a trace"):
            timeline(cut)


def test_off_costs_no_allocation() -> None:
    """A site with no tracer, or one that does not record, allocates nothing."""
    tracers: tuple[Tracer | None, ...] = (None, Tracer(active=False))
    for tracer in tracers:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            if tracer is not None and tracer.active:
                tracer.ready()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - before < 500


def test_strict_json(tmp_path: Path) -> None:
    """The file is JSON to the letter, NaN and Infinity in labels notwithstanding; compressed it is the same text."""
    tracer = story_tracer()
    wild(tracer)
    plain = tracer.export(tmp_path / "a.json").read_bytes()
    packed = tracer.export(tmp_path / "a.json.gz").read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(plain, parse_constant=refuse)["metadata"]["offload.schema"] == 1
    assert gzip.decompress(packed) == plain
