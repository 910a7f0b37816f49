"""OpenTelemetry: one span per settled request, once."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

pytest.importorskip("opentelemetry", reason="the extra `otel` is not installed")

from offload.metrics_otel import RequestSpans
from tests.trace.story import START, UNIX, Story, story_tracer, unfinished


@attrs.define(eq=False)
class Span:
    """What a span was given."""

    name: str
    start_time: int
    attributes: dict[str, Any]
    end_time: int = 0
    status: Any = None

    def set_status(self, status: Any) -> None:
        """Keep it."""
        self.status = status

    def end(self, end_time: int) -> None:
        """Keep it."""
        self.end_time = end_time


@attrs.define(eq=False)
class Otel:
    """The part of an OpenTelemetry tracer that is used."""

    spans: list[Span] = attrs.field(factory=list)

    def start_span(self, name: str, start_time: int, attributes: dict[str, Any]) -> Span:
        """Make and keep a span."""
        self.spans.append(Span(name, start_time, attributes))
        return self.spans[-1]


def test_one_span_per_request_once() -> None:
    """Each settled request is one span on the wall clock; a second flush emits only what is new."""
    story, otel = Story(), Otel()
    story.run(2)
    story.tracer.opened("cpu", unfinished)
    spans = RequestSpans(story.tracer, otel)  # type: ignore[arg-type]
    count = spans.flush()
    assert count == len(otel.spans) == len(story.tracer.timeline().requests) - 2
    assert spans.flush() == 0
    story.step()
    assert 0 < spans.flush() == len(otel.spans) - count
    first = next(r for r in story.tracer.timeline().requests if r.outcome == "done")
    assert otel.spans[0].name == "offload load"
    assert otel.spans[0].start_time == UNIX + first.start - START
    assert otel.spans[0].end_time == UNIX + first.end - START
    assert otel.spans[0].attributes["offload.nbytes"] == first.nbytes


def test_failure_and_tags() -> None:
    """A failed request is a span in error; the caller's labels are attributes."""
    tracer, otel = story_tracer(), Otel()
    tracer.request(1, "load", START, 0, START + 5, 64, 1, "failed", {"rid": "req-7"})
    RequestSpans(tracer, otel).flush()  # type: ignore[arg-type]
    (span,) = otel.spans
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["offload.tag.rid"] == "req-7"
