"""Perfetto's own trace processor takes our traces whole, and the same questions get the same answers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offload.trace import Tracer
from offload.trace.read import load
from tests.readers.tools import ask, errors
from tests.trace.story import START, Story, story_tracer, unfinished, wild


@pytest.fixture(scope="module")
def tracer() -> Tracer:
    """Three steps on the fake clock."""
    return Story().run(3)


@pytest.fixture(scope="module")
def trace(tracer: Tracer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a compressed file."""
    return tracer.export(tmp_path_factory.mktemp("trace") / "run.json.gz")


def test_engine_reports_no_error(trace: Path) -> None:
    """No statistic of severity error or data loss is raised by a trace of ours."""
    assert errors(trace) == {}


def test_every_slice_and_counter_arrives(trace: Path) -> None:
    """The engine has one slice per X, b and i event, two values per C event of two keys, none negative."""
    phases = Counter(event["ph"] for event in load(trace)["traceEvents"])
    single = sum(len(e["args"]) for e in load(trace)["traceEvents"] if e["ph"] == "C")
    slices, negative, counters = ask(
        trace,
        [
            "select count(*) as n from slice",
            "select count(*) as n from slice where dur < 0",
            "select count(*) as n from counter",
        ],
    )
    assert slices[0]["n"] == phases["X"] + phases["b"] + phases["i"]
    assert negative[0]["n"] == 0
    assert counters[0]["n"] == single


def test_times_are_the_recorded_nanoseconds(tracer: Tracer, trace: Path) -> None:
    """Start and length of every copy are the recorded integers; a leaf is one nanosecond short."""
    sql = "select ts, dur from slice where category in ('offload.load', 'offload.backup') order by ts, dur"
    copies = tracer.timeline().copies
    expected = sorted((copy.start - START, copy.end - copy.start - 1) for copy in copies)
    assert [(row["ts"], row["dur"]) for row in ask(trace, [sql])[0]] == expected


def test_every_flow_binds_forward(trace: Path) -> None:
    """Each copy is reached by an arrow from its issue, each load leads to its layer, none goes back in time."""
    joined = "from flow join slice a on slice_out = a.id join slice b on slice_in = b.id"
    edges, backward = ask(
        trace,
        [
            f"select a.category as source, b.category as target, count(*) as n {joined} group by 1, 2",
            f"select count(*) as n {joined} where b.ts < a.ts",
        ],
    )
    assert {(row["source"], row["target"]): row["n"] for row in edges} == {
        ("offload.issue", "offload.load"): 36,
        ("offload.load", "offload.layer"): 36,
        ("offload.issue", "offload.backup"): 36,
    }
    assert backward == [{"n": 0}]


def test_counters_end_at_zero(trace: Path) -> None:
    """When everything has settled nothing is in flight and nothing is queued."""
    sql = (
        "select t.name as name, c.value as value from counter c join track t on c.track_id = t.id "
        "where t.name glob 'bytes in flight*' or t.name glob 'queue*' order by c.ts, c.id"
    )
    last = {row["name"]: row["value"] for row in ask(trace, [sql])[0]}
    assert last == dict.fromkeys(
        ("bytes in flight h2d", "bytes in flight d2h", "queue load", "queue backup"), 0.0
    )


def test_report_equals_sql(tracer: Tracer, trace: Path) -> None:
    """Stall, forward, bytes and operations of the report are what SQL sums up from the file."""
    report = tracer.report()
    answers = ask(
        trace,
        [
            "select sum(dur + 1) as n from slice where category = 'offload.wait'",
            "select count(*) as n from slice where category = 'offload.wait'",
            "select sum(dur) as n from slice where category = 'offload.step'",
            *(
                f"select sum(extract_arg(arg_set_id, 'args.{key}')) as n from slice "
                f"where category in ({categories})"
                for key, categories in (
                    ("nbytes", "'offload.load'"),
                    ("nbytes", "'offload.backup'"),
                    ("ops", "'offload.load', 'offload.backup'"),
                    ("transfers", "'offload.load', 'offload.backup'"),
                )
            ),
        ],
    )
    assert [rows[0]["n"] for rows in answers] == [
        report.stall_ns,
        report.waits,
        report.forward_ns,
        report.load.nbytes,
        report.backup.nbytes,
        report.ops,
        report.transfers,
    ]


def test_lanes_have_their_names_and_order(trace: Path) -> None:
    """The four lanes stand in the order of their thread ids, under a process that names its rank."""
    threads, process = ask(
        trace,
        [
            "select tid, name from thread where name is not null order by tid",
            "select pid, name from process where name is not null",
        ],
    )
    assert [(row["tid"], row["name"]) for row in threads] == [
        (1, "forward"),
        (2, "load H2D"),
        (3, "backup D2H"),
        (4, "scheduler"),
    ]
    assert process == [{"pid": 10_000_000, "name": "offload rank0 cuda:0"}]


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


SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "overlapping slices": (
        {"ph": "X", "name": "load L9", "tid": 2, "ts": 60.5, "dur": 100.0},
        "slice_drop_overlapping_complete_event",
    ),
    "text flow id": (
        {"ph": "s", "name": "load", "cat": "offload.flow", "id": "req-1", "tid": 2, "ts": 100.0},
        "flow_invalid_id",
    ),
    "arrow from nowhere": (
        {"ph": "s", "name": "load", "cat": "offload.flow", "id": 1 << 50, "tid": 2, "ts": 1.0},
        "flow_no_enclosing_slice",
    ),
}


@pytest.mark.parametrize(("event", "stat"), SPOILED.values(), ids=SPOILED)
def test_engine_bites(trace: Path, tmp_path: Path, event: dict[str, Any], stat: str) -> None:
    """A spoiled trace raises the statistic: the silence about ours means something."""
    spoiled = load(trace)
    spoiled["traceEvents"].append({"pid": 10_000_000, **event})
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(spoiled))
    assert stat in errors(path)


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
