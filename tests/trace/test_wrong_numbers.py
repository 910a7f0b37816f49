"""Numbers that neighbouring systems got wrong, one test each; what they showed is in the name of the case.

The rest of that list lives where its subject does: unions, chunks and forwards in `test_report.py`, names and
counters that fall in `tests/test_metrics.py`, asynchronous copies in `tests/driver/test_cuda_stamps.py`.
"""

from __future__ import annotations

import time

import anyio
import pytest

import offload
from offload.counters import DirectionCounters
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.trace.test_end_to_end import LAYERS, PAGE_BYTES, pools

BANDWIDTH = 1e8


async def overlapping(sim: SimDriver, tracer: offload.Tracer) -> None:
    """Load in many batches at once, cancel some, fail one: returns when all has settled."""
    async with offload.open_scheduler(*pools(), driver=sim, tracer=tracer) as scheduler:
        loads = []
        for page in range(12):
            loads.append(await scheduler.load(host_pages=[page], device_pages=[page]))
            if page % 3 == 1:
                await sim.advance(2e-5)
        loads[4].cancel()
        loads[11].cancel()
        await sim.run_until_idle()
        numbers = scheduler.statistics().load
    report = tracer.report()
    assert numbers.nbytes == report.load.nbytes
    assert numbers.busy_s * 1e9 == pytest.approx(report.load.busy_ns)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_no_link_is_faster_than_it_is(backend: str) -> None:
    """325 GB/s logged, 0.8 measured: bytes that did not land, and time in which others moved, do not count."""
    tracer, hooks = offload.Tracer(), Hooks()
    sim = SimDriver(bandwidth=BANDWIDTH, latency=0.0, jitter=0.3, hooks=hooks)
    hooks.fail(OSError("planted"), nth=7)
    anyio.run(overlapping, sim, tracer, backend=backend)
    report = tracer.report()
    assert 0 < report.load.nbytes < 12 * PAGE_BYTES
    assert 0.7 * BANDWIDTH < report.load.nbytes / report.load.busy_ns * 1e9 <= BANDWIDTH * 1.0001
    for row in report.layers:
        assert row.load_nbytes / row.load_ns * 1e9 <= BANDWIDTH * 1.0001


def test_a_gauge_adds_up_batches() -> None:
    """A gauge that each batch overwrote: bytes in flight are those of all batches, and go when each is drained."""
    counters = DirectionCounters()
    for nbytes in (100, 50):
        counters.admit()
        counters.issue(nbytes, 0)
    assert counters.inflight_bytes == 150
    counters.drain(100)
    assert (counters.inflight_bytes, counters.queue_depth) == (50, 0)


def test_a_failed_copy_counts_no_bytes() -> None:
    """Bytes of a transfer that failed half way are those of the layers that landed."""
    tracer, hooks = offload.Tracer(), Hooks()
    driver = ThreadsDriver(hooks=hooks)
    hooks.fail(OSError("planted"), layer=2)
    with offload.start_scheduler(*pools(), driver=driver, tracer=tracer) as scheduler:
        load = scheduler.load(host_pages=[0], device_pages=[0])
        with pytest.raises(offload.TransferFailed):
            load.result(timeout=5)
    numbers = scheduler.statistics().load
    assert numbers.nbytes == tracer.report().load.nbytes == 2 * PAGE_BYTES // LAYERS
    assert (numbers.failed, numbers.settled) == (1, 1)


def test_a_record_costs_less_than_a_microsecond() -> None:
    """The guard of the recorder's price, at the fastest of many turns: what a busy machine adds is not its own."""
    tracer = offload.Tracer(capacity=1000)

    def thousand() -> float:
        start = time.perf_counter_ns()
        for layer in range(1000):
            tracer.copy(7, "load", "load", layer, 1, 2, 3, 4, 65_536, 8, 8)
        return (time.perf_counter_ns() - start) / 1000

    assert min(thousand() for _ in range(20)) < 1000
