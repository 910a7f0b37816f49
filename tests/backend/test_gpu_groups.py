"""Groups on a real GPU: batched calls over all pools, launches of all layers. On a CPU the test tests itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import offload
from offload import DevicePool, PoolGroup, PoolSpec, groups

PATIENCE = 60.0
PAGES, HOST = 32, 48
KV = PoolSpec.mha(num_layers=3, page_size=16, num_kv_heads=8, head_dim=64, v_head_dim=32)
STATE = PoolSpec.state(
    num_layers=2, components={"ssm": ((16, 128), torch.float32), "conv": ((3, 64), torch.bfloat16)}
)
V4 = groups.DeepSeekV4(compress_ratios=(0, 4, 128, 4), page_size=256, swa_page_size=128)


def hybrid(device: str, layout: str) -> PoolGroup:
    kv, state = (DevicePool.allocate(each, num_pages=PAGES, device=device) for each in (KV, STATE))
    return groups.hybrid_state(
        kv, state, kv_layers=(1, 2, 4), state_layers=(0, 3),
        num_host_pages=HOST, num_host_slots=HOST, layout=layout,
    )  # fmt: skip


def v4(device: str, layout: str) -> PoolGroup:
    devices = V4.allocate(num_pages=PAGES, num_swa_pages=PAGES, device=device)
    return groups.deepseek_v4(
        V4, devices, num_host_pages=HOST, num_swa_host_pages=HOST, layout=layout
    )


def contents(group: PoolGroup, anchor: list[int], own: list[int]) -> list[torch.Tensor]:
    """Return copies of pages of all members, over all components and layers, on the host."""
    window = {"state", "swa", "c4_state", "c4_indexer_state"}
    return [
        member.device.view(part.name, layer)[own if member.name in window else anchor].cpu()
        for member in group.members
        for part in member.device.geometry.components
        for layer in range(member.device.num_layers)
    ]


def fill(group: PoolGroup) -> None:
    """Fill all device pools with random bytes."""
    for member in group.members:
        for part in member.device.geometry.components:
            for layer in range(member.device.num_layers):
                flat, _ = member.device.flat(part.name, layer)
                flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("make", [hybrid, v4])
@pytest.mark.parametrize(
    ("device", "io_backend"),
    [
        ("cpu", "auto"),
        *(
            pytest.param("cuda", name, marks=pytest.mark.gpu)
            for name in ("memcpy_batch", "kernel", "staged", "auto")
        ),
    ],
)
def test_a_group_makes_the_round_trip(
    make: Callable[[str, str], PoolGroup], layout: str, device: str, io_backend: str
) -> None:
    """Nobody follows the backup by layer; every byte of every member comes back in other pages."""
    group = make(device, layout)
    fill(group)
    name = next(member.name for member in group.members if member.rule == "own")
    mine, back, there = [3, 4, 5, 20, 9], [30, 1, 2, 7, 8], [40, 41, 42, 5, 0]
    before = contents(group, mine, [6, 2])
    with offload.start_scheduler(group, io_backend=io_backend) as scheduler:
        first = {name: offload.PagePair(host_pages=[7, 1], device_pages=[6, 2])}
        scheduler.backup(device_pages=mine, host_pages=there, members=first).result(PATIENCE)
        second = {name: offload.PagePair(host_pages=[7, 1], device_pages=[11, 31])}
        load = scheduler.load(device_pages=back, host_pages=there, members=second)
        for layer in range(group.num_layers):
            load.wait_layer(layer, PATIENCE)
        load.result(PATIENCE)
    after = contents(group, back, [11, 31])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
