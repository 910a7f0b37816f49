"""Backends that want it get ready when a scheduler opens, on the threads that will call them."""

from __future__ import annotations

import threading

import attrs
import pytest

import offload
from offload.backend.cpu import CpuBackend
from offload.core.kinds import Direction
from offload.driver.base import Driver
from offload.pool import DevicePool, HostPool
from offload.testing import SimDriver, ThreadsDriver
from tests.sched import on_both, pools


@attrs.define(eq=False)
class Cold(CpuBackend):
    """Notes who warms it up, and where."""

    calls: list[tuple[DevicePool, HostPool, Direction, str]] = attrs.field(factory=list)
    error: Exception | None = None

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def warm_up(self, device: DevicePool, host: HostPool, direction: Direction) -> None:
        """Take note."""
        self.calls.append((device, host, direction, threading.current_thread().name))
        if self.error is not None:
            raise self.error


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Cold:
    """Let `cpu` be such a backend."""
    backend = Cold()
    monkeypatch.setattr("offload.route.make_backend", lambda name: backend)
    return backend


@pytest.mark.parametrize("make", [ThreadsDriver, SimDriver])
@on_both
async def test_every_member_is_warm_before_the_body(make: type[Driver], cold: Cold) -> None:
    """Once per member and direction, in order, on the thread of its stream; requests add nothing."""
    spec = offload.PoolSpec.rows(num_layers=2, page_size=1, row_bytes=8)
    pairs = {name: offload.Pair(*pools(spec, 4, 4, "page_first")) for name in ("a", "b")}
    group = offload.PoolGroup(layer_names=None, **pairs)
    driver = make()
    async with offload.open_scheduler(group, io_backend="cpu", driver=driver) as scheduler:
        told = [(device, direction) for device, _, direction, _ in cold.calls]
        devices = [member.device for member in group.members]
        assert told == [(device, way) for way in Direction for device in devices]
        load = await scheduler.load(host_pages=[0], device_pages=[1])
        await driver.quiesce()
        await load
    assert len(cold.calls) == 4
    if make is ThreadsDriver:
        assert len({thread for *_, thread in cold.calls}) == 2
        assert threading.current_thread().name not in {thread for *_, thread in cold.calls}


@on_both
async def test_what_a_backend_raises_is_raised_where_the_scheduler_opens(cold: Cold) -> None:
    """Nothing stays open: the pools can be used again, and the threads have ended."""
    both = pools(offload.PoolSpec.rows(num_layers=1, page_size=1, row_bytes=8), 4, 4, "page_first")
    before = threading.active_count()
    cold.error = RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="no compiler"):
        async with offload.open_scheduler(*both, io_backend="cpu"):
            raise AssertionError("it opened")
    cold.error = None
    async with offload.open_scheduler(*both, io_backend="cpu") as scheduler:
        await (await scheduler.load(host_pages=[0], device_pages=[1]))
    assert threading.active_count() <= before + 1  # a worker thread of the loop may idle


def test_the_blocking_face_raises_it_too(cold: Cold) -> None:
    """`start_scheduler` returns warm, or raises."""
    both = pools(offload.PoolSpec.rows(num_layers=1, page_size=1, row_bytes=8), 4, 4, "page_first")
    with offload.start_scheduler(*both, io_backend="cpu"):
        assert len(cold.calls) == 2
    cold.error = RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="no compiler"):
        offload.start_scheduler(*both, io_backend="cpu")
