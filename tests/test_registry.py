"""What third parties register shows in the table, its errors, `explain` and host pools."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from offload import registry
from offload.core.axes import Axes
from offload.core.geometry import Geometry
from offload.core.kinds import Direction, IoBackend, Layout, PoolKind
from offload.core.table import Rejection
from offload.errors import RequestError, UnknownNameError, UnsupportedPairError
from offload.pool import HostPool
from offload.spec import PoolSpec
from offload.verdict import cells, explain

SPEC = PoolSpec.mha(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a registry of its own, without the machine's entry points."""
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry(read=True))


def column(
    kind: PoolKind, direction: Direction, host: Geometry, device: Geometry
) -> str | Rejection:
    """Copy loads alone."""
    if direction is Direction.LOAD:
        return "mine"
    return Rejection(f"it only loads ({kind}, {len(host.names)} of {len(device.names)})")


def test_a_backend_joins_the_table() -> None:
    """A registered io backend is known, resolved, and offered where others are refused."""
    registry.register_backend("rdma", object, column=column)
    assert registry.io_backend("rdma") == "rdma"
    verdict = explain(SPEC, layout="page_first", io_backend="rdma", direction="load")
    assert (verdict.supported, verdict.strategy) == (True, "mine")
    refused = explain(SPEC, layout="page_first", io_backend="rdma", direction="backup")
    assert refused.reason == "it only loads (mha, 2 of 2)"
    assert "'rdma'" in str(explain(SPEC, layout="page_head", io_backend="direct"))


def test_a_missing_driver_can_be_filled() -> None:
    """The column that only waits for a driver works once someone registers it."""
    host = HostPool.allocate(SPEC, num_pages=1, layout="layer_first").geometry
    with pytest.raises(UnsupportedPairError, match="needs an Ascend driver"):
        registry.table().resolve(PoolKind.MHA, Direction.LOAD, "kernel_ascend", host, host)
    registry.register_backend("kernel_ascend", object, column=column)
    verdict = explain(SPEC, layout="layer_first", io_backend="kernel_ascend")
    assert verdict.strategy == "mine"
    assert registry.table().names == tuple(IoBackend)


def test_a_layout_gets_a_name() -> None:
    """A registered layout is accepted by host pools and by `explain`."""
    registry.register_layout("head_first", "h p l t d")
    host = HostPool.allocate(SPEC, num_pages=2, layout="head_first")
    assert host.geometry.axes == Axes("h p l t d")
    assert explain(SPEC, layout="head_first", io_backend="cpu").supported
    with pytest.raises(UnknownNameError, match="did you mean 'head_first'"):
        registry.layout("head_frist")


def test_a_registered_layout_is_called_by_its_name() -> None:
    """Errors, offers and the printed matrix say the name; kinds whose axes it lacks are left out."""
    registry.register_layout("head_first", "h p l t d")
    registry.register_layout("headless", "p l td")
    host = HostPool.allocate(SPEC, num_pages=2, layout="head_first", page_align=None)
    assert host.geometry.label == "head_first"
    verdict = explain(SPEC, layout="head_first", io_backend="direct")
    assert verdict.text.startswith("io_backend 'direct' cannot load layout 'head_first' (mha)")
    assert "head_first" in explain(SPEC, layout="page_first", io_backend="cpu").layouts
    found = {(each.kind, each.layout) for each in cells()}
    assert {("mha", "head_first"), ("rows", "headless")} <= found
    assert ("mha", "headless") not in found


def test_a_driver_gets_a_name() -> None:
    """A registered driver is found by its name."""
    registry.register_driver("ascend", object)
    assert registry.drivers() == {"ascend": object}


def test_taken_names_are_refused() -> None:
    """A built-in or registered name cannot be registered again."""
    registry.register_backend("rdma", object, column=column)
    for name in ("rdma", "direct", "auto"):
        with pytest.raises(RequestError, match=f"io_backend '{name}' is taken"):
            registry.register_backend(name, object, column=column)
    with pytest.raises(RequestError, match="driver 'cuda' is taken"):
        registry.register_driver("cuda", object)
    with pytest.raises(RequestError, match="layout 'page_head' is taken"):
        registry.register_layout(Layout.PAGE_HEAD, "p h t l d")


def test_entry_points_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package registers by an entry point, which is called at the first look-up."""
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry())
    point = EntryPoint("x", f"{__name__}:plug", "offload.backends")
    monkeypatch.setattr(
        registry, "entry_points", lambda *, group: [point] if group == point.group else []
    )
    assert list(registry.backends()) == ["plugged"]
    assert list(registry.backends()) == ["plugged"]


def test_an_entry_point_that_raises_is_named_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken package is never skipped in silence, and those before it are registered once."""
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry())
    points = {
        "offload.backends": EntryPoint("x", f"{__name__}:plug", "offload.backends"),
        "offload.layouts": EntryPoint("torn", f"{__name__}:tear", "offload.layouts"),
    }
    monkeypatch.setattr(
        registry, "entry_points", lambda *, group: [points[group]] if group in points else []
    )
    for _ in range(2):
        with pytest.raises(RequestError, match=r"'torn' of 'offload.layouts' .*GeometryError"):
            registry.layouts()


def tear() -> None:
    """Register what is no layout."""
    registry.register_layout("torn", "x y z")


def plug() -> None:
    """Register, as a package would."""
    registry.register_backend("plugged", object, column=column)
