"""A plausible run on a clock of its own: what the trace tests record, with no scheduler and no time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs

from offload.trace import ASYNC_LANE, Anchor, OpenRequest, Tracer
from offload.trace.records import Tags

START = 5_000_000_000
"""The fake monotonic clock at the tracer's creation."""

UNIX = 1_800_000_000_000_000_000
"""The wall clock at the same moment."""

US = 1_000
LAYERS = 12
PAGE_BYTES = 1 << 20


def story_tracer(
    capacity: int = 65_536, rank: int = 0, labels: Callable[[], Tags | None] | None = None
) -> Tracer:
    """Return a tracer that began at START."""
    return Tracer(capacity, rank, labels=labels, anchor=Anchor(START, UNIX))


@attrs.define(eq=False)
class Story:
    """Records forward passes whose loads and backups run beside them. Layer 5 of each load is slow."""

    tracer: Tracer = attrs.field(factory=story_tracer)
    layers: int = LAYERS
    now: int = START + 40 * US
    next_id: int = 1
    random: Random = attrs.field(factory=lambda: Random(7))

    def run(self, steps: int = 3) -> Tracer:
        """Record some steps and the settled requests of each; returns the tracer."""
        self.tracer.device = "cuda:0"
        for _ in range(steps):
            self.step()
        return self.tracer

    def step(self) -> None:
        """One forward over one load batch of two or three requests, and one backup of its new pages."""
        count = self.random.choice((2, 3))
        loads = tuple(range(self.next_id, self.next_id + count))
        batch, self.next_id = self.next_id, self.next_id + count + 2
        submitted = self.now
        self.tracer.tick(submitted, submitted + 12 * US)
        self.tracer.plan(batch, "load", "load", submitted + 20 * US, submitted + 55 * US, loads)
        landed = self.copies(batch, "load", submitted + 60 * US, count)
        compute_end = self.forward(submitted + 90 * US, landed, loads)
        for request in loads:
            self.settle(request, "load", submitted, submitted + 60 * US, landed[-1])
        backup = batch + count
        self.tracer.plan(
            backup, "backup", "backup", submitted + 150 * US, submitted + 170 * US, (backup,)
        )
        ends = self.copies(backup, "backup", submitted + 400 * US, 1)
        self.settle(backup, "backup", submitted + 140 * US, submitted + 400 * US, ends[-1])
        self.tracer.counter("host pool", submitted, {"used": batch * PAGE_BYTES})
        self.now = max(compute_end, ends[-1], landed[-1]) + 70 * US

    def copies(self, batch: int, direction: str, start: int, requests: int) -> list[int]:
        """Record the layers of a batch one behind the other; returns when each landed."""
        ends, issue = [], start - 2 * US
        for layer in range(self.layers):
            slow = 4 if direction == "load" and layer == 5 else 1
            end = start + slow * (70 * US + self.random.randrange(9_000))
            nbytes = requests * PAGE_BYTES
            self.tracer.copy(
                batch,
                direction,
                direction,
                layer,
                issue,
                issue + 900,
                start,
                end,
                nbytes,
                requests,
                1,
            )
            ends.append(end)
            issue, start = issue + 1_500, end
        return ends

    def forward(self, start: int, landed: list[int], loads: tuple[int, ...]) -> int:
        """Record a forward that waits for each layer that has not landed; returns its end."""
        lane = self.tracer.take_lane()
        begin, at = start, start + 8 * US
        for layer in range(self.layers):
            if landed[layer] > at:
                woken = landed[layer] + 3 * US
                self.tracer.wait(loads[0], "load", layer, at, woken, lane)
                at = woken
            else:
                self.tracer.ready()
            end = at + 95 * US + self.random.randrange(7_000)
            self.tracer.layer(layer, at, end, lane, loads)
            at = end
        self.tracer.step(begin, at + 5 * US, lane)
        self.tracer.free_lane(lane)
        return at + 5 * US

    def settle(
        self, request: int, direction: str, submitted: int, issued: int, settled: int
    ) -> None:
        """Record a request that is done."""
        nbytes = self.layers * PAGE_BYTES
        tags = self.tracer.tags()
        self.tracer.request(
            request, direction, submitted, issued, settled + 2 * US, nbytes, 1, "done", tags
        )


def wild(tracer: Tracer, requests: int = 300, seed: int = 3) -> None:
    """Record overlapping requests, waits, copies and forwards of every length, with labels that bite."""
    random = Random(seed)
    for request in range(1, requests + 1):
        start = START + random.randrange(10_000_000)
        length = random.choice((0, 1, 2, random.randrange(1, 2_000_000)))
        issued = random.choice((0, start, start + length // 2))
        tags: Tags = {
            'he said "no"': "line\nbreak",
            "name": "späte 本",
            "nan": float("nan"),
            "stream": 3,
        }
        direction = random.choice(("load", "backup"))
        stream = random.choice((direction, direction + "-2"))
        tracer.request(request, direction, start, issued, start + length, 64, 1, "done", tags)
        tracer.plan(request, direction, stream, start, start + length, (request,))
        tracer.copy(
            request, direction, stream, 0, issued, issued + length // 3, start, start + length, 64
        )
        tracer.layer(0, start, start + length, request % 3, (request,))
        tracer.step(start - 5, start + length + 5, request % 3)
        tracer.wait(request, direction, 0, start, start + length, random.choice((ASYNC_LANE, 0, 1)))
        tracer.instant('evict "x"\n', start, {"device": "cuda:0", "share": float("inf")})
        tracer.tick(start, start + length)


def unfinished() -> tuple[OpenRequest, ...]:
    """One request that is moving and one that is queued."""
    return (
        OpenRequest(901, "load", START + 10 * US, START + 20 * US, PAGE_BYTES, 1, {"rid": "req-9"}),
        OpenRequest(902, "backup", START + 15 * US, 0, PAGE_BYTES, 1),
    )
