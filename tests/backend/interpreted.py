"""The Triton kernel's cases. Not collected: `test_kernel.py` runs this file under Triton's interpreter."""

from __future__ import annotations

import os
from typing import cast

import numpy as np
import pytest
import torch

import offload
from offload.backend import make_backend, staged
from offload.backend.base import JoinsLayers, WarmsUp
from offload.backend.kernel import KernelBackend, variant
from offload.backend.staged import StagedBackend
from offload.core.kinds import Direction, IoBackend, Layout
from offload.errors import counted
from offload.pool import DevicePool, HostPool
from offload.spec import PoolSpec
from offload.testing_cuda import FakeCuda
from tests import oracle
from tests.backend.elsewhere import Elsewhere, host_pool, mapped_twice
from tests.backend.fake_stream import Cell, Watching, cells, check, on_stream
from tests.backend.test_adopted import ORDERS, check_adopted
from tests.backend.test_matrix import (
    DEVICE_PAGES,
    LAYERS,
    SPECS,
    page_sets,
    pools,
    runs_of,
    supported,
)

CELLS = cells(IoBackend.KERNEL)
ROW = 33_660  # bytes: a multiple of 4 and not of 8


def test_this_runs_under_the_interpreter() -> None:
    """Compiled kernels could not take CPU tensors."""
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_a_supported_cell_copies_as_the_oracle_does(cell: Cell) -> None:
    """Asked bytes arrive and all others stay; rows, heads, tails and every word width."""
    for seed, pairs in enumerate(page_sets(cell[2])):
        check(FakeCuda(seed), KernelBackend(), cell, pairs)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_layers_in_one_launch_copy_as_the_oracle_does(cell: Cell) -> None:
    """One launch per component moves several layers, in any order of them, and nothing else."""
    none, *_, few, many = page_sets(cell[2])
    for seed, pairs in enumerate((none, few, many)):
        check(FakeCuda(seed), KernelBackend(), cell, pairs, layers_at_once=True)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_padding_between_pages_is_left_alone(cell: Cell) -> None:
    """With a padded page stride, the bytes between two pages keep what they held."""
    if cell[1] is not Layout.LAYER_FIRST:
        for backend in (KernelBackend(), StagedBackend()):
            check(FakeCuda(), backend, cell, page_sets(cell[2])[6], page_align=4096)


@pytest.mark.parametrize("cell", cells(IoBackend.STAGED), ids=lambda cell: "-".join(cell))
def test_a_staged_cell_copies_as_the_oracle_does(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through staging memory for three pages, in several turns, and through plenty of it in one."""
    few, *_, many = page_sets(cell[2])[3:]
    for seed, pairs in enumerate((few, many, [])):
        check(FakeCuda(seed), StagedBackend(), cell, pairs)
        page_bytes = SPECS[cell[0]].layer_bytes
        monkeypatch.setattr(staged, "STAGING_BYTES", 3 * page_bytes + 1)
        check(FakeCuda(seed), StagedBackend(), cell, pairs)


def test_staging_makes_one_copy_of_host_neighbours() -> None:
    """Pages scattered on the device and together in the host pool cross the link in one piece."""
    fake = FakeCuda()
    device, host = pools("mla", Layout.LAYER_FIRST)
    pairs = [(6, 2), (0, 3), (3, 4), (1, 5)]
    with on_stream(fake):
        prepared = StagedBackend().prepare(device, host, Direction.BACKUP, runs_of(pairs))
        prepared.copy(1)
        fake.run()
    assert [call.arguments[0] for call in fake.named("copy_batch")] == [1]
    assert len(fake.named("launch")) == 1


@pytest.mark.parametrize("direction", Direction)
def test_what_staging_turns_have_in_common_is_found_once(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns and batches of a pair share the kernel's rows, until staging memory grows for another pair."""
    monkeypatch.setattr(staged, "STAGING_BYTES", 1)  # one page a turn
    few, backend = runs_of([(0, 1), (2, 3)]), StagedBackend()
    small, large = pools("rows", Layout.LAYER_FIRST), pools("mla", Layout.LAYER_FIRST)
    fake = FakeCuda()
    with on_stream(fake):
        batches = [backend.prepare(*small, direction, few) for _ in range(2)]
        rows = {id(kernel._rows) for batch in batches for kernel in batch.kernels}
        backend.prepare(*large, direction, few)
        after = {id(kernel._rows) for kernel in backend.prepare(*small, direction, few).kernels}
    assert (len(rows), len(after), rows & after) == (1, 1, set())
    assert len(fake.named("device_memory")) == 2


@pytest.mark.parametrize("direction", Direction)
def test_staging_memory_belongs_to_a_stream_that_lasts(direction: Direction) -> None:
    """It outlives the stream that uses it: taken once, and used after what had it before."""
    fake = FakeCuda()
    device, host = pools("mla", Layout.LAYER_FIRST)
    backend = StagedBackend()
    with on_stream(fake):
        mine = fake.current_stream(0)
        backend.warm_up(device, host, direction)
        prepared = backend.prepare(device, host, direction, runs_of([(0, 1), (2, 3)]))
        prepared.copy(1)
        fake.run()
    assert len(fake.named("device_memory")) == 1
    ((recorded, lasting),) = (call.arguments for call in fake.named("record"))
    assert [call.arguments for call in fake.named("wait")] == [(recorded, mine)]
    assert (lasting.cuda_stream, lasting is mine) == (0, False)  # type: ignore[attr-defined]
    fake.check()


@pytest.mark.parametrize("cell", cells(IoBackend.STAGED), ids=lambda cell: "-".join(cell))
def test_staging_copies_what_explain_says_over_the_link(cell: Cell) -> None:
    """Each run of the host page is a copy: as many, and as short, as its verdict notes."""
    name, layout, direction = cell
    fake = FakeCuda()
    device, host = pools(name, layout)
    with on_stream(fake):
        prepared = StagedBackend().prepare(device, host, direction, runs_of([(0, 0)]))
        prepared.copy(0)
        fake.run()
    sizes = [size for call in fake.named("copy_batch") for size in call.arguments[1]]  # type: ignore[attr-defined]
    verdict = offload.explain(device.spec, layout=layout, io_backend="staged", direction=direction)
    runs = [part.runs for part in host.geometry.components]
    assert sorted(sizes) == sorted(run.nbytes for run in runs for _ in range(run.count))
    worst = max(runs, key=lambda run: (run.count, -run.nbytes))
    said = (
        f"each of the host page's {worst.count} runs of {counted(worst.nbytes, 'byte')} by itself"
    )
    assert verdict.note == (None if worst.count == 1 else f"over the link 'staged' copies {said}")


def test_the_word_paths_are_all_taken() -> None:
    """The cells above include launches of 16-, 8- and 4-byte words; an odd address takes single bytes."""
    units: set[int] = set()
    for name, layout, direction in CELLS:
        fake = FakeCuda()
        with on_stream(fake):
            prepared = KernelBackend().prepare(*pools(name, layout), direction, runs_of([(0, 0)]))
            prepared.copy(0)
        units |= {
            launch.args[0].dtype.itemsize * launch.meta["UNIT"]  # type: ignore[attr-defined]
            for launch in prepared._kept
        }
    assert units == {16, 8, 4}


def test_a_pool_at_an_odd_address_is_copied_byte_by_byte() -> None:
    """An engine's tensor may begin anywhere."""
    spec = PoolSpec.rows(num_layers=1, page_size=2, row_bytes=32)
    whole = torch.arange(4 * 32 + 1, dtype=torch.int64).to(torch.uint8)
    device = DevicePool.adopt(spec, {"row": [whole[1:].view(4, 32)]})
    host = HostPool.allocate(spec, num_pages=4, layout="layer_first", pinned=False)
    fake = FakeCuda()
    with on_stream(fake):
        prepared = KernelBackend().prepare(
            device, host, Direction.BACKUP, runs_of([(0, 3), (2, 1)])
        )
        prepared.copy(0)
        fake.run()
    assert prepared._kept[0].meta["UNIT"] == 1
    got = host.flat("row", 0)[0].view(4, 32)
    assert torch.equal(got[[3, 1]], whole[1:].view(4, 32)[[0, 2]])
    assert not got[[0, 2]].any()


def test_page_ids_are_kept_until_the_kernel_ran() -> None:
    """Freeing them early is noticed."""
    fake = FakeCuda()
    both = pools("mla", Layout.PAGE_FIRST)
    with on_stream(fake):
        prepared = KernelBackend().prepare(*both, Direction.LOAD, runs_of([(0, 0)]))
        prepared.copy(0)
        del prepared
        fake.run()
    assert fake.faults == ["launch: an argument was freed before the kernel ran"]


@pytest.mark.parametrize("direction", Direction)
def test_offsets_beyond_two_to_the_31_are_exact(direction: Direction) -> None:
    """Rows behind 2**31 bytes, and one whose word offset passes 2**31, as a 32-bit product would not."""
    spec = PoolSpec.rows(num_layers=1, page_size=4, row_bytes=ROW)
    pages = 2**33 // ROW + 2  # 4-byte words: the last row starts behind 2**31 of them
    host = HostPool.allocate(spec, num_pages=pages, layout="layer_first", pinned=False)
    device = DevicePool.allocate(spec, num_pages=2)
    oracle.fill(device, 3)
    near, far = 2**31 // ROW + 1, pages - 1
    here_rows = device.flat("row", 0)[0].view(2, ROW)
    host_rows = host.flat("row", 0)[0].view(pages, ROW)
    pairs = [(0, near), (1, far)]
    if direction is Direction.LOAD:
        pairs = [(b, a) for a, b in pairs]
        host_rows[[near, far]] = torch.from_numpy(
            np.random.default_rng(0).integers(1, 256, (2, ROW), np.uint8)
        )
    fake = FakeCuda()
    with on_stream(fake):
        prepared = KernelBackend().prepare(device, host, direction, runs_of(pairs))
        prepared.copy(0)
        fake.run()
    assert torch.equal(here_rows, host_rows[[near, far]])
    wrapped = far * ROW % 2**32 // ROW
    assert not host_rows[[0, wrapped, wrapped + 1, near - 1, far - 1]].any()


@pytest.mark.parametrize("io_backend", ["kernel", "staged"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", SPECS)
def test_warm_up_knows_every_variant_and_moves_nothing(
    name: str, direction: Direction, io_backend: str
) -> None:
    """What any later request launches was launched for no pages before; no byte changed by that."""
    for layout in Layout:
        if not supported(name, layout, IoBackend(io_backend), direction):
            continue
        (device, host), wanted = pools(name, layout), pools(name, layout)
        backend, fake = make_backend(io_backend), Watching()
        assert isinstance(backend, WarmsUp)
        with on_stream(fake):
            backend.warm_up(device, host, direction)
            fake.run()
            known = {variant(launch) for launch in fake.launches}
            assert len(known) == len(fake.launches)
            assert oracle.same_bytes(device, wanted[0])
            assert oracle.same_bytes(host, wanted[1])
            fake.launches.clear()
            for pairs in page_sets(direction)[1:]:
                prepared = backend.prepare(device, host, direction, runs_of(pairs))
                for layer in range(LAYERS):
                    prepared.copy(layer)
                if isinstance(backend, JoinsLayers) and direction is Direction.BACKUP:
                    backend.copy_layers(prepared, range(LAYERS))
            assert {variant(launch) for launch in fake.launches} <= known
        fake.check()


def test_layers_that_begin_at_odd_places_are_warm_too() -> None:
    """Layers of other words than their neighbours': every launch of one or several was compiled before."""
    spec = PoolSpec.rows(num_layers=3, page_size=2, row_bytes=64)
    whole = torch.arange(3 * 300, dtype=torch.int64).to(torch.uint8).view(3, 300)
    starts = (0, 8, 4)
    held = [whole[n, at:][: 4 * 64].view(4, 64) for n, at in enumerate(starts)]
    device = DevicePool.adopt(spec, {"row": held})
    host = HostPool.allocate(spec, num_pages=4, layout="page_first", pinned=False)
    fake, backend = Watching(), KernelBackend()
    with on_stream(fake):
        backend.warm_up(device, host, Direction.BACKUP)
        known = {variant(launch) for launch in fake.launches}
        prepared = backend.prepare(device, host, Direction.BACKUP, runs_of([(0, 3), (2, 1)]))
        for layer in range(3):
            prepared.copy(layer)
        for layers in ([0], [0, 1], [1, 2], [2]):
            backend.copy_layers(prepared, layers)
        fake.run()
    assert {variant(launch) for launch in fake.launches} <= known
    assert len(known) > 1
    for layer in range(3):
        assert torch.equal(host.view("row", layer)[[3, 1]], device.view("row", layer)[[0, 2]])
    fake.check()


@pytest.mark.parametrize("chunk", [4096, 3 * 4096])
@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST])
def test_tables_hold_the_addresses_that_the_device_knows(layout: Layout, chunk: int) -> None:
    """A launcher maps what it is given as a tensor, not what stands in a table; chunks apart are refused."""
    spec = SPECS["mla"]
    device = DevicePool.allocate(spec, num_pages=DEVICE_PAGES)
    with mapped_twice(chunk=chunk, chunks=3 * 4096 // chunk) as twice:
        host = host_pool(twice, spec, layout)
        oracle.fill(device, 1)
        fake, backend = Elsewhere(twice), KernelBackend()
        with on_stream(fake):
            if chunk == 4096:
                with pytest.raises(offload.GeometryError, match="no kernel can read as one"):
                    backend.warm_up(device, host, Direction.BACKUP)
                return
            prepared = backend.prepare(device, host, Direction.BACKUP, runs_of([(1, 5), (2, 7)]))
            backend.copy_layers(prepared, range(LAYERS))
            fake.run()
        (launch,) = fake.launches
        table = cast("torch.Tensor", launch.args[1]).numpy()
        assert len(table) == LAYERS
        assert twice.first(table.view(np.uint64)) == 0
        for layer in range(LAYERS):
            assert torch.equal(device.view("kv", layer)[[1, 2]], host.view("kv", layer)[[5, 7]])
    fake.check()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST, Layout.PAGE_HEAD])
@pytest.mark.parametrize("axes", ORDERS)
def test_adopted_orders_are_copied_on_a_gpu(
    axes: str, layout: Layout, direction: Direction
) -> None:
    """Engines' tensors in any order go by every io backend of a GPU that their runs allow."""
    for name in ("kernel", "staged", "memcpy_batch"):
        fake = FakeCuda()
        with on_stream(fake):
            copied = check_adopted(axes, layout, name, direction, beside=2, moved=fake.run)
        assert copied or name == "memcpy_batch" or axes == "p h d t"  # its runs are 2 bytes
        fake.check()
