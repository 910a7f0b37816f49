"""OpenTelemetry: one span per settled request, made afterwards from what the tracer recorded.

A span costs more than ten microseconds, so never one per layer, and none while a request runs. Needs the extra
`otel` (the API alone; spans go wherever the application's SDK sends them):

    spans = RequestSpans(tracer, opentelemetry.trace.get_tracer("offload"))
    ...
    spans.flush()      # now and then; each request once
"""

from __future__ import annotations

import attrs
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace import Tracer as OtelTracer

from offload.trace import Tracer
from offload.trace.records import Request
from offload.trace.timeline import Timeline


@attrs.define(eq=False)
class RequestSpans:
    """Turns the settled requests of a tracer into spans."""

    _tracer: Tracer
    _otel: OtelTracer
    _until_ns: int = attrs.field(default=0, init=False)

    def flush(self) -> int:
        """Emit the requests that settled since the last call; return how many."""
        timeline = self._tracer.timeline()
        settled = [
            request
            for request in timeline.requests
            if request.outcome != "unfinished" and request.end > self._until_ns
        ]
        for request in settled:
            self._emit(request, timeline)
        self._until_ns = max((request.end for request in settled), default=self._until_ns)
        return len(settled)

    def _emit(self, request: Request, timeline: Timeline) -> None:
        span = self._otel.start_span(
            f"offload {request.direction}",
            start_time=timeline.unix_ns(request.start),
            attributes={
                "offload.request": request.request,
                "offload.direction": request.direction,
                "offload.nbytes": request.nbytes,
                "offload.pages": request.pages,
                "offload.outcome": str(request.outcome),
                "offload.queue_us": max(0, (request.issued or request.end) - request.start) / 1e3,
                **{f"offload.tag.{key}": str(value) for key, value in (request.tags or {}).items()},
            },
        )
        if request.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=timeline.unix_ns(request.end))
