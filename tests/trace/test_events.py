"""The written form, to the letter, of a run short enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.trace import lanes
from offload.trace.jsontext import arguments, us
from tests.trace.story import START, US, story_tracer

GOLDEN = """\
{"displayTimeUnit":"ns","schemaVersion":1,"distributedInfo":{"rank": 2},
"metadata":{"offload.schema": 1, "offload.t0_unix_ns": 1800000000000000000, "offload.ring_full": 0, \
"offload.dropped": 0, "offload.records": 6, "offload.ready_waits": 1, "offload.unmeasured_waits": 0, "offload.rank": 2, "offload.device": "cuda:1"},
"traceEvents":[
{"ph":"M","name":"process_name","pid":10000002,"args":{"name":"offload rank2 cuda:1"}},
{"ph":"M","name":"process_labels","pid":10000002,"args":{"labels":"KV offload"}},
{"ph":"M","name":"process_sort_index","pid":10000002,"args":{"sort_index":16776218}},
{"ph":"M","name":"thread_name","pid":10000002,"tid":1,"args":{"name":"forward"}},
{"ph":"M","name":"thread_sort_index","pid":10000002,"tid":1,"args":{"sort_index":1000}},
{"ph":"M","name":"thread_name","pid":10000002,"tid":2,"args":{"name":"load H2D"}},
{"ph":"M","name":"thread_sort_index","pid":10000002,"tid":2,"args":{"sort_index":2000}},
{"ph":"M","name":"thread_name","pid":10000002,"tid":3,"args":{"name":"backup D2H"}},
{"ph":"M","name":"thread_sort_index","pid":10000002,"tid":3,"args":{"sort_index":3000}},
{"ph":"M","name":"thread_name","pid":10000002,"tid":4,"args":{"name":"scheduler"}},
{"ph":"M","name":"thread_sort_index","pid":10000002,"tid":4,"args":{"sort_index":4000}},
"""


LAST = [
    (
        '{"ph":"X","cat":"offload.wait","name":"wait L0","pid":10000002,"tid":1,"ts":4.000,"dur":5.999,'
        '"args":{"layer":0,"request":5,"queue_us":1.000,"cause":"copy"}}'
    ),
    (
        '{"ph":"X","cat":"offload.load","name":"load L0","pid":10000002,"tid":2,"ts":5.000,"dur":3.999,'
        '"args":{"layer":0,"batch":1,"nbytes":8000,"ops":1,"transfers":1,"cuda_stream":"load",'
        '"gbps":2.000,"queue_us":2.000,"requests":"5","pages":1,"tags":"rid=a"}}'
    ),
    (
        '{"ph":"t","cat":"offload.flow","name":"load","id":2199023255553,"pid":10000002,"tid":2,'
        '"ts":5.000}'
    ),
    '{"ph":"C","name":"bytes in flight","pid":10000002,"ts":5.000,"args":{"h2d":8000,"d2h":0}}',
    '{"ph":"C","name":"bytes in flight","pid":10000002,"ts":9.000,"args":{"h2d":0,"d2h":0}}',
    (
        '{"ph":"e","cat":"offload.request","id2":{"local":"0x5"},"name":"loading","pid":10000002,"tid":4,'
        '"ts":9.500,"args":{}}'
    ),
    (
        '{"ph":"e","cat":"offload.request","id2":{"local":"0x5"},"name":"request","pid":10000002,"tid":4,'
        '"ts":9.500,"args":{}}'
    ),
    (
        '{"ph":"X","cat":"offload.layer","name":"layer 0","pid":10000002,"tid":1,"ts":10.000,"dur":9.999,'
        '"args":{"layer":0,"requests":"5","pages":1,"tags":"rid=a"}}'
    ),
    (
        '{"ph":"f","cat":"offload.flow","name":"load","id":2199023255553,"pid":10000002,"tid":1,'
        '"ts":10.000,"bp":"e"}'
    ),
]


def test_golden(tmp_path: Path) -> None:
    """Header and metadata are those of schema 1, then come the events in the order of time."""
    tracer = story_tracer(rank=2)
    tracer.device = "cuda:1"
    tracer.plan(1, "load", "load", START + US, START + 3 * US, (5,))
    tracer.copy(
        1, "load", "load", 0, START + 3 * US, START + 4 * US, START + 5 * US, START + 9 * US, 8000
    )
    tracer.wait(5, "load", 0, START + 4 * US, START + 10 * US, 0)
    tracer.ready()
    tracer.layer(0, START + 10 * US, START + 20 * US, 0, (5,))
    tracer.step(START + 4 * US, START + 20 * US)
    tracer.request(5, "load", START, START + 2 * US, START + 9_500, 8000, 1, "done", {"rid": "a"})
    text = tracer.export(tmp_path / "run.json").read_text()
    assert text.startswith(GOLDEN)
    assert text.endswith("\n]}\n")
    events = text[len(GOLDEN) : -len("\n]}\n")].split(",\n")
    assert events[-len(LAST) :] == LAST


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0.000"), (1, "0.001"), (999, "0.999"), (1_234_567, "1234.567")]
)
def test_microseconds_are_exact(ns: int, text: str) -> None:
    """Integer nanoseconds become microseconds with three decimals, without a float on the way."""
    assert us(ns) == text


def test_arguments_of_any_origin() -> None:
    """Reserved keys are renamed, what is no finite scalar becomes text."""
    values = {"stream": 1, "x": float("nan"), "y": 1.5, "z": None, 'q"': [1], "ok": True}
    assert arguments(values) == ('"stream_":1,"x":"nan","y":1.5,"z":null,"q\\"":"[1]","ok":true')


def test_lanes_fill_from_below() -> None:
    """Disjoint or nested slices share a lane, partly overlapping ones take the next."""
    slices = [(0, 10), (2, 5), (5, 10), (8, 12), (10, 11), (11, 20)]
    assert lanes.place(slices, nested=True) == [0, 0, 0, 1, 0, 0]
    assert lanes.place(slices, nested=False) == [0, 1, 1, 2, 0, 0]


def test_lane_names_and_order() -> None:
    """Further lanes of a family are named by number and stand below their first."""
    threads = sorted([4, 12, 1, 2, 11, 3, 21], key=lanes.sort_index)
    assert [lanes.name(thread) for thread in threads] == [
        "forward",
        "forward #2",
        "forward #3",
        "load H2D",
        "load H2D #2",
        "backup D2H",
        "scheduler",
    ]
