"""`explain`: the same answers as a scheduler gives, without pools."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from offload.core.kinds import Direction, IoBackend, Layout, PoolKind
from offload.errors import UnknownNameError
from offload.pool import DevicePool, HostPool
from offload.registry import table
from offload.spec import PoolSpec
from offload.verdict import cells, explain

SPECS = {
    PoolKind.MHA: PoolSpec.mha(num_layers=4, page_size=4, num_kv_heads=2, head_dim=8),
    PoolKind.MLA: PoolSpec.mla(num_layers=4, page_size=4, latent_dim=16, rope_dim=4),
    PoolKind.ROWS: PoolSpec.rows(num_layers=4, page_size=4, row_bytes=132),
    PoolKind.STATE: PoolSpec.state(num_layers=4, components={"s": ((3, 5), torch.float32)}),
}


def test_a_rejected_pair() -> None:
    """A verdict has the reason, the geometry, and what works instead."""
    spec = PoolSpec.mha(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128)
    verdict = explain(spec, layout="page_head", io_backend="direct", direction="load")
    assert not verdict.supported
    assert (verdict.strategy, verdict.chosen) == (None, None)
    assert (
        verdict.reason
        == "one layer of one page is 512 runs of 256 bytes, and 'direct' copies one run"
    )
    assert (verdict.runs, verdict.run_bytes, verdict.whole_page) == (512, 256, True)
    assert "cpu" in verdict.io_backends
    assert verdict.layouts == ("layer_first", "page_first_direct", "page_first_kv_split")
    assert str(verdict).startswith("io_backend 'direct' cannot load layout 'page_head' (mha): ")


def test_a_supported_pair() -> None:
    """A supported pair names its strategy and reads as a sentence."""
    spec = SPECS[PoolKind.MHA]
    verdict = explain(spec, layout=Layout.LAYER_FIRST, io_backend="direct", direction="backup")
    assert (verdict.supported, verdict.strategy, verdict.reason) == (True, "page_runs", None)
    assert str(verdict).startswith(
        "io_backend 'direct' backs up layout 'layer_first' (mha) by 'page_runs': one layer of one page "
        "is 1 run of 128 bytes."
    )


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("layer_first", None),
        ("page_first_direct", None),
        ("page_first", "each of the host page's 64 runs of 2048 bytes by itself"),
        ("page_head", "each of the host page's 512 runs of 256 bytes by itself"),
    ],
)
def test_staged_says_how_short_its_copies_over_the_link_are(layout: str, note: str | None) -> None:
    """Putting rows in order on the device makes nothing longer that is short in the host page."""
    spec = PoolSpec.mha(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128)
    verdict = explain(spec, layout=layout, io_backend="staged")
    assert verdict.note == (None if note is None else f"over the link 'staged' copies {note}")
    assert ("over the link" in str(verdict).lower()) is (note is not None)
    assert explain(spec, layout=layout, io_backend="kernel").note is None


def test_auto_says_what_it_picks() -> None:
    """`auto` is answered by the io backend it stands for."""
    verdict = explain(SPECS[PoolKind.MHA], layout="page_head", device="cpu")
    assert (verdict.io_backend, verdict.chosen) == ("auto", "cpu")
    assert "('auto' picks it)" in str(verdict)


def test_a_device_narrows_the_answer() -> None:
    """With `device`, only what runs there is supported and offered."""
    spec = SPECS[PoolKind.MHA]
    verdict = explain(spec, layout="page_head", io_backend="cpu", device="cuda")
    assert not verdict.supported
    assert "cpu" not in verdict.io_backends
    assert explain(spec, layout="page_head", io_backend="cpu", device="cpu").supported


@pytest.mark.parametrize(
    "words",
    [("layout", "page_hed"), ("io_backend", "kernal"), ("direction", "up"), ("device", "gpu")],
)
def test_unknown_names(words: tuple[str, str]) -> None:
    """An unknown name raises, whichever it is."""
    asked = {"layout": "page_first", "io_backend": "direct", "direction": "load", "device": "cpu"}
    with pytest.raises(UnknownNameError) as caught:
        explain(SPECS[PoolKind.MHA], **{**asked, words[0]: words[1]})
    assert (caught.value.what, caught.value.name) == words


def test_cells_are_the_whole_table() -> None:
    """Every cell has a verdict, in the table's order."""
    keys = [(v.kind, v.layout, v.io_backend, v.direction) for v in cells()]
    assert sorted(keys) == sorted(product(PoolKind, Layout, IoBackend, Direction))


@pytest.mark.parametrize("kind", PoolKind)
def test_pools_get_the_same_verdict(kind: PoolKind) -> None:
    """What `explain` says of a spec is what the table says of allocated pools (K01)."""
    device = DevicePool.allocate(SPECS[kind], num_pages=8)
    for layout, name, way in product(Layout, IoBackend, Direction):
        host = HostPool.like(device, num_pages=8, layout=layout)
        verdict = explain(SPECS[kind], layout=layout, io_backend=name, direction=way, device="cpu")
        judged = table("cpu").judge(kind, way, name, host.geometry, device.geometry)
        assert verdict.supported == isinstance(judged, str)
        if not isinstance(judged, str):
            assert verdict.reason == judged.reason
            assert {layout.value, name.value} <= set(str(verdict).replace("'", " ").split())
            assert verdict.io_backends or verdict.layouts or "Use io_backend" in str(verdict)


def test_what_an_older_cuda_driver_lacks_is_told() -> None:
    """`memcpy_batch` is one call where the CUDA driver has it, and plain copies where it does not."""
    spec = PoolSpec.rows(num_layers=2, page_size=1, row_bytes=64)
    for io_backend, said in (("memcpy_batch", True), ("direct", False)):
        verdict = explain(spec, layout="page_first", io_backend=io_backend)
        assert ("older than 12.8 takes a call for each run" in str(verdict)) is said
