"""The report's numbers, one by one, against stories small enough to add up by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.trace import ASYNC_LANE, Tracer
from offload.trace.read import timeline
from offload.trace.report import Report, intersection, length, union
from tests.trace.story import START, US, Story, story_tracer

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=8)


def points(intervals: list[list[int]]) -> set[int]:
    """Return the unit steps that intervals cover: the slow way to say the same."""
    return {at for start, end in intervals for at in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_interval_arithmetic(left: list[list[int]], right: list[list[int]]) -> None:
    """Union, length and intersection count the same points as sets of points do."""
    merged = union((a, b) for a, b in left), union((a, b) for a, b in right)
    assert length(merged[0]) == len(points(left))
    assert intersection(*merged) == len(points(left) & points(right))


def copy(tracer: Tracer, start: int, end: int, nbytes: int, layer: int = 0, batch: int = 1) -> None:
    """Record a load, times in microseconds."""
    tracer.copy(batch, "load", "load", layer, 0, 0, START + start * US, START + end * US, nbytes)


def test_overlapping_copies_never_exceed_the_link() -> None:
    """Two copies that share a link of 1 GB/s for 100 us report 1 GB/s, not two halves or a double."""
    tracer = story_tracer()
    copy(tracer, 0, 100, 50_000)
    copy(tracer, 0, 100, 50_000, batch=2)
    assert tracer.report().load.gbps == 1.0


def test_chunks_count_all_their_time() -> None:
    """Bytes of all chunks are divided by the time of all chunks, not by that of the last one."""
    tracer = story_tracer()
    for chunk in range(4):
        copy(tracer, 100 * chunk, 100 * chunk + 50, 50_000, layer=chunk)
    report = tracer.report()
    assert report.load.busy_ns == 200 * US
    assert report.load.gbps == 1.0


def test_time_of_the_forward_is_no_transfer_time() -> None:
    """A copy that waited for a forward before it started is as long as the copy."""
    tracer = story_tracer()
    tracer.request(1, "backup", START, START, START + 900 * US, 1000, 1, "done")
    tracer.copy(1, "backup", "backup", 0, START, START, START + 890 * US, START + 900 * US, 1000)
    assert tracer.report().backup.busy_ns == 10 * US


def test_stall_is_split_at_the_start_of_the_copy() -> None:
    """A wait of 100 us whose copy started after 30 was queued for 30 and copying for 70."""
    tracer = story_tracer()
    tracer.plan(5, "load", "load", START, START, (1,))
    tracer.wait(1, "load", 0, START, START + 100 * US, 0)
    copy(tracer, 30, 100, 1000, batch=5)
    (row,) = tracer.report().layers
    assert (row.stall_ns, row.queued_ns, row.copying_ns) == (100 * US, 30 * US, 70 * US)


def test_wait_that_no_copy_ended_was_queued() -> None:
    """A wait whose copy never started was queued for all of it."""
    tracer = story_tracer()
    tracer.plan(5, "load", "load", START, START, (1,))
    tracer.wait(1, "load", 0, START, START + 100 * US, 0)
    (row,) = tracer.report().layers
    assert (row.queued_ns, row.copying_ns) == (100 * US, 0)


def test_wait_of_an_unknown_batch_is_not_split() -> None:
    """Where the ring has lost the batch, the stall counts and is put down to nothing."""
    tracer = story_tracer()
    tracer.wait(1, "load", 0, START, START + 100 * US, 0)
    (row,) = tracer.report().layers
    assert (row.stall_ns, row.queued_ns, row.copying_ns) == (100 * US, 0, 0)


def test_overlap_is_time_behind_layers() -> None:
    """Of a copy of 100 us, 40 us lie behind two overlapping layers: 40 % hidden."""
    tracer = story_tracer()
    copy(tracer, 0, 100, 1000)
    for start, end in ((50, 80), (70, 90)):
        tracer.layer(0, START + start * US, START + end * US)
    assert tracer.report().overlap_load == 0.4


def test_awaits_do_not_stall_a_forward() -> None:
    """A task that awaited a layer held no forward: it is told apart."""
    tracer = story_tracer()
    tracer.step(START, START + 100 * US)
    tracer.wait(1, "load", 0, START, START + 50 * US, ASYNC_LANE)
    report = tracer.report()
    assert (report.stall_ns, report.await_ns) == (0, 50 * US)
    assert "awaited" in str(report)


def test_nothing_recorded_is_zeros() -> None:
    """An empty recording has a report without division by zero."""
    report = Tracer().report()
    assert (report.stall_ratio, report.load.gbps, report.coalescing, report.layers) == (0, 0, 0, ())
    assert "0 steps" in str(report)
    assert "no forward was recorded" in str(report)


def test_text() -> None:
    """The printed report is the one in the documentation, line by line."""
    lines = str(Story().run(3).report()).splitlines()
    assert lines[:9] == [
        "offload report   3 steps, 4.00 ms in forward   (139 records)",
        "",
        "  stalled waiting for loads      0.412 ms     10.3% of forward",
        "  load          88.1 MB    26.5 GB/s    84.2% hidden behind compute",
        "  backup        37.7 MB    14.1 GB/s    89.0% hidden behind compute",
        "  coalescing  120 ops -> 72 transfers   (1.67x)",
        "",
        "  layer   waits   stall us   of it: queued   copying     load us   GB/s   stall",
        "      0       3      117.2             0.0     117.2       222.2  33.04   ##########",
    ]
    assert lines[-3:] == [
        "",
        "  stall: a forward waited for the layer; queued until its copy began, copying after that.",
        "  load: a load of the layer was running, whoever waited. All are sums over the steps.",
    ]


def test_failures_are_told(tmp_path: Path) -> None:
    """By direction, beside how many requests there were, also of a file; a report without any has no such line."""
    tracer = story_tracer()
    outcomes = {"load": ["done", "failed", "failed"], "backup": ["done", "cancelled"]}
    number = 0
    for direction, ended in outcomes.items():
        for outcome in ended:
            number += 1
            tracer.request(number, direction, START, START, START + US, 1, 1, outcome)
    report = tracer.report()
    assert "  requests    3 loads (2 failed), 2 backups (1 cancelled)" in str(report).splitlines()
    assert Report.of(timeline(tracer.export(tmp_path / "a.json"))) == report
    told = json.loads(report.to_json())
    assert told["requests"] == 5
    counts = ("requests", "failed", "cancelled")
    assert [told["load"][name] for name in counts] == [3, 2, 0]
    assert [told["backup"][name] for name in counts] == [2, 0, 1]
    assert "requests" not in str(Story().run(3).report())


def test_one_failure_of_one_request_is_told_of_one_direction() -> None:
    """A direction without requests is not named."""
    tracer = story_tracer()
    tracer.request(1, "load", START, START, START + US, 1, 1, "failed")
    tracer.request(2, "load", START, START, START + US, 1, 1, "cancelled")
    assert "  requests    2 loads (1 failed, 1 cancelled)" in str(tracer.report()).splitlines()


def test_small_numbers_are_told_as_such() -> None:
    """One step is no plural, a kilobyte is not 0.0 MB, and what did not happen is not a row of zeros."""
    tracer = story_tracer()
    tracer.step(START, START + 100 * US)
    copy(tracer, 0, 100, 1000)
    lines = str(tracer.report()).splitlines()
    assert lines[0] == "offload report   1 step, 0.10 ms in forward   (2 records)"
    assert lines[3:5] == [
        "  load           1.0 kB    10.0 MB/s     0.0% hidden behind compute",
        "  backup  nothing",
    ]


def test_full_ring_is_said() -> None:
    """A report of what is left says that the oldest was lost."""
    assert "RING FULL: oldest lost" in str(Story(story_tracer(capacity=100)).run(5).report())


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_file_reports_the_same(tmp_path: Path, name: str) -> None:
    """A report read from an exported file equals the tracer's own."""
    tracer = Story().run(3)
    assert Report.of(timeline(tracer.export(tmp_path / name))) == tracer.report()


def test_json_has_fields_and_ratios() -> None:
    """As JSON a report is its fields and the four numbers."""
    report = Story().run(1).report()
    data = json.loads(report.to_json())
    assert data["stall_ratio"] == report.stall_ratio
    assert data["layers"][5]["stall_ns"] == report.layers[5].stall_ns
    assert data["load"]["nbytes"] == report.load.nbytes
