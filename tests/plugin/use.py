"""Uses what an installed package registered, by the names alone; run as a script."""

from __future__ import annotations

import importlib

import anyio
import torch

import offload
from offload.cli import main

SPEC = offload.PoolSpec.mha(num_layers=2, page_size=3, num_kv_heads=2, head_dim=5)


def filled() -> tuple[offload.DevicePool, dict[str, list[torch.Tensor]]]:
    """Return a device pool of random bytes, and its tensors as int16."""
    device = offload.DevicePool.allocate(SPEC, num_pages=4)
    bits = {
        name: [each.view(torch.int16) for each in held] for name, held in device.tensors.items()
    }
    for layers in bits.values():
        for layer in layers:
            layer.random_()
    return device, bits


async def copy() -> None:
    """Make a round trip on the package's driver, backend and layout."""
    device, bits = filled()
    wanted = {name: [layer.clone() for layer in layers] for name, layers in bits.items()}
    host = offload.HostPool.like(device, num_pages=4, layout="head_first")
    async with offload.open_scheduler(
        device, host, io_backend="backwards", driver="loud"
    ) as scheduler:
        assert "on loud" in repr(scheduler), scheduler
        await (await scheduler.backup(device_pages=[0, 1, 3], host_pages=[2, 0, 1]))
        for layers in bits.values():
            for layer in layers:
                layer.zero_()
        await (await scheduler.load(host_pages=[2, 0, 1], device_pages=[0, 1, 3]))
    assert scheduler.statistics().load.transfers == 3 * 2 * 2, scheduler.statistics()
    for name, layers in bits.items():
        for got, want in zip(layers, wanted[name], strict=True):
            want[2 * 3 : 3 * 3] = 0  # page 2 was not backed up
            assert torch.equal(got, want)


async def copy_group() -> None:
    """Load two members at once: a layer of both is one call."""
    pairs = {name: offload.Pair.backed(filled()[0], 4, "head_first") for name in ("one", "two")}
    group = offload.PoolGroup(layer_names=None, **pairs)
    async with offload.open_scheduler(group, io_backend="backwards") as scheduler:
        await (await scheduler.load(host_pages=[2, 0], device_pages=[0, 1]))
    joined = importlib.import_module("backwards").Backwards.joined
    assert joined == SPEC.num_layers, joined
    for pair in pairs.values():
        assert not pair.device.view("k", 1)[:2].any()


def ask() -> None:
    """Look the package's names up in verdicts and in the printed matrix."""
    rows = offload.PoolSpec.rows(num_layers=1, page_size=1, row_bytes=8)
    verdict = offload.explain(rows, layout="page_first", io_backend="backwards")
    assert verdict.reason == "'backwards' knows no rows", verdict
    refused = offload.explain(SPEC, layout="head_first", io_backend="direct", device="cpu")
    assert "backwards" in refused.io_backends, refused
    assert main(["matrix", "--kind", "mha"]) == 0


if __name__ == "__main__":
    anyio.run(copy)
    anyio.run(copy_group)
    ask()
