"""Faults that neighbours reported about pairs, widths, dtypes, indices and offsets, as scenarios here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import offload
from offload import DevicePool, HostPool, PoolSpec
from offload.core.kinds import Direction, IoBackend, Layout
from offload.core.page_ids import PagesLike
from offload.testing import Hooks, ThreadsDriver
from offload.verdict import cells
from tests import oracle
from tests.sched import contents, on_both, overwrite

MHA = PoolSpec.mha(num_layers=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float16)
MLA = PoolSpec.mla(num_layers=4, page_size=4, latent_dim=16, dtype=torch.float16)
SPECS = {"mha": MHA, "mla": MLA}
PAGES = 8


def pools(spec: PoolSpec, layout: str) -> tuple[DevicePool, HostPool]:
    device = DevicePool.allocate(spec, num_pages=PAGES)
    host = HostPool.allocate(spec, num_pages=PAGES, layout=layout, pinned=False)
    oracle.fill(device, 1)
    oracle.fill(host, 2)
    return device, host


def frozen(*both: DevicePool | HostPool) -> list[bytes]:
    return [bytes(flat.numpy().tobytes()) for pool in both for flat in oracle.flats(pool)]


@pytest.mark.parametrize("io_backend", IoBackend)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", SPECS)
@on_both
async def test_every_pair_is_copied_or_refused_at_submit(
    name: str, layout: Layout, io_backend: IoBackend
) -> None:
    """sglang#37122, sglang#7704: a layout was replaced in silence, and no pair worked after that."""
    device, host = pools(SPECS[name], layout)
    hooks = Hooks()
    verdict = {
        way: offload.explain(
            SPECS[name], layout=layout, io_backend=io_backend, direction=way, device="cpu"
        )
        for way in Direction
    }
    if name == "mla" and layout is Layout.PAGE_HEAD:
        with pytest.raises(offload.UnsupportedPairError, match="'page_head'"):
            offload.open_scheduler(device, host)
        return
    async with offload.open_scheduler(device, host, driver=ThreadsDriver(hooks=hooks)) as scheduler:
        for way, submit in (
            (Direction.LOAD, scheduler.load),
            (Direction.BACKUP, scheduler.backup),
        ):
            before = frozen(device, host)
            done = len(hooks.ops)
            source, target = (host, device) if way is Direction.LOAD else (device, host)
            if verdict[way].supported:
                wanted = contents(source, [0, 1])
                await (await submit(host_pages=[0, 1], device_pages=[0, 1], io_backend=io_backend))
                assert contents(target, [0, 1]) == wanted
                continue
            with pytest.raises(offload.UnsupportedPairError) as caught:
                await submit(host_pages=[0, 1], device_pages=[0, 1], io_backend=io_backend)
            assert repr(str(layout)) in str(caught.value)
            assert repr(str(io_backend)) in str(caught.value)
            assert caught.value.io_backends
            assert frozen(device, host) == before
            assert len(hooks.ops) == done
    assert (host.geometry.layout, scheduler.statistics().queued_requests) == (layout, 0)


def test_misspelt_names_are_told_the_choices() -> None:
    """sglang#7704: the branch for unknown names crashed with AttributeError."""
    device, _ = pools(MHA, "page_first")
    with pytest.raises(offload.UnknownNameError, match="did you mean 'page_first'"):
        HostPool.like(device, num_pages=2, layout="page_frist")
    host = HostPool.like(device, num_pages=2)
    with pytest.raises(offload.UnknownNameError, match="did you mean 'memcpy_batch'"):
        offload.open_scheduler(device, host, io_backend="memcpy_bacth")


def test_verdicts_do_not_depend_on_assertions() -> None:
    """The printed table is the same under `python -O`."""
    command = [sys.executable, "-O", "-m", "offload", "matrix", "--json"]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    found = {
        (cell["kind"], cell["layout"], cell["io_backend"], cell["direction"]): cell["supported"]
        for cell in json.loads(done.stdout)
    }
    assert found == {
        (each.kind, each.layout, each.io_backend, each.direction): each.supported
        for each in cells()
    }


@on_both
async def test_row_widths_come_from_the_device_pool() -> None:
    """sglang#13431: rows with packed extras, and a host pool of the plain width."""
    wide = PoolSpec.mla(num_layers=4, page_size=4, latent_dim=20, dtype=torch.float16)
    device = DevicePool.allocate(wide, num_pages=PAGES)
    plain = HostPool.allocate(MLA, num_pages=PAGES, pinned=False)
    with pytest.raises(offload.GeometryError, match=r"32 bytes .*40 bytes"):
        offload.open_scheduler(device, plain)
    host = HostPool.like(device, num_pages=PAGES)
    assert (host.page_stride, host.nbytes) == (640, 5_120)
    oracle.fill(device, 3)
    wanted = contents(device, [5, 2])
    async with offload.open_scheduler(device, host) as scheduler:
        await (await scheduler.backup(device_pages=[5, 2], host_pages=[0, 7]))
        await (await scheduler.load(host_pages=[0, 7], device_pages=[1, 4]))
    assert contents(device, [1, 4]) == wanted


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("io_backend", ["cpu", "direct"])
@on_both
async def test_eight_bit_floats_are_moved_as_bits(dtype: torch.dtype, io_backend: str) -> None:
    """sglang#26701: fp8 landed in a uint8 buffer as rounded numbers."""

    def spec(dtype: torch.dtype) -> PoolSpec:
        return PoolSpec.mla(num_layers=1, page_size=16, latent_dim=16, dtype=dtype)

    device = DevicePool.allocate(spec(dtype), num_pages=2)
    host = HostPool.allocate(
        spec(torch.uint8), num_pages=2, layout="page_first_direct", pinned=False
    )
    patterns = torch.arange(256, dtype=torch.uint8)
    rows = device.tensors["kv"][0].view(torch.uint8).view(2, 256)
    rows[0] = patterns
    async with offload.open_scheduler(device, host, io_backend=io_backend) as scheduler:
        await (await scheduler.backup(device_pages=[0], host_pages=[1]))
        await (await scheduler.load(host_pages=[1], device_pages=[1]))
    held = host.tensors["kv"]
    assert isinstance(held, torch.Tensor)
    assert torch.equal(held[1].reshape(-1), patterns)
    assert torch.equal(rows[1], patterns)


def test_dtypes_of_equal_width_are_not_interchangeable() -> None:
    """fp16 and bf16 have the same size and other bits: refused when the pools are bound."""
    device, _ = pools(MHA, "page_first")
    other = PoolSpec.mha(
        num_layers=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16
    )
    host = HostPool.allocate(other, num_pages=PAGES, pinned=False)
    with pytest.raises(offload.GeometryError, match=r"float16.*bfloat16|bfloat16.*float16"):
        offload.open_scheduler(device, host)


SLOTS: dict[str, tuple[PagesLike, int, int]] = {
    "six slots": ([0, 1, 2, 3, 4, 5], 4, 4),
    "from the middle": (range(1, 9), 1, 0),
    "out of order": ([0, 1, 3, 2], 3, 2),
    "torn": ([0, 1, 4, 5], 4, 2),
    "negative": (range(-4, 0), -4, 0),
    "past the end": (range(28, 36), 32, 4),
    "beyond 2**40": (range(2**40 + 16, 2**40 + 20), 2**40 + 16, 0),
}
"""Token slots of pages of 4 in a pool of 32; the first bad value, and where it stands."""


@pytest.mark.parametrize("name", SLOTS)
def test_slots_outside_the_contract_name_the_first_bad_one(name: str) -> None:
    """sglang#8404, sglang#11005: unaligned lengths ran out of bounds, and were narrowed unchecked."""
    slots, value, position = SLOTS[name]
    with pytest.raises(offload.RequestError) as caught:
        offload.pages_from_slots(slots, 4, num_pages=PAGES)
    assert (caught.value.value, caught.value.position) == (value, position)


@pytest.mark.parametrize("bad", [-1, PAGES, 2**31, 2**40, -(2**40), 2**63, 2**70])
@pytest.mark.parametrize("side", ["host_pages", "device_pages"])
@pytest.mark.parametrize("io_backend", ["cpu", "direct"])
@on_both
async def test_pages_outside_the_pool_are_refused_at_submit(
    bad: int, side: str, io_backend: str
) -> None:
    """Nothing wraps, nothing is narrowed, nothing is queued, and the last page keeps its bytes."""
    device, host = pools(MHA, "layer_first")
    before = frozen(device, host)
    async with offload.open_scheduler(device, host, io_backend=io_backend) as scheduler:
        for submit in (scheduler.load, scheduler.backup):
            pages: dict[str, list[int]] = {"host_pages": [0, 1, 2], "device_pages": [0, 1, 2]}
            pages[side] = [0, bad, 2]
            with pytest.raises(offload.RequestError) as caught:
                await submit(host_pages=pages["host_pages"], device_pages=pages["device_pages"])
            assert (caught.value.value, caught.value.position) == (bad, 1)
            assert scheduler.statistics().queued_requests == 0
    assert frozen(device, host) == before


@on_both
async def test_empty_requests_complete_at_once(tmp_path: Path) -> None:
    """b12x#40: empty index lists left phantom entries in a queue until ranks hung."""
    device, host = pools(MHA, "page_first")
    tracer, hooks = offload.Tracer(), Hooks()
    async with offload.open_scheduler(
        device, host, tracer=tracer, driver=ThreadsDriver(hooks=hooks)
    ) as scheduler:
        for _ in range(500):
            for submit in (scheduler.load, scheduler.backup):
                transfer = await submit(host_pages=[], device_pages=np.zeros(0, np.int32))
                assert transfer.done
                assert transfer.nbytes == 0
        numbers = scheduler.statistics()
        assert (numbers.batches, numbers.queued_requests, numbers.inflight_requests) == (0, 0, 0)
        assert (numbers.load.submitted, numbers.load.settled, numbers.load.nbytes) == (500, 500, 0)
    assert hooks.ops == []
    assert device.pages.num_free == PAGES
    events = json.loads(tracer.export(tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event for event in events if event.get("cat") == "copy"] == []


@pytest.mark.parametrize("io_backend", ["cpu", "direct"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@on_both
async def test_offsets_beyond_two_to_the_31(dtype: torch.dtype, io_backend: str) -> None:
    """vllm#47671, vllm#1486: the product of slot and stride was taken in 32 bits."""
    row = 2_304
    spec = PoolSpec.mla(num_layers=1, page_size=4, latent_dim=row, dtype=torch.uint8)
    host = HostPool.allocate(spec, num_pages=1_048_576 // 4, layout="layer_first", pinned=False)
    assert host.nbytes == 2_415_919_104
    device = DevicePool.allocate(spec, num_pages=4)
    oracle.fill(device, 3)
    wanted = contents(device, [0, 1])
    far = torch.tensor([host.num_pages - 1, 932_068 // 4], dtype=dtype)
    here = torch.tensor([0, 1], dtype=dtype)
    async with offload.open_scheduler(device, host, io_backend=io_backend) as scheduler:
        await (await scheduler.backup(device_pages=here, host_pages=far))
        overwrite(device, range(4), 0)
        await (await scheduler.load(host_pages=far, device_pages=here + 2))
    assert contents(device, [2, 3]) == wanted
    assert contents(host, far.tolist()) == wanted
    wrapped = [page * 4 * row % 2**31 // (4 * row) for page in far.tolist()]
    for page in {0, *wrapped, *(page + 1 for page in wrapped)}:
        assert set(b"".join(contents(host, [page]))) == {0}
