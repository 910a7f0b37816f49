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
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from offload.trace import lanes
from offload.trace.joins import readers_of, requests_of
from offload.trace.jsontext import arguments, quoted, us
from offload.trace.layout import Placement, place
from offload.trace.records import ASYNC_LANE, UNKNOWN, Copy, Request, Tags, Wait
from offload.trace.timeline import Timeline

SCHEMA: Final = 1
FIRST_PID: Final = 10_000_000
"""Above Linux's largest process id, so that it never meets one in an overlay."""

MAX_RANKS: Final = 2**16
"""Ranks that a process id tells apart from others."""

DERIVED_COUNTERS: Final = ("bytes in flight", "queue")
"""Counters made at export from the records, rather than recorded."""

SORT_INDEX: Final = 2**24 - 1000
"""Below torch.profiler's GPUs (2**24 + i) and above its CPU processes."""

NAMED_REQUESTS: Final = 16
"""Request ids named by one slice; a batch of hundreds would dwarf its own timings."""

ASYNC, FLOW_START, FLOW_STEP, FLOW_END, COUNT, INSTANT = 1, 4, 5, 6, 7, 8
"""Order of the rest at one instant: after the slices (which sort by minus their length), begins before ends."""

Event: TypeAlias = "tuple[int, int, str]"
"""`(ns since the origin, order at that instant, text)`."""


def process(timeline: Timeline) -> int:
    """Return the process id of a rank's lanes."""
    return FIRST_PID + timeline.rank


def events(timeline: Timeline, shift_ns: int = 0) -> Iterator[str]:
    """Yield every event of a timeline as one JSON object: metadata, then sorted.

    Args:
        timeline: What to write.
        shift_ns: Added to every time, to lay it on another file's origin.
    """
    writer = _Writer(timeline, shift_ns)
    yield from writer.metadata()
    for _, _, text in heapq.merge(*writer.sources()):
        yield text


class _Writer:
    def __init__(self, timeline: Timeline, shift_ns: int) -> None:
        self._t = timeline
        self._zero = timeline.origin_ns - shift_ns
        self._pid = process(timeline)
        self._lanes: Placement = place(timeline)
        self._batch_requests = requests_of(timeline.plans)
        self._requests = {one.request: one for one in timeline.requests}
        self._by_issue = [i for i, copy in enumerate(timeline.copies) if copy.issue]
        self._by_issue.sort(key=lambda i: timeline.copies[i].issue)
        self._edges = list(readers_of(timeline))
        self._consumed = {copy for copy, _, first in self._edges if first}

    def sources(self) -> list[Iterator[Event]]:
        return [
            self._steps(),
            self._waits(),
            self._layers(),
            self._ticks(),
            self._plans(),
            self._issues(),
            self._copies(),
            self._submits(),
            self._leaves_queue(),
            self._settles(),
            self._awaits_begin(),
            self._awaits_end(),
            self._flow_issues(),
            self._flow_copies(),
            self._flow_extra_starts(),
            self._flow_layers(),
            self._bytes_in_flight(),
            self._queue(),
            self._counters(),
            self._instants(),
        ]

    def metadata(self) -> Iterator[str]:
        """Name and order the process and its lanes."""
        t = self._t
        label = quoted(f"offload rank{t.rank} {t.device}".rstrip())
        yield self._meta("process_name", 0, f'"name":{label}')
        yield self._meta("process_labels", 0, '"labels":"KV offload"')
        yield self._meta("process_sort_index", 0, f'"sort_index":{SORT_INDEX + t.rank}')
        for thread in sorted(self._lanes.threads(), key=lanes.sort_index):
            yield self._meta("thread_name", thread, f'"name":"{lanes.name(thread)}"')
            yield self._meta(
                "thread_sort_index", thread, f'"sort_index":{lanes.sort_index(thread)}'
            )

    def _meta(self, name: str, thread: int, args: str) -> str:
        on = f',"tid":{thread}' if thread else ""
        return f'{{"ph":"M","name":"{name}","pid":{self._pid}{on},"args":{{{args}}}}}'

    # ---- slices of a thread lane -----------------------------------------------------------------

    def _slice(
        self, thread: int, start: int, dur: int, cat: str, name: str, args: str, leaf: bool = True
    ) -> Event:
        if leaf and dur > 0:
            dur -= 1
        at = start - self._zero
        return (
            at,
            -dur,
            (
                f'{{"ph":"X","cat":"offload.{cat}","name":"{name}","pid":{self._pid},"tid":{thread},'
                f'"ts":{us(at)},"dur":{us(dur)},"args":{{{args}}}}}'
            ),
        )

    def _steps(self) -> Iterator[Event]:
        for one, thread in zip(self._t.steps, self._lanes.steps, strict=True):
            args = f'"step":{one.number}'
            yield self._slice(
                thread, one.start, one.end - one.start, "step", f"step {one.number}", args, False
            )

    def _waits(self) -> Iterator[Event]:
        for one, thread in zip(self._t.waits, self._lanes.waits, strict=True):
            if one.lane != ASYNC_LANE:
                args = _wait_args(one.layer, one.request, one.queued, one.end - one.start)
                yield self._slice(
                    thread,
                    one.start,
                    one.end - one.start,
                    "wait",
                    _layered("wait", one.layer),
                    args,
                )

    def _layers(self) -> Iterator[Event]:
        for one, thread in zip(self._t.layers, self._lanes.layers, strict=True):
            args = f'"layer":{one.layer}' + self._named(one.requests)
            yield self._slice(
                thread, one.start, one.end - one.start, "layer", f"layer {one.layer}", args
            )

    def _ticks(self) -> Iterator[Event]:
        for one, thread in zip(self._t.ticks, self._lanes.ticks, strict=True):
            yield self._slice(thread, one.start, one.end - one.start, "tick", "tick", "", False)

    def _plans(self) -> Iterator[Event]:
        for one, thread in zip(self._t.plans, self._lanes.plans, strict=True):
            args = f'"batch":{one.batch}' + self._named(one.requests)
            yield self._slice(
                thread, one.start, one.end - one.start, "issue", f"plan {one.direction}", args
            )

    def _issues(self) -> Iterator[Event]:
        for i in self._by_issue:
            one, thread = self._t.copies[i], self._lanes.issues[i]
            yield self._slice(
                thread,
                one.issue,
                one.issued - one.issue,
                "issue",
                f"issue {one.direction} L{one.layer}",
                f'"layer":{one.layer},"batch":{one.batch}',
            )

    def _copies(self) -> Iterator[Event]:
        for one, thread in zip(self._t.copies, self._lanes.copies, strict=True):
            yield self._slice(
                thread,
                one.start,
                one.end - one.start,
                one.direction,
                f"{one.direction} L{one.layer}",
                self._copy_args(one),
            )

    def _copy_args(self, one: Copy) -> str:
        dur = one.end - one.start
        text = (
            f'"layer":{one.layer},"batch":{one.batch},"nbytes":{one.nbytes},"ops":{one.ops},'
            f'"transfers":{one.transfers},"cuda_stream":{quoted(one.stream)}'
        )
        if dur:
            text += f',"gbps":{one.nbytes / dur:.3f}'
        if one.issue:
            text += f',"queue_us":{us(max(0, one.start - one.issue))}'
        return text + self._named(self._batch_requests.get(one.batch, ()))

    def _named(self, requests: Sequence[int]) -> str:
        """Return the args that name requests and show the labels their callers gave them."""
        if not requests:
            return ""
        ids = requests[:NAMED_REQUESTS]
        text = f',"requests":"{" ".join(map(str, ids))}"'
        pages = [self._requests[i].pages for i in requests if i in self._requests]
        if len(pages) == len(requests):
            text += f',"pages":{sum(pages)}'
        tags = [_tag_text(self._requests[i].tags) for i in ids if i in self._requests]
        if any(tags):
            text += f',"tags":{quoted("; ".join(filter(None, tags)))}'
        return text

    # ---- spans that cross an await ---------------------------------------------------------------

    def _span(
        self, ph: str, cat: str, ident: int, name: str, ns: int, order: int, args: str = ""
    ) -> Event:
        at = ns - self._zero
        return (
            at,
            order,
            (
                f'{{"ph":"{ph}","cat":"offload.{cat}","id2":{{"local":"{ident:#x}"}},"name":"{name}",'
                f'"pid":{self._pid},"tid":{lanes.SCHEDULER},"ts":{us(at)},"args":{{{args}}}}}'
            ),
        )

    def _submits(self) -> Iterator[Event]:
        for one in self._t.requests:
            yield self._span(
                "b", "request", one.request, "request", one.start, ASYNC, _request_args(one)
            )
            yield self._span("b", "request", one.request, "queued", one.start, ASYNC)

    def _leaves_queue(self) -> Iterator[Event]:
        for one in sorted(self._t.requests, key=_left_queue):
            yield self._span("e", "request", one.request, "queued", _left_queue(one), ASYNC + 1)
            if one.issued:
                yield self._span("b", "request", one.request, _moving(one), one.issued, ASYNC + 1)

    def _settles(self) -> Iterator[Event]:
        for one in sorted(self._t.requests, key=lambda request: request.end):
            if one.issued:
                yield self._span("e", "request", one.request, _moving(one), one.end, ASYNC + 2)
            yield self._span("e", "request", one.request, "request", one.end, ASYNC + 2)

    def _awaits_begin(self) -> Iterator[Event]:
        for ident, one in self._awaits():
            args = _wait_args(one.layer, one.request, one.queued, one.end - one.start)
            name = _layered("await", one.layer)
            yield self._span("b", "await", ident, name, one.start, ASYNC, args)

    def _awaits_end(self) -> Iterator[Event]:
        for ident, one in sorted(self._awaits(), key=lambda item: item[1].end):
            name = _layered("await", one.layer)
            yield self._span("e", "await", ident, name, one.end, ASYNC + 2)

    def _awaits(self) -> Iterator[tuple[int, Wait]]:
        return ((i + 1, wait) for i, wait in enumerate(self._t.waits) if wait.lane == ASYNC_LANE)

    # ---- flows -----------------------------------------------------------------------------------

    def _flow(self, ph: str, name: str, ident: int, thread: int, ns: int) -> Event:
        at = ns - self._zero
        order = {"s": FLOW_START, "t": FLOW_STEP, "f": FLOW_END}[ph]
        enclosing = ',"bp":"e"' if ph == "f" else ""
        return (
            at,
            order,
            (
                f'{{"ph":"{ph}","cat":"offload.flow","name":"{name}","id":{self._flow_id(ident)},'
                f'"pid":{self._pid},"tid":{thread},"ts":{us(at)}{enclosing}}}'
            ),
        )

    def _flow_id(self, ident: int) -> int:
        """Return an id of its own for each chain, apart from those of other ranks: flow ids are global."""
        return (self._t.rank << 40) + ident + 1

    def _starts_at_issue(self, copy: Copy) -> bool:
        return 0 < copy.issue <= copy.start

    def _flow_issues(self) -> Iterator[Event]:
        for i in self._by_issue:
            one = self._t.copies[i]
            if self._starts_at_issue(one):
                yield self._flow("s", one.direction, i, self._lanes.issues[i], one.issue)

    def _flow_copies(self) -> Iterator[Event]:
        for i, one in enumerate(self._t.copies):
            from_issue, onward = self._starts_at_issue(one), i in self._consumed
            if from_issue or onward:
                ph = "s" if not from_issue else "t" if onward else "f"
                yield self._flow(ph, one.direction, i, self._lanes.copies[i], one.start)

    def _flow_extra_starts(self) -> Iterator[Event]:
        extras = [
            (copy, number) for number, (copy, _, first) in enumerate(self._edges) if not first
        ]
        for copy, number in sorted(extras):
            one = self._t.copies[copy]
            ident = len(self._t.copies) + number
            yield self._flow("s", one.direction, ident, self._lanes.copies[copy], one.start)

    def _flow_layers(self) -> Iterator[Event]:
        for number, (copy, layer, first) in enumerate(self._edges):
            ident = copy if first else len(self._t.copies) + number
            start, thread = self._t.layers[layer].start, self._lanes.layers[layer]
            yield self._flow("f", self._t.copies[copy].direction, ident, thread, start)

    # ---- counters and instants -------------------------------------------------------------------

    def _count(self, name: str, ns: int, values: str) -> Event:
        at = ns - self._zero
        return (
            at,
            COUNT,
            f'{{"ph":"C","name":{quoted(name)},"pid":{self._pid},"ts":{us(at)},"args":{{{values}}}}}',
        )

    def _bytes_in_flight(self) -> Iterator[Event]:
        copies = self._t.copies
        begins = ((one.start, one.nbytes, one.direction) for one in copies)
        ends = [(one.end, -one.nbytes, one.direction) for one in copies]
        ends.sort()
        level = {"load": 0, "backup": 0}
        for ns, change, direction in heapq.merge(ends, begins, key=lambda item: item[0]):
            level[direction] += change
            yield self._count(
                "bytes in flight", ns, f'"h2d":{level["load"]},"d2h":{level["backup"]}'
            )

    def _queue(self) -> Iterator[Event]:
        begins = ((one.start, 1, one.direction) for one in self._t.requests)
        ends = sorted((_left_queue(one), -1, one.direction) for one in self._t.requests)
        level = {"load": 0, "backup": 0}
        for ns, change, direction in heapq.merge(begins, ends, key=lambda item: item[0]):
            level[direction] += change
            yield self._count("queue", ns, f'"load":{level["load"]},"backup":{level["backup"]}')

    def _counters(self) -> Iterator[Event]:
        for one in self._t.counters:
            yield self._count(one.name, one.start, arguments(one.values))

    def _instants(self) -> Iterator[Event]:
        for one in self._t.instants:
            at = one.start - self._zero
            yield (
                at,
                INSTANT,
                (
                    f'{{"ph":"i","s":"t","cat":"offload.event","name":{quoted(one.name)},'
                    f'"pid":{self._pid},"tid":{lanes.SCHEDULER},"ts":{us(at)},'
                    f'"args":{{{arguments(one.args or {})}}}}}'
                ),
            )


def _left_queue(request: Request) -> int:
    return request.issued or request.end


def _moving(request: Request) -> str:
    return "loading" if request.direction == "load" else "backing up"


def _layered(verb: str, layer: int) -> str:
    return f"{verb} all" if layer < 0 else f"{verb} L{layer}"


def _wait_args(layer: int, request: int, queued: int, length: int) -> str:
    text = f'"layer":{layer},"request":{request}'
    if queued != UNKNOWN:
        cause = "queue" if 2 * queued > length else "copy"
        text += f',"queue_us":{us(queued)},"cause":"{cause}"'
    return text


def _request_args(one: Request) -> str:
    text = (
        f'"request":{one.request},"direction":"{one.direction}","nbytes":{one.nbytes},'
        f'"pages":{one.pages},"outcome":{quoted(one.outcome)}'
    )
    if one.issued:
        text += f',"queue_us":{us(max(0, one.issued - one.start))}'
    if one.outcome == "unfinished":
        text += ',"unfinished":true'
    if one.tags:
        text += "," + arguments(one.tags, prefix="tag.")
    return text


def _tag_text(tags: Tags | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in (tags or {}).items())
