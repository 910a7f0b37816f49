"""A layer of a whole group in one batched call, over the whole scheduler and a CUDA that executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import pytest

import offload
from offload.backend import memcpy_batch, missing
from offload.driver.cuda import CudaDriver
from offload.testing import FakeCuda
from tests.sched import contents, overwrite
from tests.test_groups import HOST, KV, MADE, NUM_LAYERS, fill, pages_of, pool

PATIENCE = 20.0
THERE, HERE, BACK = [3, 4, 0, 9], [7, 2, 3, 0], [1, 4, 5, 10]


@contextmanager
def on_fake_gpu(
    group: offload.PoolGroup,
    io_backend: str,
    fake: FakeCuda,
    patch: pytest.MonkeyPatch,
    *,
    tracer: offload.Tracer | None = None,
    paused: bool = False,
) -> Iterator[offload.BlockingScheduler]:
    """Open a scheduler as on a GPU: pools of host memory pass for device memory and for pinned memory."""
    patch.setattr("offload.route._place", lambda device: "cuda")
    for member in group.members:
        member.host.pinned = True
    driver = CudaDriver(0, calls=fake)
    with (
        nullcontext() if paused else fake.running(),
        fake.using(fake.new_stream()),
        offload.start_scheduler(
            group, io_backend=io_backend, driver=driver, tracer=tracer
        ) as scheduler,
    ):
        yield scheduler
    fake.check()


def windows(group: offload.PoolGroup, device: list[int]) -> dict[str, offload.PagePair]:
    """Return pages of the members that have their own."""
    names = {"swa", "state"} & {member.name for member in group.members if member.rule == "own"}
    return {name: offload.PagePair(host_pages=[5, 0], device_pages=device) for name in names}


def round_trip(scheduler: offload.BlockingScheduler, group: offload.PoolGroup) -> None:
    """Back pages up, wipe the device, load them elsewhere, and compare every byte."""
    first, second = windows(group, [2, 9]), windows(group, [11, 3])
    moved = pages_of(group, THERE, HERE, first)
    returned = pages_of(group, THERE, BACK, second)
    wanted = {m.name: contents(m.device, moved[m.name][1]) for m in group.members}
    scheduler.backup(device_pages=HERE, host_pages=THERE, members=first).result(PATIENCE)
    for member in group.members:
        overwrite(member.device, range(member.device.num_pages), 0)
    scheduler.load(host_pages=THERE, device_pages=BACK, members=second).result(PATIENCE)
    for member in group.members:
        pages = returned[member.name][1]
        assert contents(member.device, pages) == wanted[member.name]
        rest = sorted(set(range(member.device.num_pages)) - set(pages))
        assert set(b"".join(contents(member.device, rest))) == {0}


def batches(fake: FakeCuda) -> list[int]:
    """Return how many ranges each batched call had."""
    return [cast("int", call.arguments[0]) for call in fake.named("copy_batch")]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("name", MADE)
def test_a_layer_of_all_members_is_one_call(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the group, a layer is one batched call each way, and every byte arrives."""
    group, fake = MADE[name](layout), FakeCuda(seed=len(name))
    fill(group)
    with on_fake_gpu(group, "memcpy_batch", fake, monkeypatch) as scheduler:
        round_trip(scheduler, group)
        numbers = scheduler.statistics()
    sizes = batches(fake)
    assert len(sizes) == 2 * (NUM_LAYERS[name] - len(group.holes))
    assert sum(sizes) == numbers.load.transfers + numbers.backup.transfers


def test_a_joined_call_takes_a_bounded_number_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of all members together are cut at the limit, not those of each."""
    monkeypatch.setattr(memcpy_batch, "MAX_OPS", 7)
    group, fake = MADE["v4"]("page_first"), FakeCuda(seed=1)
    fill(group)
    with on_fake_gpu(group, "memcpy_batch", fake, monkeypatch) as scheduler:
        round_trip(scheduler, group)
    sizes = batches(fake)
    assert max(sizes) == 7
    layers = [size for size in sizes if size < 7]
    assert len(layers) <= 2 * group.num_layers, "only the last call of a layer is not full"


def test_members_of_different_backends_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the members whose backend joins go together; others are copied beside them."""
    group, fake = MADE["indexer"]("layer_first"), FakeCuda()
    monkeypatch.setattr(
        "offload.core.strategy.auto_order",
        lambda host, device: (
            offload.IoBackend.DIRECT if host.kind == "rows" else offload.IoBackend.MEMCPY_BATCH,
        ),
    )
    fill(group)
    with on_fake_gpu(group, "auto", fake, monkeypatch) as scheduler:
        round_trip(scheduler, group)
    assert len(fake.named("copy_batch")) == 2 * 3
    assert fake.named("copy")


def test_a_pool_belongs_to_one_member() -> None:
    """Twice in a group, a pool would be written twice in one call, and nothing would order that."""
    device, host = pool(KV), offload.HostPool.like(pool(KV), num_pages=HOST)
    other = offload.HostPool.like(device, num_pages=HOST)
    for second in (offload.Pair(device, other), offload.Pair(pool(KV), host)):
        with pytest.raises(offload.GeometryError, match=r"(?s)'a' and 'b'.*one member"):
            offload.PoolGroup(a=offload.Pair(device, host), b=second)


def test_what_is_not_installed_is_passed_over_by_auto_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without Triton `auto` takes what works, also for short runs, and no refusal offers a kernel."""
    monkeypatch.setattr("offload.route.missing", lambda: {"kernel": "triton", "staged": "triton"})
    group, fake = MADE["packed"]("page_first"), FakeCuda()
    fill(group)
    with on_fake_gpu(group, "auto", fake, monkeypatch) as scheduler:
        round_trip(scheduler, group)
        with pytest.raises(offload.UnsupportedPairError) as caught:
            scheduler.load(host_pages=[0], device_pages=[0], io_backend="kernel")
    assert fake.named("copy_batch")
    assert caught.value.reason == "it needs triton, which is not installed (extra 'kernel')"
    assert caught.value.io_backends == ("memcpy_batch",)


def test_missing_packages_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends that launch kernels need the one package."""
    missing.cache_clear()
    monkeypatch.setattr("offload.backend.find_spec", lambda name: None)
    assert missing() == {"kernel": "triton", "staged": "triton"}
    missing.cache_clear()
    monkeypatch.setattr("offload.backend.find_spec", lambda name: name)
    assert missing() == {}
    missing.cache_clear()
