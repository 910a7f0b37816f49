"""Every pair that the field knows either moves bytes here, or is refused at submit with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from _pytest.mark.structures import ParameterSet

import offload
from offload import DevicePool, HostPool, PoolSpec
from offload.core.kinds import Direction, IoBackend, Layout
from offload.core.strategy import Table
from offload.core.table import Rejection
from tests import oracle
from tests.parity import COPIES, NO_HEADS, NO_PIECES, POOLS, ROWS, C, L, P, Row, T, group
from tests.sched import contents, overwrite, run

PAIRS = [(row, layout) for row in ROWS for layout in row.named]


def cases(*, copied: bool | None = None) -> list[ParameterSet]:
    """Return the pairs as parameters: all, or those that are copied here, or those that are not."""
    return [
        pytest.param(row, layout, id=f"{row.pool}-{layout}-{row.io_backend}")
        for row, layout in PAIRS
        if copied is None or copied == (row.ours == COPIES)
    ]


def verdicts(made: offload.PoolGroup, io_backend: str) -> list[str | Rejection]:
    """Return what the table says of every member in both directions."""
    return [
        Table().judge(
            member.device.spec.kind,
            direction,
            io_backend,
            member.host.geometry,
            member.device.geometry,
        )
        for member in made.members
        for direction in Direction
    ]


def bytes_of(made: offload.PoolGroup) -> list[bytes]:
    return [
        bytes(flat.numpy().tobytes())
        for member in made.members
        for pool in (member.device, member.host)
        for flat in oracle.flats(pool)
    ]


@pytest.mark.parametrize(("row", "layout"), cases())
def test_each_pair_of_the_field_is_copied_or_refused_by_geometry(row: Row, layout: Layout) -> None:
    """The table's verdict is the one that the row states, for both directions and all its pools."""
    found = verdicts(group(row.pool, layout), row.io_backend)
    refused = [each.reason for each in found if isinstance(each, Rejection)]
    if row.ours == COPIES:
        assert refused == []
    else:
        assert refused
        assert all(re.search(row.ours, reason) for reason in refused)


@pytest.mark.parametrize(("row", "layout"), cases(copied=True))
def test_what_is_copied_comes_back_byte_equal(row: Row, layout: Layout) -> None:
    """Tensors of the field's shapes make the round trip; pairs of a GPU with the host's own copies."""

    async def body() -> None:
        made = group(row.pool, layout)
        for seed, member in enumerate(made.members):
            oracle.fill(member.device, seed)
            oracle.fill(member.host, 50 + seed)
        wanted = [contents(member.device, [4, 1, 2]) for member in made.members]
        kept = [contents(member.host, [1, 3]) for member in made.members]
        io_backend = "direct" if row.io_backend == "direct" else "cpu"
        async with offload.open_scheduler(made, io_backend=io_backend) as scheduler:
            await (await scheduler.backup(device_pages=[4, 1, 2], host_pages=[0, 2, 4]))
            for member in made.members:
                overwrite(member.device, range(P), 0)
            await (await scheduler.load(host_pages=[0, 2, 4], device_pages=[3, 0, 1]))
        for index, member in enumerate(made.members):
            assert contents(member.device, [3, 0, 1]) == wanted[index]
            assert set(b"".join(contents(member.device, [2, 4]))) == {0}
            assert contents(member.host, [1, 3]) == kept[index]

    run(body)


@pytest.mark.parametrize(("row", "layout"), cases(copied=False))
def test_what_is_refused_raises_in_submit_and_moves_nothing(row: Row, layout: Layout) -> None:
    """The error names the pair, offers what works, and leaves pools and counters as they were."""

    async def body() -> None:
        made = group(row.pool, layout)
        before = bytes_of(made)
        if row.ours in (NO_HEADS, NO_PIECES):  # the layout has no meaning, so nothing copies it
            with pytest.raises(offload.UnsupportedPairError, match=row.io_backend):
                offload.open_scheduler(made, io_backend=row.io_backend)
            return
        async with offload.open_scheduler(made) as scheduler:
            for verb in (scheduler.load_nowait, scheduler.backup_nowait):
                with pytest.raises(offload.UnsupportedPairError) as caught:
                    verb(host_pages=[0], device_pages=[1], io_backend=row.io_backend)
                assert (caught.value.layout, caught.value.io_backend) == (layout, row.io_backend)
                assert bytes_of(made) == before
                assert caught.value.io_backends
                for other in caught.value.io_backends:
                    await verb(host_pages=[0], device_pages=[1], io_backend=other)
                before = bytes_of(made)
            numbers = scheduler.statistics()
            offered = len(caught.value.io_backends)
            assert (numbers.load.submitted, numbers.backup.submitted) == (offered, offered)

    run(body)


@pytest.mark.parametrize(
    ("pool", "layout"),
    [
        (pool, layout)
        for pool, parts in POOLS.items()
        for layout in next(iter(parts.values())).shapes
    ],
)
def test_their_tensors_lie_as_ours_do(pool: str, layout: Layout) -> None:
    """A host pool of a layout has each byte where the field's tensor of that layout has it."""
    for part in POOLS[pool].values():
        theirs = part.pair(layout).host
        ours = HostPool.allocate(part.spec, num_pages=P, layout=layout, pinned=False)
        assert theirs.geometry.components == ours.geometry.components
        assert theirs.num_pages == P


@pytest.mark.parametrize("name", ["kernle", "syscall", "kdma", "Direct", ""])
@pytest.mark.parametrize("pool", ["mha", "v4_paged"])
def test_unknown_io_backends_are_refused_wherever_they_are_given(pool: str, name: str) -> None:
    """Theirs: a message about the pair, or none. Ours: the name, and the choices."""

    async def body() -> None:
        made = group(pool, Layout.PAGE_FIRST)
        with pytest.raises(offload.UnknownNameError) as caught:
            offload.open_scheduler(made, io_backend=name)
        assert set(caught.value.choices) == {"auto", *IoBackend}
        async with offload.open_scheduler(made) as scheduler:
            for verb in (scheduler.load, scheduler.backup):
                with pytest.raises(offload.UnknownNameError):
                    await verb(host_pages=[0], device_pages=[0], io_backend=name)

    run(body)


def test_the_layout_without_a_name_here() -> None:
    """`page_unified` is no layout; its mla tensor is dense in another's order and is adopted as that."""
    mla = POOLS["mla"]["kv"].spec
    with pytest.raises(offload.UnknownNameError, match="layout 'page_unified'"):
        HostPool.allocate(mla, num_pages=P, layout="page_unified")
    unified = torch.zeros(P, L, T, C, dtype=torch.bfloat16)
    host = HostPool.adopt(mla, {"kv": unified}, layout="page_first_direct")
    assert host.num_pages == P


@pytest.mark.parametrize(
    ("slots", "position"),
    [([2, 3, 4, 5], 0), ([0, 1, 2, 3, 4], 4), ([4, 5, 7, 6], 2), ([0, 1, 4, 5], 2)],
    ids=["starts inside", "count", "order", "torn"],
)
def test_tokens_that_are_no_whole_pages_are_refused(slots: list[int], position: int) -> None:
    """Theirs: a TypeError, or the wrong row in silence. Ours: the first bad slot and its position."""
    with pytest.raises(offload.RequestError) as caught:
        offload.pages_from_slots(slots, T)
    assert caught.value.position == position


def test_an_anchor_without_bytes_is_an_allocator() -> None:
    """Their logical pool only hands out ids, and accepts any pair; here it has no pair to accept."""
    pages = offload.PageAllocator(8)
    with pytest.raises(offload.RequestError):
        pages.free([0])
    assert pages.alloc(8).tolist() == list(range(8))


def _fused() -> offload.PoolGroup:
    """Their fused mode: the draft's bytes are part of the target's page."""
    fused = PoolSpec.rows(num_layers=1, page_size=T, row_bytes=640 + 64)
    return offload.PoolGroup(page=offload.Pair.backed(DevicePool.allocate(fused, num_pages=P), P))


def _spec(num_layers: int) -> PoolSpec:
    return PoolSpec.mha(num_layers=num_layers, page_size=T, num_kv_heads=2, head_dim=8)


def _models(draft_layers: int) -> tuple[DevicePool, DevicePool]:
    return (
        DevicePool.allocate(_spec(L), num_pages=P),
        DevicePool.allocate(_spec(draft_layers), num_pages=P),
    )


def _window_draft() -> offload.PoolGroup:
    """A draft of the sliding window: it follows the window's last pages."""
    target, draft = _models(1)
    window = offload.Pair.backed(DevicePool.allocate(_spec(1), num_pages=P), P, layers=[2])
    tail = offload.Pair.backed(draft, P, pages=offload.rules.trailing(2), follows="swa", layers=[3])
    return offload.PoolGroup(kv=offload.Pair.backed(target, P), swa=window, draft_swa=tail)


DRAFTS: dict[str, Callable[[], offload.PoolGroup]] = {
    "packed, one layer": lambda: offload.groups.packed_draft(*_models(1), num_host_pages=P),
    "packed, three layers: refused there": lambda: offload.groups.packed_draft(
        *_models(3), num_host_pages=P
    ),
    "a pool of its own": lambda: offload.groups.with_draft(*_models(2), num_host_pages=P),
    "fused into the page": _fused,
    "trailing pages of the window": _window_draft,
}


@pytest.mark.parametrize("mode", DRAFTS)
def test_drafts_travel_with_their_targets(mode: str) -> None:
    """Every way in which the field keeps a draft model's cache makes the round trip."""

    async def body() -> None:
        made = DRAFTS[mode]()
        parts = made.parts(Direction.LOAD, [0, 2, 4], [4, 1, 2])
        for seed, member in enumerate(made.members):
            oracle.fill(member.device, seed)
        moved = {made.members[member].name: pages.tolist() for member, _, pages in parts}
        wanted = [contents(member.device, moved[member.name]) for member in made.members]
        async with offload.open_scheduler(made) as scheduler:
            await (await scheduler.backup(device_pages=[4, 1, 2], host_pages=[0, 2, 4]))
            for member in made.members:
                overwrite(member.device, range(P), 0)
            await (await scheduler.load(host_pages=[0, 2, 4], device_pages=[4, 1, 2]))
        assert [contents(m.device, moved[m.name]) for m in made.members] == wanted

    run(body)
