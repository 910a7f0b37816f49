"""An io backend of your own: it gets a name, says which pairs it copies, and copies a layer.

What moves the bytes here is one assignment per page; all around it is the scheduler's. In your tests,
`offload.testing.Hooks` holds, delays and breaks the copies of any io backend.
"""

from __future__ import annotations

import torch

import offload
from offload import DevicePool, Direction, HostPool, PoolKind, Rejection
from offload.backend.base import PoolCopy
from offload.core.geometry import Geometry
from offload.core.plan import Runs


class Copies(PoolCopy):
    """The copies of one batch between two pools. Made once, then called layer by layer."""

    def copy(self, layer: int) -> None:
        """Move one layer of every page; `ours` and `theirs` are one component in either pool."""
        for ours, theirs in self.pairs:
            source = self.source.view(ours.name, layer)
            destination = self.destination.view(theirs.name, layer)
            for page, to in zip(*self.pages, strict=True):
                destination[to] = source[page]

    def num_ops(self, layer: int) -> int:
        """Return how many copies that was, for the report."""
        return self.runs.num_pages * len(self.pairs)


class PageByPage:  # `Backend` in offload.backend.base is the protocol
    """Prepares copies; one for each scheduler."""

    name = "page_by_page"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> Copies:
        """Do what does not depend on the layer."""
        return Copies.of(device, host, direction, runs)


def column(kind: PoolKind, direction: Direction, *pools: Geometry) -> str | Rejection:
    """Say how a pair (host, device) is copied, or why not: errors, `explain` and the matrix repeat it."""
    return "pages" if kind is PoolKind.MHA else Rejection("it knows keys and values only")


offload.register_backend(PageByPage.name, PageByPage, column=column)
rows = offload.PoolSpec.rows(num_layers=4, page_size=16, row_bytes=132)
print(offload.explain(rows, layout="page_first", io_backend=PageByPage.name))
spec = offload.PoolSpec.mha(num_layers=4, page_size=16, num_kv_heads=2, head_dim=64)
device = DevicePool.allocate(spec, num_pages=8)
host = HostPool.like(device, num_pages=16, layout="page_first")
host.view("k", 3)[7] = 1.0
with offload.start_scheduler(device, host, io_backend=PageByPage.name) as scheduler:
    scheduler.load(host_pages=[7, 3], device_pages=[1, 2]).result()
    print("equal:", torch.equal(device.view("k", 3)[1], host.view("k", 3)[7]))
