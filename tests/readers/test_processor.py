"""Perfetto's own trace processor takes our traces whole, and the same questions get the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.trace import Tracer
from offload.trace.read import load
from tests.readers import checks
from tests.readers.tools import ask, errors
from tests.trace.story import Story, story_tracer, unfinished, wild


@pytest.fixture(scope="module")
def tracer() -> Tracer:
    """Three steps on the fake clock."""
    return Story().run(3)


@pytest.fixture(scope="module")
def trace(tracer: Tracer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a compressed file."""
    return tracer.export(tmp_path_factory.mktemp("trace") / "run.json.gz")


EDGES = {
    ("offload.issue", "offload.load"): 36,
    ("offload.load", "offload.layer"): 36,
    ("offload.issue", "offload.backup"): 36,
}


def test_engine_reports_no_error(trace: Path) -> None:
    """No statistic of severity error or data loss is raised by a trace of ours."""
    assert checks.complaints(trace) == []


def test_every_slice_and_counter_arrives(trace: Path) -> None:
    """The engine has one slice per X, b and i event, one value per key of a C event, none negative."""
    assert checks.arrivals(trace) == []


def test_times_are_the_recorded_nanoseconds(tracer: Tracer, trace: Path) -> None:
    """Start and length of every copy are the recorded integers."""
    assert checks.times(trace, tracer) == []


def test_every_flow_binds_forward(trace: Path) -> None:
    """Each copy is reached by an arrow from its issue, each load leads to its layer, none goes back in time."""
    assert checks.flows(trace, EDGES) == []


def test_counters_end_at_zero(trace: Path) -> None:
    """When everything has settled nothing is in flight and nothing is queued."""
    assert checks.counters_end_at_zero(trace) == []


def test_report_equals_sql(tracer: Tracer, trace: Path) -> None:
    """What the report adds up is what SQL adds up from the file."""
    assert checks.sums(trace, tracer) == []


def test_lanes_have_their_names_and_order(trace: Path) -> None:
    """The four lanes stand in the order of their thread ids, under a process that names its rank."""
    assert checks.lanes(trace) == []


def test_wild_overlaps_and_labels_survive(tmp_path: Path) -> None:
    """300 requests that overlap in every way, with quotes, newlines and NaN in their labels, all arrive."""
    tracer = story_tracer()
    wild(tracer, 300)
    path = tracer.export(tmp_path / "wild.json")
    sql = "select category, count(*) as n from slice group by 1"
    counts = {row["category"]: row["n"] for row in ask(path, [sql])[0]}
    assert errors(path) == {}
    assert counts["offload.load"] + counts["offload.backup"] == 300
    assert counts["offload.wait"] + counts["offload.await"] == 300
    assert counts["offload.step"] == counts["offload.layer"] == counts["offload.tick"] == 300
    tag = "select count(*) as n from args where display_value = 'späte 本'"
    assert ask(path, [tag])[0][0]["n"] == 300


def test_small_ring_has_no_dangling_flow(tmp_path: Path) -> None:
    """A ring of 64 records over twenty steps loses most of them and still connects what is left."""
    path = Story(story_tracer(capacity=64)).run(20).export(tmp_path / "small.json")
    assert errors(path) == {}
    assert load(path)["metadata"]["offload.ring_full"] == 1


def test_open_requests_are_closed_and_marked(tmp_path: Path) -> None:
    """A request that has not settled ends with the file, and says that it is unfinished."""
    tracer = story_tracer()
    tracer.opened("cpu", unfinished)
    path = tracer.export(tmp_path / "open.json")
    sql = "select count(*) as n from slice where extract_arg(arg_set_id, 'args.unfinished') and dur > 0"
    assert errors(path) == {}
    assert ask(path, [sql])[0] == [{"n": 2}]


def test_two_ranks_keep_their_spans_apart(tmp_path: Path) -> None:
    """Two ranks with the same request ids in one file keep separate processes, spans and arrows."""
    from offload.trace.overlay import merge_files

    first = Story(story_tracer(rank=0)).run(1).export(tmp_path / "r0.json")
    second = Story(story_tracer(rank=1)).run(1).export(tmp_path / "r1.json")
    merged = merge_files(first, second, tmp_path / "both.json")
    flows, single = (
        ask(path, ["select count(*) as n from flow"])[0][0]["n"] for path in (merged, first)
    )
    assert errors(merged) == {}
    assert flows == 2 * single
