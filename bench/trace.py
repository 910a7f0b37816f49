"""What does tracing cost: per record, per batch, on the whole life of a batch, in memory, and at export?

A record is one layer copy, one request, or one wait that suspended; the clock stamps are the caller's. A batch
is 8 requests x 32 layers: one plan, 32 layer copies, 8 requests. Its whole life runs on the threads driver with
64 KiB per layer and request, all of it on one core: one scheduler with a tracer and two without take turns, and the
two without say how much of a ratio is noise.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch

import offload
from bench.common import best, finish, options

REQUESTS, LAYERS = 8, 32
SPEC = offload.PoolSpec.mha(
    num_layers=LAYERS, page_size=16, num_kv_heads=8, head_dim=64, dtype=torch.float32
)
"""A page of a layer is 32 KiB of keys and as much of values."""

SIDES, NEIGHBOURS = 3, 9
"""Schedulers side by side, and turns of each in a group: a multiple of the other, so that each begins equally often."""

Pools = tuple[offload.DevicePool, offload.HostPool]


def record_ns(count: int) -> float:
    """Return the nanoseconds of the dearest kind of record."""
    tracer = offload.Tracer()
    start = time.perf_counter_ns()
    ids = tuple(range(REQUESTS))

    def copies() -> None:
        for layer in range(count):
            tracer.copy(7, "load", "load", layer, start, start, start, start, 65_536, 8, 8)

    def requests() -> None:
        for request in range(count):
            tracer.request(request, "load", start, start, start, 65_536, 1, "done", None)

    def waits() -> None:
        for layer in range(count):
            tracer.wait(3, "load", layer, start, start, 0)

    def layers() -> None:
        for layer in range(count):
            tracer.layer(layer, start, start, 0, ids)

    empty = best(lambda: [None for _ in range(count)], 3)
    return max((best(kind, 5) - empty) / count for kind in (copies, requests, waits, layers)) * 1e9


def off_ns(count: int) -> float:
    """Return the nanoseconds of a site whose tracer is None."""
    tracer: offload.Tracer | None = None

    def sites() -> None:
        for _ in range(count):
            if tracer is not None:
                raise AssertionError

    def nothing() -> None:
        for _ in range(count):
            pass

    return max(0.0, best(sites, 5) - best(nothing, 5)) / count * 1e9


def batch_us(repeats: int) -> float:
    """Return the microseconds of everything that a batch of 8 x 32 records."""
    tracer = offload.Tracer()
    ids = tuple(range(REQUESTS))
    at = time.perf_counter_ns()

    def batch() -> None:
        tracer.plan(1, "load", "load", at, at, ids)
        for layer in range(LAYERS):
            tracer.copy(1, "load", "load", layer, at, at, at, at, 1 << 19, 16, 16)
        for request in ids:
            tracer.request(request, "load", at, at, at, 1 << 21, 1, "done", None)

    return best(batch, repeats) * 1e6


def life(scheduler: offload.BlockingScheduler) -> float:
    """Return the seconds of one batch from submit to its last byte."""
    start = time.perf_counter()
    with scheduler.hold():
        loads = [scheduler.load(host_pages=[page], device_pages=[page]) for page in range(REQUESTS)]
    for load in loads:
        load.result(timeout=30)
    return time.perf_counter() - start


@attrs.frozen
class OnOff:
    """Lives with a tracer beside lives without."""

    ratio: float
    """With / without."""
    control: float
    """Without / without: how far from 1 noise alone brings a ratio."""
    life: float
    """Seconds of one without."""


def on_off(groups: int) -> OnOff:
    """Measure lives of one scheduler with a tracer and of two without, each on pools of its own.

    They take turns, so that all meet the same machine, and begin them in turns. Of a group of neighbours the
    fastest of each counts, which is the one that nobody interrupted; of the groups' ratios the median. The three
    change pools until each has had all of them, and the geometric mean of the three ratios counts: so what
    memory costs more where it lies in one place than in another cancels out.

    All run on one core. Left alone, the system puts the threads of one scheduler on other cores than those of
    the next, which costs more than a tracer; and on one core nothing that is recorded hides beside a copy.
    """
    pools = [_pools() for _ in range(SIDES)]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-1:])
    arranged: list[list[list[float]]] = []
    for first in range(SIDES):
        with contextlib.ExitStack() as stack:
            sides = [
                stack.enter_context(
                    offload.start_scheduler(*pools[(first + side) % SIDES], tracer=tracer)
                )
                for side, tracer in enumerate((offload.Tracer(), None, None))
            ]
            for side in sides:
                life(side)
            arranged.append([_group(sides) for _ in range(groups)])
    os.sched_setaffinity(0, cores)

    def mean(ratio: Callable[[float, float, float], float]) -> float:
        medians = [statistics.median(ratio(*each) for each in fastest) for fastest in arranged]
        return statistics.geometric_mean(medians)

    return OnOff(
        mean(lambda on, off, other: 2 * on / (off + other)),
        mean(lambda _, off, other: off / other),
        mean(lambda _, off, other: off),
    )


def _group(sides: Sequence[offload.BlockingScheduler]) -> list[float]:
    """Return the seconds of the fastest life of each of several turns."""
    fastest = [float("inf")] * len(sides)
    for turn in range(NEIGHBOURS):
        for place in range(len(sides)):
            side = (turn + place) % len(sides)
            fastest[side] = min(fastest[side], life(sides[side]))
    return fastest


def _pools() -> Pools:
    device = offload.DevicePool.allocate(SPEC, num_pages=REQUESTS, device="cpu")
    return device, offload.HostPool.like(device, num_pages=REQUESTS, layout="page_first_direct")


def full() -> offload.Tracer:
    """Return a tracer whose ring is full of a plausible mix."""
    tracer = offload.Tracer(capacity=65_536)
    now, batch = time.perf_counter_ns(), 0
    while not tracer.dropped:
        batch += 1
        ids = tuple(range(batch * REQUESTS, (batch + 1) * REQUESTS))
        tracer.plan(batch, "load", "load", now, now + 50_000, ids)
        for layer in range(LAYERS):
            start = now + 60_000 + layer * 80_000
            issue = start - 3_000
            tracer.copy(
                batch,
                "load",
                "load",
                layer,
                issue,
                issue + 900,
                start,
                start + 79_000,
                1 << 19,
                8,
                8,
            )
            tracer.wait(ids[0], "load", layer, start, start + 80_000, 0)
            tracer.layer(layer, start + 80_000, start + 81_000, 0, ids)
        for request in ids:
            tracer.request(request, "load", now, now + 55_000, now + 3_000_000, 1 << 21, 1, "done")
        now += 3_000_000
    return tracer


def memory_mb() -> float:
    """Return the megabytes of a full ring."""
    tracemalloc.start()
    tracer = full()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tracer.dropped
    return size / 1e6


def export_s(suffix: str, repeats: int) -> tuple[float, float]:
    """Return the seconds of an export of a full ring, and the megabytes of the file."""
    tracer = full()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run{suffix}"
        write: Callable[[], object] = lambda: tracer.export(path)
        return best(write, repeats), path.stat().st_size / 1e6


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    torch.set_num_threads(1)
    count = 10_000 if given.quick else 100_000
    lives = on_off(2 if given.quick else 25)
    packed_s, packed_mb = export_s(".json.gz", 1 if given.quick else 3)
    plain_s, plain_mb = export_s(".json", 1 if given.quick else 3)
    figures = {
        "record_ns": record_ns(count),
        "off_ns": off_ns(count),
        "batch_us_8x32": batch_us(200 if given.quick else 2000),
        "on_off_ratio": lives.ratio,
        "off_off_ratio": lives.control,
        "life_ms": lives.life * 1e3,
        "export_65536_s": packed_s,
        "export_65536_plain_s": plain_s,
        "file_gz_mb": packed_mb,
        "file_plain_mb": plain_mb,
        "ring_mb": memory_mb(),
    }
    finish("trace", figures, given)


if __name__ == "__main__":
    main()
