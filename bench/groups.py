"""How much Python does one load of a DeepSeek-V4-like group take, on its way to 212 no-op copies?

61 layers, six pools, 212 (layer, pool) copies, 256 pages of the anchor and 64 of the window, in shuffled
runs. The load is submitted, batched, planned, prepared and issued layer by layer by a stream that runs
where it is called; the copies do nothing, so what is left is the Python around them. Bounds measured
beside it: calling 212 no-op copies in a plain loop, and planning once for every copy instead of once per
page rule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

import offload
from bench.common import best, finish, options
from bench.paper import Nothing, PaperDriver, PaperStream
from offload.backend.base import Access, PoolCopy
from offload.core.geometry import Geometry
from offload.core.kinds import Direction, PoolKind
from offload.core.plan import Runs, coalesce
from offload.driver.base import Flight
from offload.groups import DeepSeekV4, deepseek_v4
from offload.pool import DevicePool, HostPool

SIZES = DeepSeekV4(
    compress_ratios=tuple(4 if layer % 2 else 128 for layer in range(61)),
    page_size=256,
    swa_page_size=128,
)
WINDOW_PAGES = 64


class NoCopy(Nothing):
    """Prepared copies that know what they would move, and move nothing."""

    def __init__(self, both: PoolCopy) -> None:
        super().__init__(ops=1)
        self.both = both
        self.pages = both.pages
        """What a kernel would be given; found once per page rule."""

    def nbytes(self, layer: int) -> int:
        """Return the bytes that a copy would move."""
        return self.both.layer_bytes

    def accesses(self, layer: int) -> Sequence[Access]:
        """Return what a copy would read and write."""
        return self.both.accesses(layer)


class NoBackend:
    """Prepares as the built-in backends do."""

    name = "none"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> NoCopy:
        """Return copies that do nothing."""
        return NoCopy(PoolCopy.of(device, host, direction, runs))


def column(kind: PoolKind, direction: Direction, host: Geometry, device: Geometry) -> str:
    """Copy everything."""
    return "none"


@attrs.define(eq=False)
class TimedStream(PaperStream):
    """Runs flights where they are carried, and notes what that takes."""

    prepared: float = 0.0
    """Seconds of `prepare`, of the last flight."""

    issued: float = 0.0
    """Seconds of handing out, calling and marking all layers."""

    landed: float = 0.0
    """Seconds of publishing that they have landed."""

    layers: int = 0

    def carry(self, flight: Flight) -> None:
        """Prepare and issue a flight, then let it land."""
        start = time.perf_counter()
        flight.prepare()
        prepared = time.perf_counter()
        self.layers = self.issue(flight)
        issued = time.perf_counter()
        self.land(self.layers)
        self.prepared, self.issued = prepared - start, issued - prepared
        self.landed = time.perf_counter() - issued


@attrs.define
class Took:
    """Seconds of one load."""

    submit: float
    prepare: float
    issue: float
    land: float
    whole: float

    @property
    def python(self) -> float:
        """What it takes until the last copy is on its way."""
        return self.submit + self.prepare + self.issue


def shuffled(count: int, pool: int, seed: int) -> NDArray[np.int64]:
    """Return `count` of `pool` pages, in shuffled runs of eight."""
    draw = np.random.default_rng(seed)
    return (draw.permutation(pool // 8)[: count // 8, None] * 8 + np.arange(8)).ravel()


async def loads(anchor_pages: int, repeats: int) -> tuple[list[Took], int]:
    """Load that many pages again and again; return what each took, and the copies of one."""
    pool = anchor_pages * 2
    devices = SIZES.allocate(num_pages=pool, num_swa_pages=WINDOW_PAGES * 2)
    group = deepseek_v4(
        SIZES,
        devices,
        num_host_pages=pool,
        num_swa_host_pages=WINDOW_PAGES * 2,
        layout="page_first",
    )
    stream = TimedStream("load")
    driver = PaperDriver(lambda name: stream)
    host, device = shuffled(anchor_pages, pool, 0), shuffled(anchor_pages, pool, 1)
    window = offload.PagePair(
        host_pages=shuffled(WINDOW_PAGES, WINDOW_PAGES * 2, 2),
        device_pages=shuffled(WINDOW_PAGES, WINDOW_PAGES * 2, 3),
    )
    found = []
    async with offload.open_scheduler(group, io_backend="none", driver=driver) as scheduler:
        for _ in range(repeats):
            start = time.perf_counter()
            load = scheduler.load_nowait(
                host_pages=host, device_pages=device, members={"swa": window}
            )
            submitted = time.perf_counter()
            await load
            whole = time.perf_counter() - start
            await scheduler.idle(host_pages=host, device_pages=device)
            found.append(
                Took(submitted - start, stream.prepared, stream.issued, stream.landed, whole)
            )
    copies = sum(len(pool.layers) for pool in SIZES.pools().values())
    assert stream.layers == len(SIZES.compress_ratios)
    return found, copies


def fastest(found: list[Took]) -> Took:
    """Return the load whose Python took least."""
    return min(found, key=lambda took: took.python)


def plain_calls(copies: int) -> None:
    """Call as many no-op copies, and do nothing else."""
    for layer in range(copies):
        _nothing(layer)


def _nothing(layer: int) -> None:
    """Do nothing."""


def planned_per_copy(copies: int, pages: int) -> None:
    """Find the runs once for each copy."""
    host, device = shuffled(pages, pages * 2, 0), shuffled(pages, pages * 2, 1)
    for _ in range(copies):
        coalesce(host, device)


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    repeats = 50 if given.quick else 400
    offload.register_backend("none", NoBackend, column=column)
    figures: dict[str, float] = {}
    for pages, suffix in ((256, ""), (4096, "_4096_pages")):
        found, copies = asyncio.run(loads(pages, repeats))
        took = fastest(found)
        figures[f"v4_group_ms{suffix}"] = took.python * 1e3
        figures[f"v4_submit_ms{suffix}"] = took.submit * 1e3
        figures[f"v4_prepare_ms{suffix}"] = took.prepare * 1e3
        figures[f"v4_issue_ms{suffix}"] = took.issue * 1e3
        figures[f"v4_land_ms{suffix}"] = took.land * 1e3
        figures[f"v4_whole_ms{suffix}"] = took.whole * 1e3
        figures[f"planned_per_copy_ms{suffix}"] = (
            best(lambda copies=copies, pages=pages: planned_per_copy(copies, pages), 3) * 1e3  # type: ignore[misc]
        )
    figures["copies"] = copies
    figures["plain_calls_ms"] = best(lambda: plain_calls(copies), repeats) * 1e3
    finish("groups", figures, given)


if __name__ == "__main__":
    main()
