"""Timeline -> trace events, one line of JSON each, in the order that every reader nests correctly.

The schema (`SCHEMA` counts its versions; keys are only added within one):

    process   10_000_000 + rank, "offload rank0 cuda:0", between the CPU's and the GPUs' of torch.profiler
    forward   step 3 (offload.step) > wait L3 (offload.wait) | layer 3 (offload.layer); one lane per concurrent forward
    load H2D, backup D2H
              load L3 (offload.load), backup L3 (offload.backup); one lane per stream
    scheduler tick (offload.tick) > plan load, issue load L3 (offload.issue); instants (offload.event)
    async     request (offload.request) > queued, loading or backing up; await L3 (offload.await)
    counters  "bytes in flight" {h2d, d2h}; "queue" {load, backup}; those of `Tracer.counter`
    flows     offload.flow "load": issue -> copy -> each layer that read it; "backup": issue -> copy

`ts` and `dur` are microseconds with three decimals, exact nanoseconds since `offload.t0_unix_ns`. A slice that can
hold no other is one nanosecond short, so that touching neighbours do not overlap in readers that add
floats: its length is `dur` + 1 ns. No key of `args` is one that HTA takes for a GPU's (`stream`, `bytes`, ...).

Events come in the order of (ts, longest first), merged lazily from one sorted generator per kind, so
that an export holds no more than the snapshot and a few lists of indices.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from offload.trace import lanes
from offload.trace.events_counts import DERIVED_COUNTERS, Counts
from offload.trace.events_flows import Flows
from offload.trace.events_frame import Frame
from offload.trace.events_slices import Slices
from offload.trace.events_spans import Spans
from offload.trace.jsontext import quoted
from offload.trace.timeline import Timeline

__all__ = ["DERIVED_COUNTERS", "FIRST_PID", "MAX_RANKS", "SCHEMA", "events", "process"]

SCHEMA: Final = 1
FIRST_PID: Final = 10_000_000
"""Above Linux's largest process id, so that it never meets one in an overlay."""

MAX_RANKS: Final = 2**16
"""Ranks that a process id tells apart from others."""

SORT_INDEX: Final = 2**24 - 1000
"""Below torch.profiler's GPUs (2**24 + i) and above its CPU processes."""


def process(timeline: Timeline) -> int:
    """Return the process id of a rank's lanes."""
    return FIRST_PID + timeline.rank


def events(timeline: Timeline, shift_ns: int = 0) -> Iterator[str]:
    """Yield every event of a timeline as one JSON object: metadata, then sorted.

    Args:
        timeline: What to write.
        shift_ns: Added to every time, to lay it on another file's origin.
    """
    frame = Frame.of(timeline, process(timeline), shift_ns)
    yield from _metadata(frame)
    writers = (Slices(frame), Spans(frame), Flows(frame), Counts(frame))
    sources = (source for writer in writers for source in writer.sources())
    for _, _, text in heapq.merge(*sources):
        yield text


def _metadata(frame: Frame) -> Iterator[str]:
    """Name and order the process and its lanes."""
    t = frame.timeline
    label = quoted(f"offload rank{t.rank} {t.device}".rstrip())
    yield _meta(frame, "process_name", 0, f'"name":{label}')
    yield _meta(frame, "process_labels", 0, '"labels":"KV offload"')
    yield _meta(frame, "process_sort_index", 0, f'"sort_index":{SORT_INDEX + t.rank}')
    for thread in sorted(frame.lanes.threads(), key=lanes.sort_index):
        yield _meta(frame, "thread_name", thread, f'"name":"{lanes.name(thread)}"')
        yield _meta(frame, "thread_sort_index", thread, f'"sort_index":{lanes.sort_index(thread)}')


def _meta(frame: Frame, name: str, thread: int, args: str) -> str:
    on = f',"tid":{thread}' if thread else ""
    return f'{{"ph":"M","name":"{name}","pid":{frame.pid}{on},"args":{{{args}}}}}'
