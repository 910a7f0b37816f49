"""Pools, limits and a driver, drawn from a seed; and the bytes of a cell."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

import offload
from offload.core.hazards import Pages
from offload.core.kinds import Layout
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.soak.model import Cell

LAYOUTS = (*Layout,)
ROW_LAYOUTS = (Layout.LAYER_FIRST, Layout.PAGE_FIRST, Layout.PAGE_FIRST_DIRECT)
"""Those that have a meaning for rows."""


@attrs.define(eq=False)
class Side:
    """One pool's memory, as numpy arrays of [P, ...] by layer and component."""

    arrays: list[list[NDArray[np.generic]]]

    @classmethod
    def of(cls, pool: offload.DevicePool | offload.HostPool) -> Side:
        """Return views of a pool's memory."""
        names = [component.name for component in pool.spec.components]
        return cls(
            [
                [pool.view(name, layer).numpy() for name in names]
                for layer in range(pool.spec.num_layers)
            ]
        )


@attrs.define(eq=False)
class World:
    """Everything that a program runs against."""

    seed: int
    group: offload.PoolGroup
    limits: offload.Limits
    driver: SimDriver | ThreadsDriver
    hooks: Hooks
    sides: dict[tuple[int, bool], Side]

    @property
    def sim(self) -> SimDriver | None:
        """The simulator, if this is one."""
        return self.driver if isinstance(self.driver, SimDriver) else None

    def pool(self, member: int, *, device: bool) -> offload.DevicePool | offload.HostPool:
        """Return one pool."""
        pair = self.group.members[member]
        return pair.device if device else pair.host

    def read(self, cell: Cell) -> bytes:
        """Return the bytes of a cell."""
        arrays = self.sides[cell.member, cell.device].arrays[cell.layer]
        return b"".join(array[cell.page].tobytes() for array in arrays)

    def write(self, cell: Cell, stamp: int) -> None:
        """Write the bytes of a stamp into a cell."""
        for index, array in enumerate(self.sides[cell.member, cell.device].arrays[cell.layer]):
            page = array[cell.page]
            page[...] = np.frombuffer(pattern(stamp, index, page.nbytes), page.dtype).reshape(
                page.shape
            )

    def expected(self, cell: Cell, stamp: int) -> bytes:
        """Return what a cell holds after `write`."""
        arrays = self.sides[cell.member, cell.device].arrays[cell.layer]
        return b"".join(
            pattern(stamp, index, array[cell.page].nbytes) for index, array in enumerate(arrays)
        )


@cache
def pattern(stamp: int, component: int, nbytes: int) -> bytes:
    """Return the bytes that stand for a stamp."""
    return random.Random(stamp * 8 + component).randbytes(nbytes)


def make_world(seed: int, *, threads: bool) -> World:
    """Draw pools, limits, faults and a driver."""
    draw = random.Random(f"world {seed}")
    group = _group(draw)
    hooks = Hooks()
    for _ in range(draw.choice((0, 1, 2, 4))):
        hooks.fail(
            OSError("planted"),
            stream=draw.choice(("load", "backup")),
            nth=draw.randrange(1, 25),
            torn=draw.random() < 0.5,
        )
    driver: SimDriver | ThreadsDriver
    if threads:
        driver = ThreadsDriver(hooks=hooks)
    else:
        driver = SimDriver(
            seed,
            bandwidth={"load": draw.choice((1e8, 1e9)), "backup": draw.choice((1e8, 1e9))},
            latency=draw.choice((0.0, 1e-6, 10e-6)),
            jitter=draw.choice((0.0, 1.0)),
            ahead=draw.choice((1, 1, 2, 4)),
            hooks=hooks,
            detect_races=True,
        )
    sides = {
        (member.index, device): Side.of(member.device if device else member.host)
        for member in group.members
        for device in (False, True)
    }
    return World(seed, group, _limits(draw, group), driver, hooks, sides)


def _group(draw: random.Random) -> offload.PoolGroup:
    num_layers = draw.randrange(1, 5)
    device_pages, host_pages = draw.randrange(5, 15), draw.randrange(6, 19)
    kv = offload.PoolSpec.mha(
        num_layers=num_layers, page_size=2, num_kv_heads=2, head_dim=4, dtype=torch.float16
    )
    rows = offload.PoolSpec.rows(num_layers=num_layers, page_size=2, row_bytes=12)
    shape = draw.choice(("kv", "kv", "rows", "same", "own"))
    if shape == "kv":
        return offload.PoolGroup(kv=_pair(draw, kv, device_pages, host_pages, LAYOUTS))
    if shape == "rows":
        return offload.PoolGroup(kv=_pair(draw, rows, device_pages, host_pages, ROW_LAYOUTS))
    anchor = _pair(draw, kv, device_pages, host_pages, LAYOUTS)
    if shape == "same":
        index = _pair(draw, rows, device_pages, host_pages, ROW_LAYOUTS, "same")
        return offload.PoolGroup(kv=anchor, index=index)
    layers = sorted(draw.sample(range(num_layers + 1), draw.randrange(1, num_layers + 1)))
    some = offload.PoolSpec.rows(num_layers=len(layers), page_size=2, row_bytes=8)
    window = _pair(draw, some, device_pages, host_pages, ROW_LAYOUTS, "own", layers)
    shifted = _pair(draw, rows, device_pages + 1, host_pages + 1, ROW_LAYOUTS, next_page)
    return offload.PoolGroup(kv=anchor, window=window, shifted=shifted)


def next_page(pages: Pages) -> Pages:
    """A rule: the member's page is one above the anchor's."""
    return pages + 1


def _pair(
    draw: random.Random,
    spec: offload.PoolSpec,
    device_pages: int,
    host_pages: int,
    layouts: tuple[Layout, ...],
    pages: str | Callable[[Pages], Pages] = "same",
    layers: list[int] | None = None,
) -> offload.Pair:
    device = offload.DevicePool.allocate(spec, num_pages=device_pages, device="cpu")
    host = offload.HostPool.like(device, num_pages=host_pages, layout=draw.choice(layouts))
    return offload.Pair(device, host, pages=pages, layers=layers)  # type: ignore[arg-type]


def _limits(draw: random.Random, group: offload.PoolGroup) -> offload.Limits:
    page = group.anchor.device.spec.page_bytes
    kind = draw.choice(("none", "none", "queued", "requests", "bytes", "batch", "all"))
    some = draw.randrange(1, 6) * page
    return offload.Limits(
        max_queued_bytes=some if kind in ("queued", "all") else None,
        max_inflight_bytes=some if kind in ("bytes", "all") else None,
        max_inflight_requests=draw.randrange(1, 4) if kind in ("requests", "all") else None,
        max_batch_ops=draw.randrange(1, 6) if kind in ("batch", "all") else 65_536,
    )
