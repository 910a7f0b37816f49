"""`memcpy_batch` on a CUDA that executes: every cell, late and in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.backend import memcpy_batch
from offload.backend.base import PoolCopy
from offload.backend.memcpy_batch import MemcpyBatchBackend, MemcpyBatchCopy
from offload.core.kinds import Direction, IoBackend, Layout
from offload.core.plan import coalesce
from offload.pool import DevicePool, HostPool
from offload.spec import PoolSpec
from offload.testing_cuda import FakeCuda
from tests import oracle
from tests.backend.elsewhere import Elsewhere, host_pool, mapped_twice
from tests.backend.fake_stream import Cell, cells, check, on_stream
from tests.backend.test_matrix import DEVICE_PAGES, LAYERS, SPECS, page_sets, pools, runs_of

CELLS = cells(IoBackend.MEMCPY_BATCH)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_a_supported_cell_copies_as_the_oracle_does(cell: Cell) -> None:
    """Asked bytes arrive, all others stay, and no copy of a call meets the destination of another."""
    for seed, pairs in enumerate(page_sets(cell[2])):
        check(FakeCuda(seed), MemcpyBatchBackend(), cell, pairs)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_padding_between_pages_is_left_alone(cell: Cell) -> None:
    """With a padded page stride, the bytes between two pages keep what they held."""
    if cell[1] is not Layout.LAYER_FIRST:
        check(FakeCuda(), MemcpyBatchBackend(), cell, page_sets(cell[2])[4], page_align=4096)


def test_a_call_takes_a_bounded_number_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of more runs takes several calls."""
    assert memcpy_batch.MAX_OPS == 4096
    monkeypatch.setattr(memcpy_batch, "MAX_OPS", 7)
    fake = FakeCuda()
    pairs = page_sets(Direction.LOAD)[4]  # 7 pages of 5 tokens, K and V: 70 runs
    check(fake, MemcpyBatchBackend(), ("mha", Layout.PAGE_FIRST, Direction.LOAD), pairs)
    assert [call.arguments[0] for call in fake.named("copy_batch")] == [7] * 20


@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT])
def test_neighbours_are_one_copy(layout: Layout) -> None:
    """Pages that lie together on both sides are handed over as one range."""
    device, host = pools("mla", layout)
    pairs = [(1, 0), (2, 1), (3, 2)]
    prepared = MemcpyBatchBackend().prepare(device, host, Direction.LOAD, runs_of(pairs))
    assert prepared.num_ops(0) == (1 if layout is Layout.LAYER_FIRST else 3)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_destinations_of_a_layer_never_overlap(cell: Cell) -> None:
    """The invariant itself, on addresses, over every page set and layer."""
    name, layout, direction = cell
    device, host = pools(name, layout)
    for pairs in page_sets(direction):
        prepared = MemcpyBatchCopy(PoolCopy.of(device, host, direction, runs_of(pairs)))
        for layer in range(LAYERS):
            _, starts, sizes = prepared.ranges(layer)
            order = np.argsort(starts)
            assert (starts[order][1:] >= (starts + sizes)[order][:-1]).all()


def test_addresses_beyond_two_to_the_31_are_exact() -> None:
    """The last page, and the page that crosses 2**31 bytes, of a lazily resident pool of 2.4 GB."""
    spec = PoolSpec.rows(num_layers=1, page_size=4, row_bytes=4 * 2304)
    host = HostPool.allocate(spec, num_pages=1_048_576 // 4, layout="layer_first", pinned=False)
    device = DevicePool.allocate(spec, num_pages=2)
    oracle.fill(device, 3)
    there = [932_068 // 4, host.num_pages - 1]
    fake = FakeCuda()
    with on_stream(fake):
        backend = MemcpyBatchBackend()
        backup = backend.prepare(
            device, host, Direction.BACKUP, runs_of([(0, there[0]), (1, there[1])])
        )
        backup.copy(0)
        fake.run()
    far = host.flat("row", 0)[0].view(host.num_pages, -1)
    assert torch.equal(far[there], device.flat("row", 0)[0].view(2, -1))
    wrapped = there[1] * 4 * 2304 % 2**31 // (4 * 2304)
    assert not far[[0, wrapped - 1, wrapped, wrapped + 1]].any()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST])
def test_host_memory_is_named_as_the_device_knows_it(layout: Layout, direction: Direction) -> None:
    """Where page-locked chunks have other addresses on the device, those are what the call is given."""
    spec = SPECS["mla"]
    device = DevicePool.allocate(spec, num_pages=DEVICE_PAGES)
    with mapped_twice(chunk=4096, chunks=3) as twice:
        host = host_pool(twice, spec, layout)
        oracle.fill(device, 1)
        oracle.fill(host, 2)
        fake, pages = Elsewhere(twice), np.arange(DEVICE_PAGES)
        there = pages * (host.num_pages // DEVICE_PAGES)
        sides = (there, pages) if direction is Direction.LOAD else (pages, there)
        with on_stream(fake):
            prepared = MemcpyBatchBackend().prepare(device, host, direction, coalesce(*sides))
            for layer in range(LAYERS):
                prepared.copy(layer)
            fake.run()
        assert fake.wrong == 0
        assert len({call.arguments for call in fake.named("device_address")}) == 3
        for layer in range(LAYERS):
            assert torch.equal(device.view("kv", layer), host.view("kv", layer)[there])
    fake.check()
