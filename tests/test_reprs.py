"""What users see when they print a spec, a group or a scheduler: one short line."""

from __future__ import annotations

import re

import attrs
import pytest
import torch

import offload

SPECS = {
    "mha": (
        offload.PoolSpec.mha(num_layers=2, page_size=16, num_kv_heads=8, head_dim=128),
        "<PoolSpec mha: 2 layers, pages of 16, k [8, 128] bfloat16, v [8, 128] bfloat16>",
    ),
    "mla": (
        offload.PoolSpec.mla(num_layers=1, page_size=64, latent_dim=576, dtype=torch.float16),
        "<PoolSpec mla: 1 layer, pages of 64, kv [1, 576] float16>",
    ),
    "rows": (
        offload.PoolSpec.rows(num_layers=3, page_size=64, row_bytes=132),
        "<PoolSpec rows: 3 layers, pages of 64, row [132] uint8>",
    ),
    "state": (
        offload.PoolSpec.state(num_layers=2, components={"conv": ([4, 3], torch.float32)}),
        "<PoolSpec state: 2 layers, pages of 1, conv [4, 3] float32>",
    ),
}


@pytest.mark.parametrize(("spec", "text"), SPECS.values(), ids=SPECS.keys())
def test_a_spec_is_one_line(spec: offload.PoolSpec, text: str) -> None:
    """Kind, layers, page size, and each component's row with its dtype."""
    assert repr(spec) == text


SHOWN = (offload.TransferFailed, offload.Statistics, offload.DirectionStatistics, offload.Limits)


@pytest.mark.parametrize("cls", SHOWN)
def test_help_explains_every_field(cls: type) -> None:
    """`help` shows class docstrings, and of fields the names alone."""
    fields = ["transfer", "layer", "leaves", "unprepared"]
    if attrs.has(cls):
        fields = [field.name for field in attrs.fields(cls)]
    said = re.findall(r"^        (\w+): ", str(cls.__doc__), re.MULTILINE)
    assert said == fields


def test_a_blocking_scheduler_says_what_it_moves_and_how_it_is() -> None:
    """Its group, its driver, and whether it is closed."""
    spec = SPECS["rows"][0]
    device = offload.DevicePool.allocate(spec, num_pages=4)
    host = offload.HostPool.like(device, num_pages=4)
    with offload.start_scheduler(device, host) as scheduler:
        assert repr(scheduler).startswith("<BlockingScheduler <PoolGroup ")
        assert repr(scheduler).endswith(", 0 transfers>")
    assert repr(scheduler).endswith(", closed>")


def test_a_kind_of_group_is_called_by_its_name() -> None:
    """A subclass is not taken for its base."""

    class Mine(offload.PoolGroup):
        pass

    spec = SPECS["rows"][0]
    device = offload.DevicePool.allocate(spec, num_pages=4)
    group = Mine(kv=offload.Pair.backed(device, 4))
    assert repr(group) == "<Mine kv: 3 layers>"
