"""The recorder: windows, lanes, labels, counts, and threads."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest

from offload.errors import RequestError
from offload.trace import Anchor, Tracer
from offload.trace.forward import ForwardTrace
from offload.trace.read import load
from tests.trace.story import START, US, Story, story_tracer, unfinished


def test_windows_record_inside_only() -> None:
    """A tracer that waits for a window is active inside windows, nested ones included, and not after."""
    tracer = Tracer(active=False)
    states = [tracer.active]
    with tracer.window():
        states.append(tracer.active)
        with tracer.window():
            states.append(tracer.active)
        states.append(tracer.active)
    assert [*states, tracer.active] == [False, True, True, True, False]


def test_start_stop_clear() -> None:
    """Start and stop switch, clear forgets records and counts."""
    tracer = Story().run(1)
    tracer.stop()
    assert not tracer.active
    tracer.start()
    tracer.clear()
    assert (tracer.active, tracer.dropped, tracer.timeline().records) == (True, 0, 0)


def test_reading_does_not_count() -> None:
    """Asking how many records were lost, again and again, does not change the answer."""
    tracer = story_tracer(capacity=3)
    for i in range(5):
        tracer.tick(START + i, START + i + 1)
    assert [tracer.dropped, tracer.dropped, tracer.dropped] == [2, 2, 2]


def test_lanes_are_the_lowest_free() -> None:
    """Concurrent forwards take the lowest lane that is free."""
    tracer = Tracer()
    first, second = tracer.take_lane(), tracer.take_lane()
    tracer.free_lane(first)
    assert (first, second, tracer.take_lane(), tracer.take_lane()) == (0, 1, 0, 2)


def test_threads_lose_no_record() -> None:
    """Eight threads that record at once lose nothing, and the count is exact."""
    tracer = story_tracer(capacity=1000)

    def record() -> None:
        for i in range(500):
            tracer.tick(START + i, START + i + 1)
            tracer.ready()

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracer.dropped == 3000
    assert tracer.report().ready_waits == 4000


def test_export_while_recording(tmp_path: Path) -> None:
    """An export in a thread beside a recording one is a valid trace of some moment."""
    story = Story(story_tracer(capacity=1000))
    stop = threading.Event()

    def record() -> None:
        while not stop.is_set():
            story.step()

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(5):
            path = asyncio.run(_export(story.tracer, tmp_path / "a.json"))
            assert load(path)["metadata"]["offload.schema"] == 1
    finally:
        stop.set()
        thread.join()


async def _export(tracer: Tracer, path: Path) -> Path:
    return await asyncio.to_thread(tracer.export, path)


def test_labels_are_those_of_submit(tmp_path: Path) -> None:
    """Copies of a merged batch show each request's own labels, a request without any shows none."""
    rid: ContextVar[str | None] = ContextVar("rid", default=None)
    tracer = story_tracer(labels=lambda: {"rid": rid.get()} if rid.get() else None)
    tags = []
    for name in ("req-7", "req-8", None):
        rid.set(name)
        tags.append(tracer.tags())
    rid.set("other")
    tracer.plan(1, "load", "load", START, START + US, (1, 2, 3))
    tracer.copy(1, "load", "load", 0, START, START, START + US, START + 2 * US, 64)
    for request, tag in enumerate(tags, start=1):
        tracer.request(request, "load", START, START, START + 3 * US, 64, 1, "done", tag)
    events = load(tracer.export(tmp_path / "a.json"))["traceEvents"]
    copy = next(e for e in events if e.get("cat") == "offload.load")
    spans = [e["args"].get("tag.rid") for e in events if e["ph"] == "b" and e["name"] == "request"]
    assert copy["args"]["tags"] == "rid=req-7; rid=req-8"
    assert copy["args"]["requests"] == "1 2 3"
    assert spans == ["req-7", "req-8", None]


def test_open_requests_are_shown(tmp_path: Path) -> None:
    """Requests that have not settled are in the file, marked, with what is known of them."""
    tracer = story_tracer()
    tracer.opened("cpu", unfinished)
    events = load(tracer.export(tmp_path / "a.json"))["traceEvents"]
    spans = {
        e["args"]["request"]: e["args"] for e in events if e["ph"] == "b" and "request" in e["args"]
    }
    assert spans[901]["tag.rid"] == "req-9"
    assert all(span["unfinished"] for span in spans.values())


def test_suffix_is_refused(tmp_path: Path) -> None:
    """A name that says neither kind of file is refused before anything is written."""
    with pytest.raises(RequestError, match=r"ends in \.json or \.json\.gz"):
        Story().run(1).export(tmp_path / "a.pftrace")
    assert list(tmp_path.iterdir()) == []


def test_anchor_takes_the_tightest_reading() -> None:
    """Of several readings the anchor is the one least disturbed, in its middle."""
    perf = iter([0, 100, 200, 204, 300, 400])
    wall = iter([10, 20, 30])
    assert Anchor.take(lambda: next(perf), lambda: next(wall), samples=3) == Anchor(202, 20)


def test_forward_splits_steps() -> None:
    """Layers 0 and 1 entered twice are two steps on one lane; the lane is free afterwards."""
    tracer = Tracer()
    forward = ForwardTrace(tracer)
    for layer in (0, 1, 0, 1):
        forward.arrive(layer)
        forward.waited(9, layer)
        forward.leave(layer, (9,))
    forward.close()
    recorded = tracer.timeline()
    assert [(step.lane, step.number) for step in recorded.steps] == [(0, 0), (0, 1)]
    assert [layer.layer for layer in recorded.layers] == [0, 1, 0, 1]
    assert [wait.request for wait in recorded.waits] == [9, 9, 9, 9]
    assert tracer.take_lane() == 0
