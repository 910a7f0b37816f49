"""Our lanes laid over torch.profiler's: one clock, nobody's numbers changed."""

from __future__ import annotations

import gzip
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.trace import Anchor, Tracer
from offload.trace.read import load
from offload.trace.timeline import Timeline
from tests.readers.tools import ask, errors
from tests.trace.story import START, Story, story_tracer

BASE_NS = 1_798_761_600_000_000_000
"""What the made-up profile counts from: the quarter of a year that the story's wall clock is in."""


def profile(path: Path) -> Path:
    """Write a profile as torch makes it for one GPU: five steps of operators, launches and kernels."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    ]
    for i in range(20):
        ts = 1_238_400_000_000 + i * 200.0
        args = {"External id": i + 1, "Ev Idx": i}
        events += [
            _event(ts, 60, "cpu_op", "aten::mm", 4242, 4242, args),
            _event(
                ts + 5, 10, "cuda_runtime", "cudaLaunchKernel", 4242, 4242, {"correlation": i + 1}
            ),
            _event(
                ts + 30,
                90 + i % 3,
                "kernel",
                "gemm",
                0,
                7,
                {"stream": 7, "device": 0, "correlation": i + 1, "External id": i + 1},
            ),
        ]
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
    }
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    return path


def _event(
    ts: float, dur: float, cat: str, name: str, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "ts": ts,
        "dur": dur,
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def breakdown(folder: Path, trace: Path) -> dict[str, Any]:
    """Return HTA's temporal breakdown of one trace."""
    hta = pytest.importorskip("hta.trace_analysis", reason="HTA is not installed: `make readers`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        analysis = hta.TraceAnalysis(trace_files={0: str(trace)}, trace_dir=str(folder))
        found: dict[str, Any] = analysis.get_temporal_breakdown(visualize=False).to_dict("records")[
            0
        ]
    return found


def test_hta_sees_the_same(tmp_path: Path) -> None:
    """HTA's numbers for a profile do not change by a digit when our lanes are merged into it."""
    before = profile(tmp_path / "before.json.gz")
    after = Story().run(3).export(tmp_path / "after.json.gz", overlay=before)
    assert breakdown(tmp_path, after) == breakdown(tmp_path, before)
    assert len(load(after)["traceEvents"]) > 300


def test_hta_bites(tmp_path: Path) -> None:
    """With the reserved key `stream` in our args, HTA takes copies for kernels: its numbers change."""
    before = profile(tmp_path / "before.json.gz")
    after = Story().run(3).export(tmp_path / "after.json", overlay=before)
    after.write_text(after.read_text().replace('"cuda_stream":"load"', '"stream":20'))
    assert breakdown(tmp_path, after) != breakdown(tmp_path, before)


def test_profile_is_kept_word_for_word(tmp_path: Path) -> None:
    """The profile's own text stands unchanged in the merged file, and the rest of its keys with it."""
    before = profile(tmp_path / "before.json.gz")
    after = Story().run(1).export(tmp_path / "after.json", overlay=before)
    text = gzip.decompress(before.read_bytes()).decode()
    end = text.rindex("]")
    assert after.read_text().startswith(text[:end])
    assert load(after)["baseTimeNanoseconds"] == BASE_NS


def test_engine_takes_the_merge(tmp_path: Path) -> None:
    """Perfetto reports no error for the merged file, and our lanes start where the wall clock says."""
    path = Story().run(1).export(tmp_path / "after.json", overlay=profile(tmp_path / "b.json.gz"))
    first = min(
        e["ts"] for e in load(path)["traceEvents"] if str(e.get("cat", "")) == "offload.tick"
    )
    assert errors(path) == {}
    assert first == (1_800_000_000_000_000_000 - BASE_NS) / 1000 + 40.0


def test_real_profile_lies_inside_our_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that torch.profiler recorded inside a layer lies inside our slice of it, within 200 us."""
    tracer = Tracer(active=False)
    x = torch.ones(64, 64)
    with torch.profiler.profile() as profiler, tracer.window():
        for layer in range(4):
            start = time.perf_counter_ns()
            with torch.profiler.record_function(f"torch layer {layer}"):
                for _ in range(50):
                    x = x @ x / 64
            tracer.layer(layer, start, time.perf_counter_ns())
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    path = tracer.export(tmp_path / "both.json.gz", overlay=tmp_path / "torch.json")
    assert errors(path) == {}
    assert outside(path) == [0] * 4
    # The control: by a clock that is ten milliseconds off, regions and slices do not fit.
    right = Timeline.unix_ns
    monkeypatch.setattr(Timeline, "unix_ns", lambda self, ns: right(self, ns) + 10_000_000)
    path = tracer.export(tmp_path / "off.json.gz", overlay=tmp_path / "torch.json")
    assert min(outside(path)) > 0


def outside(path: Path) -> list[int]:
    """Return by how many nanoseconds each of torch's regions sticks out of our slice of the same layer.

    Up to 200 us are nobody's fault: a preempted thread. The clocks themselves agree to a fraction of a microsecond.
    """
    theirs = "select ts, ts + dur as te from slice where name glob 'torch layer*' order by ts"
    ours = "select ts, ts + dur as te from slice where category = 'offload.layer' order by ts"
    slack = 200_000
    return [
        max(0, outer["ts"] - slack - inner["ts"], inner["te"] - outer["te"] - slack)
        for inner, outer in zip(*ask(path, [theirs, ours]), strict=True)
    ]


def test_wall_clock_step_does_not_move_an_overlay(tmp_path: Path) -> None:
    """When the wall clock jumped after the recording began, the anchor taken nearest to it counts."""
    tracer = story_tracer()
    tracer.anchor = Anchor(0, 0)
    tracer._anchors.append(Anchor(START, 1_800_000_000_000_000_000))
    path = Story(tracer).run(1).export(tmp_path / "a.json", overlay=profile(tmp_path / "b.json.gz"))
    first = min(
        e["ts"] for e in load(path)["traceEvents"] if str(e.get("cat", "")) == "offload.tick"
    )
    assert first == (1_800_000_000_000_000_000 - BASE_NS) / 1000 + 40.0
