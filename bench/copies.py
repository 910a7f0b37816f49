"""How near does each io backend come to one plain copy, and what does it cost a matrix product beside it?

Every io backend x layout x bytes of a layer of a page, both ways, through a whole scheduler: GB/s as a fraction of
one plain copy of as many bytes between the same memories, in turns. On a GPU host memory is page-locked; without
one, what runs on a CPU is measured. A pair that is refused has no figure. `slowdown` is the time of matrix products
beside copies, by events on their own stream, divided by their time alone (GPU). `auto_vs_best`: the one that
`auto` picks, over the quickest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, product

import attrs
import torch

import offload
from bench.common import Options, alternate, finish, options
from offload.core.kinds import Layout

TOKENS = 16
PAGE_BYTES = (4 << 10, 64 << 10, 1 << 20)
LAYERS = 4
LAYOUTS = (Layout.LAYER_FIRST, Layout.PAGE_FIRST, Layout.PAGE_FIRST_DIRECT, Layout.PAGE_HEAD)
GPU = torch.cuda.is_available()


@attrs.frozen
class Cell:
    """One measurement."""

    layout: Layout
    page_bytes: int
    total: int
    """Bytes over all layers."""

    @property
    def spec(self) -> offload.PoolSpec:
        """Keys alone, 8 heads, rows of a sixteenth of the page."""
        return offload.PoolSpec.mha(
            num_layers=LAYERS,
            page_size=TOKENS,
            num_kv_heads=8,
            head_dim=self.page_bytes // TOKENS // 8 // 2,
            v_head_dim=0,
        )

    @property
    def pages(self) -> int:
        """How many pages are moved."""
        return self.total // LAYERS // self.page_bytes

    def name(self, io_backend: str, way: str) -> str:
        """Return the figure's name."""
        return f"{io_backend}_{self.layout}_{self.page_bytes >> 10}k_{way}"


def shuffled(count: int, seed: int) -> list[int]:
    """Return so many pages, in shuffled runs of four."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randperm(count // 4, generator=draw) * 4
    return [int(start) + n for start in starts for n in range(4)]


def plain(total: int, way: str) -> Callable[[], object]:
    """Return one copy of as many bytes."""
    there = torch.empty(total, dtype=torch.uint8, pin_memory=GPU)
    here = torch.empty(total, dtype=torch.uint8, device="cuda" if GPU else "cpu")
    source, destination = (there, here) if way == "load" else (here, there)

    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        if GPU:
            torch.cuda.synchronize()

    return copy


def measured(cell: Cell, repeats: int) -> Iterator[tuple[str, float]]:
    """Yield GB/s of each io backend both ways, as fractions of a plain copy too, and what `auto` reaches."""
    device = offload.DevicePool.allocate(
        cell.spec, num_pages=cell.pages, device="cuda" if GPU else "cpu"
    )
    host = offload.HostPool.like(device, num_pages=cell.pages, layout=cell.layout)
    there, here = shuffled(cell.pages, 0), shuffled(cell.pages, 1)
    with offload.start_scheduler(device, host) as scheduler:
        for way, verb in (("load", scheduler.load), ("backup", scheduler.backup)):
            submit = partial(verb, host_pages=there, device_pages=here)
            told = offload.explain(
                cell.spec, layout=cell.layout, direction=way, device=device.device.type
            )
            runs: dict[str, Callable[[], object]] = {
                name: partial(_moved, partial(submit, io_backend=name)) for name in told.io_backends
            }
            took = alternate({**runs, "plain": plain(cell.total, way)}, repeats)
            for name in runs:
                yield f"{cell.name(name, way)}_gbs", cell.total / took[name] / 1e9
                yield f"{cell.name(name, way)}_of_plain", took["plain"] / took[name]
                if GPU:
                    moving = in_parts(partial(verb, io_backend=name, after=()), there, here)
                    yield (
                        f"{cell.name(name, way)}_slowdown",
                        slowdown(Products.make().start, moving),
                    )
            assert told.chosen is not None
            fastest = min(took[name] for name in runs)
            yield cell.name("auto_vs_best", way), fastest / took[told.chosen]


def in_parts(
    verb: Callable[..., offload.Transfer], there: Sequence[int], here: Sequence[int]
) -> list[Callable[[], offload.Transfer]]:
    """Return submits of an equal share of the pages each, no page in two."""
    return [
        partial(verb, host_pages=there[first::PARTS], device_pages=here[first::PARTS])
        for first in range(PARTS)
    ]


def _moved(submit: Callable[[], offload.Transfer]) -> None:
    submit().result()


@attrs.frozen(eq=False)
class Products:
    """Matrix products on a stream of their own, timed there: what else the device does is not in it."""

    stream: torch.cuda.Stream
    factor: torch.Tensor

    @classmethod
    def make(cls) -> Products:
        """Return products whose factor is there already."""
        factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        return cls(torch.cuda.Stream(), factor)  # type: ignore[no-untyped-call]

    def start(self) -> Running:
        """Enqueue 50 products."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            start.record()
            for _ in range(50):
                self.factor @ self.factor
            end.record()
        over: Callable[[], bool] = end.query
        return Running(over, lambda: float(start.elapsed_time(end)))


@attrs.frozen(eq=False)
class Running:
    """Compute that was enqueued."""

    over: Callable[[], bool]
    milliseconds: Callable[[], float]
    """Between its first and its last kernel; asked when it is over."""


IN_FLIGHT = 4
"""Copies kept under way beside compute, each of pages of its own: those that share pages would take turns."""

PARTS = 2 * IN_FLIGHT
"""Submits that are taken in turn."""


def slowdown(
    start: Callable[[], Running], parts: Sequence[Callable[[], offload.Transfer]]
) -> float:
    """Return the time of compute with copies under way all along, divided by its time alone.

    Args:
        start: Enqueues the compute.
        parts: Submits, more than `IN_FLIGHT` of them, no two of the same pages.
    """
    _finish(start)  # compiles, loads and warms what there is
    alone = min(_finish(start) for _ in range(3))
    return min(_beside(start, parts) for _ in range(3)) / alone


def _finish(start: Callable[[], Running]) -> float:
    running = start()
    while not running.over():
        pass
    return running.milliseconds()


def _beside(start: Callable[[], Running], parts: Sequence[Callable[[], offload.Transfer]]) -> float:
    """Return how long compute takes from when the first copy moves, with others right behind it."""
    submits = cycle(parts)
    moving = deque(next(submits)() for _ in range(IN_FLIGHT))
    moving[0].wait_issued()
    running = start()
    while not running.over():
        moving.popleft().result()
        moving.append(next(submits)())
    for each in moving:
        each.result()
    return running.milliseconds()


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    figures: dict[str, float] = {}
    for layout, page_bytes in product(LAYOUTS, PAGE_BYTES):
        figures |= dict(measured(Cell(layout, page_bytes, _total(given)), 3 if given.quick else 9))
    figures["auto_vs_best"] = min(v for name, v in figures.items() if name.startswith("auto_"))
    finish("copies", figures, given)


def _total(given: Options) -> int:
    return (256 << 20 if GPU else 64 << 20) // (4 if given.quick else 1)


if __name__ == "__main__":
    main()
