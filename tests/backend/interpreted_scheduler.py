"""The kernels under the whole scheduler. Not collected: `test_kernel.py` runs it under the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import offload
from offload.backend.kernel import variant
from offload.core.kinds import Direction, Layout
from offload.route import Router
from offload.testing_cuda import FakeCuda
from tests.backend.fake_stream import Watching
from tests.backend.test_joined import PATIENCE, on_fake_gpu, round_trip
from tests.backend.test_matrix import (
    SPECS,
    pools,
)
from tests.backend.test_refused import check_offers, having, refusals
from tests.parity import COPIES, ROWS
from tests.parity import group as parity_group
from tests.sched import contents, overwrite
from tests.test_groups import HOST, MADE, fill


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("name", MADE)
def test_a_whole_group_makes_the_round_trip(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backups in one launch per component of a member, loads layer by layer; warm before the first."""
    group, fake = MADE[name](layout), Watching(seed=len(name))
    fill(group)
    with on_fake_gpu(group, "auto", fake, monkeypatch) as scheduler:
        warm, chosen = len(fake.launches), Router.open(group, "auto").route(Direction.BACKUP, None)
        round_trip(scheduler, group)
    early = {variant(launch) for launch in fake.launches[:warm]}
    assert {variant(launch) for launch in fake.launches[warm:]} <= early
    kernels = [leg.member for leg in chosen.legs if leg.io_backend == "kernel"]
    parts = sum(len(member.device.spec.parts) for member in kernels)
    assert fake.names[warm : warm + parts] == ["copy_layers"] * parts
    assert set(fake.names[warm + parts :]) == {"copy_rows"}


def _waiter(backup: offload.Transfer, scheduler: offload.BlockingScheduler) -> None:
    with pytest.raises(TimeoutError):
        backup.wait_layer(0, timeout=0)


def _fence(backup: offload.Transfer, scheduler: offload.BlockingScheduler) -> None:
    with pytest.raises(TimeoutError):
        backup.fence(0, timeout=0)


def _follower(backup: offload.Transfer, scheduler: offload.BlockingScheduler) -> None:
    scheduler.load(device_pages=[4], host_pages=[3])


def _nobody(backup: offload.Transfer, scheduler: offload.BlockingScheduler) -> None:
    pass


def _issuer(backup: offload.Transfer, scheduler: offload.BlockingScheduler) -> None:
    with pytest.raises(TimeoutError):
        backup.wait_issued(0, timeout=0)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("ask", [_waiter, _fence, _issuer, _follower, _nobody])
def test_layers_go_one_by_one_for_whoever_follows_them(
    ask: Callable[[offload.Transfer, offload.BlockingScheduler], None],
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch of all layers is for backups that nobody follows by layer; bytes and landings are the same."""
    group, fake = MADE["beside"]("page_first"), Watching()
    fill(group)
    wanted = contents(group.members[0].device, [1, 2])
    tracer = offload.Tracer() if traced else None
    with on_fake_gpu(group, "kernel", fake, monkeypatch, tracer=tracer, paused=True) as scheduler:
        del fake.launches[:]
        fake.compute(
            lambda: None
        )  # the backup is ordered after it, and so waits for the first step
        backup = scheduler.backup(device_pages=[1, 2], host_pages=[0, 3])
        ask(backup, scheduler)
        with fake.running():
            backup.result(PATIENCE)
            assert backup.landed_layers == group.num_layers
            scheduler.wait_idle(host_pages=range(HOST), timeout=PATIENCE)
            scheduler.close()
    followed = traced or ask is not _nobody
    assert ("copy_layers" in fake.names) == (not followed)
    assert contents(group.members[0].host, [0, 3]) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_any_layer_of_a_span_is_fenced_by_its_one_event(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute that is fenced on an early layer may overwrite that layer, although all went as one."""
    group, fake = MADE["packed"]("page_first"), Watching(seed)
    fill(group)
    device = group.members[0].device
    wanted = contents(device, [1, 2])
    target = device.view("k", 0)[1]
    with on_fake_gpu(group, "kernel", fake, monkeypatch) as scheduler:
        del fake.launches[:]
        backup = scheduler.backup(device_pages=[1, 2], host_pages=[0, 3])
        backup.wait_issued(timeout=PATIENCE)
        assert fake.names == ["copy_layers"] * 2
        backup.fence(0)
        fake.compute(lambda: target.zero_(), writes=[target])
        backup.result(PATIENCE)
        scheduler.load(device_pages=[4], host_pages=[3]).result(PATIENCE)
    assert not target.any()
    assert contents(group.members[0].host, [0, 3]) == wanted


def test_a_span_is_bounded_and_a_failed_one_has_landed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers go together up to a number of bytes; when a launch fails, its first layer is the one that did."""
    group, fake = MADE["packed"]("page_first"), Watching()
    layer_bytes = 2 * group.members[0].device.spec.layer_bytes
    monkeypatch.setattr("offload.route_copies.SPAN_BYTES", 2 * layer_bytes)
    with on_fake_gpu(group, "kernel", fake, monkeypatch, paused=True) as scheduler:
        del fake.launches[:]
        fake.compute(lambda: None)
        backup = scheduler.backup(device_pages=[1, 2], host_pages=[0, 3])
        fake.fail(1, name="launch", nth=3)  # K and V of layers 0 and 1, then K of 2 and 3
        with fake.running():
            with pytest.raises(offload.TransferFailed) as caught:
                backup.result(PATIENCE)
            backup.wait_layer(1, PATIENCE)
            scheduler.close()
    assert caught.value.layer == 2
    assert fake.names == ["copy_layers"] * 3
    assert [launch.args[-1] for launch in fake.launches] == [2, 2, 2]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", SPECS)
def test_offers_of_refusals_are_accepted_on_a_gpu(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied moves the asked bytes; what geometry forbids is refused, and what is offered copies."""
    if layout not in having(name):
        return
    made, fake = pools(name, layout), FakeCuda()
    group = offload.PoolGroup(kv=offload.Pair(*made))
    if (name, layout) == ("mha_odd", Layout.PAGE_HEAD):  # heads of 7 bytes: no word, and many runs
        monkeypatch.setattr("offload.route._place", lambda device: "cuda")
        with pytest.raises(offload.UnsupportedPairError, match="a run is 7 bytes"):
            offload.open_scheduler(group)
        return
    with on_fake_gpu(group, "auto", fake, monkeypatch) as scheduler:
        found = list(refusals(scheduler, made))
        assert {name for _, name, _ in found} >= {"cpu", "kernel_ascend"}
        for each in found:
            check_offers(scheduler, made, each)


KERNEL_ROWS = [
    pytest.param(row.pool, layout, id=f"{row.pool}-{layout}")
    for row in ROWS
    for layout in row.named
    if (row.io_backend, row.ours) == ("kernel", COPIES)
]


@pytest.mark.parametrize(("pool", "layout"), KERNEL_ROWS)
def test_pairs_of_the_field_make_the_round_trip(
    pool: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the field's shapes, moved by the kernel: those legal there, and those that are only here."""
    made, fake = parity_group(pool, layout), FakeCuda(seed=1)
    fill(made)
    wanted = [contents(member.device, [4, 1, 2]) for member in made.members]
    kept = [contents(member.host, [1, 3]) for member in made.members]
    with on_fake_gpu(made, "kernel", fake, monkeypatch) as scheduler:
        scheduler.backup(device_pages=[4, 1, 2], host_pages=[0, 2, 4]).result(PATIENCE)
        for member in made.members:
            overwrite(member.device, range(5), 0)
        scheduler.load(host_pages=[0, 2, 4], device_pages=[3, 0, 1]).result(PATIENCE)
    for index, member in enumerate(made.members):
        assert contents(member.device, [3, 0, 1]) == wanted[index]
        assert contents(member.host, [1, 3]) == kept[index]
