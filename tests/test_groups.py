"""Groups of the field, page rules, and allocation over all members at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import attrs
import numpy as np
import pytest
import torch

import offload
from offload import DevicePool, Pair, PoolGroup, PoolSpec, groups, rules
from offload.core import plan
from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike
from offload.core.request import Pages
from tests import oracle
from tests.sched import contents, on_both, overwrite

T = 4  # tokens per page
DEVICE, HOST = 12, 20

KV = PoolSpec.mha(num_layers=3, page_size=T, num_kv_heads=2, head_dim=3, dtype=torch.float16)
LATENT = PoolSpec.mla(num_layers=3, page_size=T, latent_dim=10, rope_dim=2, dtype=torch.float16)
INDEX = PoolSpec.rows(num_layers=2, page_size=T, row_bytes=T * 11)
WINDOW = PoolSpec.mha(num_layers=2, page_size=2, num_kv_heads=1, head_dim=5, dtype=torch.float16)
STATE = PoolSpec.state(
    num_layers=2, components={"ssm": ((2, 3), torch.float32), "conv": ((5,), torch.float16)}
)
DRAFT = PoolSpec.mha(num_layers=1, page_size=T, num_kv_heads=2, head_dim=3, dtype=torch.float16)
V4 = groups.DeepSeekV4(
    compress_ratios=(0, 4, 128, 4, 128),
    page_size=128,
    swa_page_size=2,
    entry_bytes=7,
    page_multiple=16,
    indexer_bytes=3,
    indexer_scale_bytes=1,
    ring_size=3,
    state_bytes=5,
    indexer_state_bytes=2,
)


def pool(spec: PoolSpec, num_pages: int = DEVICE) -> DevicePool:
    return DevicePool.allocate(spec, num_pages=num_pages)


def indexer(layout: str) -> PoolGroup:
    return groups.with_indexer(
        pool(LATENT), pool(INDEX), num_host_pages=HOST, layout=layout, indexer_layers=(0, 2)
    )


def window(layout: str) -> PoolGroup:
    return groups.sliding_window(
        pool(KV), pool(WINDOW), full_layers=(0, 2, 4), swa_layers=(1, 3),
        num_host_pages=HOST, num_swa_host_pages=HOST, layout=layout,
    )  # fmt: skip


def hybrid(layout: str) -> PoolGroup:
    return groups.hybrid_state(
        pool(KV), pool(STATE), kv_layers=(1, 2, 4), state_layers=(0, 3),
        num_host_pages=HOST, num_host_slots=HOST, layout=layout,
    )  # fmt: skip


def beside(layout: str) -> PoolGroup:
    return groups.with_draft(pool(KV), pool(DRAFT), num_host_pages=HOST, layout=layout)


def packed(layout: str) -> PoolGroup:
    return groups.packed_draft(pool(KV), pool(DRAFT), num_host_pages=HOST, layout=layout)


def v4(layout: str) -> PoolGroup:
    devices = V4.allocate(num_pages=DEVICE, num_swa_pages=DEVICE)
    return groups.deepseek_v4(
        V4, devices, num_host_pages=HOST, num_swa_host_pages=HOST, layout=layout
    )


def derived(layout: str) -> PoolGroup:
    """A group with every rule: twice the pages, a window of them, and half of those again."""
    return PoolGroup(
        kv=Pair.backed(pool(KV), HOST, layout),
        fine=Pair.backed(pool(WINDOW, DEVICE * 2), HOST * 2, layout, pages=rules.ratio(2)),
        last=Pair.backed(pool(INDEX), HOST, layout, pages=rules.trailing(2), layers=(1, 5)),
        again=Pair.backed(
            pool(DRAFT), HOST, layout, pages=rules.ratio(1, per=2), follows="fine", layers=(4,)
        ),
    )


MADE: Mapping[str, Callable[[str], PoolGroup]] = {
    made.__name__: made for made in (indexer, window, hybrid, beside, packed, v4, derived)
}
NUM_LAYERS = {
    "indexer": 3, "window": 5, "hybrid": 5, "beside": 4, "packed": 4, "v4": 5, "derived": 6
}  # fmt: skip


def fill(group: PoolGroup) -> None:
    for seed, member in enumerate(group.members):
        oracle.fill(member.device, seed)
        oracle.fill(member.host, 100 + seed)


def pages_of(
    group: PoolGroup, host: PagesLike, device: PagesLike, own: dict[str, offload.PagePair]
) -> dict[str, tuple[list[int], list[int]]]:
    """Return by member the host and device pages that a request moves."""
    parts = group.parts(Direction.LOAD, host, device, own)
    return {
        group.members[member].name: (hosts.tolist(), devices.tolist())
        for member, hosts, devices in parts
    }


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("name", MADE)
@on_both
async def test_every_group_makes_the_round_trip(name: str, layout: str) -> None:
    """All members of all groups come back byte-equal, in other device pages, and nothing else changes."""
    group = MADE[name](layout)
    assert group.num_layers == NUM_LAYERS[name]
    fill(group)
    there, here, back = [3, 4, 0, 9], [7, 2, 3, 0], [1, 4, 5, 10]
    windows: list[str] = [
        name for name in ("swa", "state") if name in {m.name for m in group.members}
    ]
    first = {name: offload.PagePair(host_pages=[5, 0], device_pages=[2, 9]) for name in windows}
    second = {name: offload.PagePair(host_pages=[5, 0], device_pages=[11, 3]) for name in windows}
    moved = pages_of(group, there, here, first)
    returned = pages_of(group, there, back, second)
    wanted = {m.name: contents(m.device, moved[m.name][1]) for m in group.members}
    async with offload.open_scheduler(group) as scheduler:
        await (await scheduler.backup(device_pages=here, host_pages=there, members=first))
        for member in group.members:
            overwrite(member.device, range(member.device.num_pages), 0)
        await (await scheduler.load(host_pages=there, device_pages=back, members=second))
    for member in group.members:
        name, device = member.name, member.device
        assert contents(device, returned[name][1]) == wanted[name]
        untouched = sorted(set(range(device.num_pages)) - set(returned[name][1]))
        assert set(b"".join(contents(device, untouched))) == {0}


@on_both
async def test_a_layer_lands_when_all_parts_have_it() -> None:
    """A layer waits for every member that has it; one that no member has is landed from the start."""
    group = PoolGroup(
        kv=Pair.backed(pool(KV), HOST, layers=(0, 1, 3)),
        index=Pair.backed(pool(INDEX), HOST, layers=(3, 1)),
    )
    fill(group)
    assert group.holes == {2}
    sim = offload.testing.SimDriver(seed=0, detect_races=True)
    kv, index = group.members
    async with offload.open_scheduler(group, driver=sim) as scheduler:
        load = await scheduler.load(host_pages=[1], device_pages=[2])
        await load.layer(2)
        load.wait_layer(2, timeout=0)
        assert not kv.device.view("k", 0)[2].equal(kv.host.view("k", 0)[1])
        for layer, pool_layer in ((1, 1), (3, 0)):
            await sim.advance_to_layer(layer + 1)
            await load.layer(layer)
            assert contents(index.device, [2], [pool_layer]) == contents(
                index.host, [1], [pool_layer]
            )
        assert contents(kv.device, [2]) == contents(kv.host, [1])
        await sim.run_until_idle()
        await load
        cancelled = await scheduler.load(host_pages=[1], device_pages=[2])
        cancelled.cancel()
        await cancelled.layer(2)
        with pytest.raises(offload.TransferCancelled):
            await cancelled.layer(1)


def test_the_v4_group_has_the_sizes_of_the_field() -> None:
    """Rows of a 61-layer model are as engines allocate them: 212 copies of a layer of a pool."""
    sizes = groups.DeepSeekV4(
        compress_ratios=[128, 4] * 30 + [128], page_size=256, swa_page_size=128
    )
    found = sizes.pools()
    assert {name: (len(p.layers), p.spec.layer_bytes) for name, p in found.items()} == {
        "c4": (30, 37_440),
        "c4_indexer": (30, 64 * 132),
        "c128": (31, 1_728),
        "swa": (61, 74_880),
        "c4_state": (30, 65_536),
        "c4_indexer_state": (30, 16_384),
    }
    assert sum(len(p.layers) for p in found.values()) == 212


def test_fp4_indexer_rows_and_their_scales_are_two_pools() -> None:
    """Scales kept apart get a pool of their own; ratios that a model lacks get none."""
    fp4 = groups.DeepSeekV4(
        compress_ratios=[4, 0],
        page_size=8,
        swa_page_size=8,
        indexer_bytes=64,
        indexer_scale_bytes=4,
    )
    assert {name: p.spec.layer_bytes for name, p in fp4.pools().items() if "indexer" in name} == {
        "c4_indexer": 128, "c4_indexer_scale": 8, "c4_indexer_state": 16_384
    }  # fmt: skip
    assert "c128" not in fp4.pools()
    alone = groups.DeepSeekV4(compress_ratios=[0], page_size=8, swa_page_size=8)
    assert list(alone.pools()) == ["swa"]


def test_v4_sizes_and_pools_that_do_not_fit_are_refused() -> None:
    """A page that a ratio does not divide, a missing, a foreign and an unknown pool."""
    with pytest.raises(offload.GeometryError, match="a multiple of 128"):
        groups.DeepSeekV4(compress_ratios=[128], page_size=64, swa_page_size=8).pools()
    devices = V4.allocate(num_pages=2, num_swa_pages=2)
    made = partial(groups.deepseek_v4, V4, num_host_pages=2, num_swa_host_pages=2)
    with pytest.raises(offload.GeometryError, match="c128 is absent"):
        made({k: v for k, v in devices.items() if k != "c128"})
    with pytest.raises(offload.GeometryError, match="swa is 3 layers"):
        made({**devices, "swa": pool(KV)})
    with pytest.raises(offload.UnknownNameError, match="did you mean 'c128'"):
        made({**devices, "c129": pool(KV)})


def test_a_packed_draft_needs_the_targets_geometry() -> None:
    """One page holds both models' layers, so their layers must be alike."""
    group = packed("page_first")
    assert group.anchor.host.geometry.page_stride == 4 * KV.layer_bytes
    assert group.anchor.device.tensors["k"][3].shape == (DEVICE * T, 2, 3)
    wide = PoolSpec.mha(num_layers=1, page_size=T, num_kv_heads=2, head_dim=4, v_head_dim=3)
    with pytest.raises(offload.GeometryError, match=r"(?s)pages is 3 .*k is .*with_draft"):
        groups.packed_draft(pool(KV), pool(wide, 3), num_host_pages=HOST)
    block = DevicePool.adopt(
        KV, {name: torch.zeros(3, T * 2, 2, 3, dtype=torch.float16) for name in "kv"}
    )
    with pytest.raises(offload.GeometryError, match="expected one per layer"):
        groups.packed_draft(block, block, num_host_pages=HOST)


def test_packed_layers_keep_their_names() -> None:
    """Names of both models name the layers of the packed pool; nameless ones leave it nameless."""

    def named(*names: str) -> DevicePool:
        return pool(
            PoolSpec.rows(num_layers=len(names), page_size=1, row_bytes=4, layer_names=names)
        )

    group = groups.packed_draft(named("a", "b"), named("c"), num_host_pages=1)
    assert group.layer("c") == 2
    assert packed("page_first").layer_names == ()


def test_the_usual_rules() -> None:
    """The last pages, more pages for each, and one page for several."""
    pages = np.array([6, 7, 10, 11])
    assert rules.trailing(3)(pages).tolist() == [7, 10, 11]
    assert rules.trailing(9)(pages).tolist() == [6, 7, 10, 11]
    assert rules.ratio(2)(np.array([3, 5])).tolist() == [6, 7, 10, 11]
    assert rules.ratio(1, per=2)(pages).tolist() == [3, 5]
    assert rules.ratio(1)(pages).tolist() == [6, 7, 10, 11]
    for torn in ([6, 7, 10], [7, 6], [6, 10]):
        with pytest.raises(offload.RequestError):
            rules.ratio(1, per=2)(np.array(torn))
    for wrong in (
        lambda: rules.trailing(0), lambda: rules.ratio(0), lambda: rules.ratio(2, per=3)
    ):  # fmt: skip
        with pytest.raises(offload.GeometryError):
            wrong()


class Counting:
    """A rule that counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, pages: Pages) -> Pages:
        """Return the pages in reverse."""
        self.calls += 1
        return pages[::-1]


@on_both
async def test_pages_are_planned_once_per_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules run, and runs are found, once per distinct rule, whatever the number of copies."""
    rule, found = Counting(), 0
    coalesce = plan.coalesce

    def counted(host: Pages, device: Pages, scratch: plan.Scratch | None = None) -> plan.Runs:
        nonlocal found
        found += 1
        return coalesce(host, device, scratch)

    monkeypatch.setattr(plan, "coalesce", counted)
    group = PoolGroup(
        kv=Pair.backed(pool(KV), HOST),
        one=Pair.backed(pool(KV), HOST, pages=rule),
        two=Pair.backed(pool(INDEX), HOST, pages=rule, layers=(0, 2)),
        same=Pair.backed(pool(DRAFT), HOST, layers=(1,)),
        own=Pair.backed(pool(WINDOW), HOST, pages="own"),
        tail=Pair.backed(pool(DRAFT), HOST, pages=rules.trailing(1), follows="own", layers=(1,)),
        tails=Pair.backed(pool(DRAFT), HOST, pages=rules.trailing(1), follows="own", layers=(2,)),
    )
    fill(group)
    async with offload.open_scheduler(group) as scheduler:
        loads = [
            await scheduler.load(
                host_pages=[first, first + 1],
                device_pages=[first, first + 1],
                members={
                    "own": offload.PagePair(host_pages=[first, 3], device_pages=[first, first + 1])
                },
            )
            for first in (0, 4, 8)
        ]
        for load in loads:
            await load
        assert scheduler.statistics().batches == 1
    assert rule.calls == 2 * 3  # host and device pages of three requests
    assert found == 4  # the anchor's, the rule's, the own ones, and the last of those: in one batch
    one = group.members[1]
    assert contents(one.device, [1, 0]) == contents(one.host, [1, 0])


def test_members_that_share_pages_share_the_arrays() -> None:
    """Pages that are the same are the very same arrays, also where a pool is smaller."""
    group = PoolGroup(
        kv=Pair.backed(pool(KV), HOST),
        small=Pair.backed(pool(INDEX, 3), HOST),
    )
    one, two = group.parts(Direction.LOAD, [0, 1], [2, 1])
    assert one[1] is two[1]
    assert one[2] is two[2]
    with pytest.raises(offload.RequestError, match="small device page 3 at position 1"):
        group.parts(Direction.LOAD, [0, 1], [2, 3])


def test_members_follow_only_those_before_them() -> None:
    """A follower of nobody, of a later member, and of somebody while it has pages of its own."""
    with pytest.raises(offload.UnknownNameError, match="unknown member before 'b' 'kw'"):
        PoolGroup(kv=Pair.backed(pool(KV), 1), b=Pair.backed(pool(KV), 1, follows="kw"))
    with pytest.raises(offload.UnknownNameError):
        PoolGroup(
            kv=Pair.backed(pool(KV), 1),
            b=Pair.backed(pool(KV), 1, follows="c"),
            c=Pair.backed(pool(KV), 1),
        )
    with pytest.raises(offload.RequestError, match="leave out follows='kv'"):
        Pair.backed(pool(KV), 1, pages="own", follows="kv")


@pytest.mark.parametrize("side", ["host", "device"])
def test_allocation_over_a_group_is_all_or_nothing(side: Literal["host", "device"]) -> None:
    """Pages come from the anchor and the members with their own, together or not at all."""
    group = window("page_first")
    full, swa = ((m.host if side == "host" else m.device).pages for m in group.members)
    most = full.num_free
    held = group.alloc(side, 3, {"swa": 2})
    assert (len(held.anchor), len(held.own["swa"])) == (3, 2)
    assert (full.num_free, swa.num_free) == (most - 3, most - 2)
    with pytest.raises(offload.OutOfPagesError, match=f"{most} pages of pool 'swa'") as caught:
        group.alloc(side, 1, {"swa": most})
    assert (caught.value.pool, caught.value.free) == ("swa", most - 2)
    with pytest.raises(offload.OutOfPagesError, match="pool 'full'"):
        group.alloc(side, most, {"swa": 1})
    assert (full.num_free, swa.num_free) == (most - 3, most - 2)
    stale = offload.GroupPages(held.anchor, {"swa": np.append(held.own["swa"], most - 1)})
    with pytest.raises(offload.RequestError, match="Nothing was freed"):
        group.free(side, stale)
    assert (full.num_free, swa.num_free) == (most - 3, most - 2)
    group.free(side, held)
    assert (full.num_free, swa.num_free) == (most, most)
    assert [len(pages) for pages in group.alloc(side, 0).own.values()] == [0]
    for wrong in (
        lambda: group.alloc(side, 1, {"full": 1}),
        lambda: group.free(side, offload.GroupPages(held.anchor, {"swan": held.anchor})),
    ):
        with pytest.raises(offload.UnknownNameError):
            wrong()


def test_contiguous_allocation_over_a_group_takes_one_run_from_each_pool() -> None:
    """Free pages that do not lie together will not do, in whichever pool; none is taken then."""
    group = window("page_first")
    full, swa = (member.device.pages for member in group.members)
    swa.alloc(swa.num_pages)
    swa.free([1, 4, 5, 7])
    held = group.alloc("device", 3, {"swa": 2}, contiguous=True)
    assert np.diff(held.anchor).tolist() == [1, 1]
    assert held.own["swa"].tolist() == [4, 5]
    most = full.num_free
    with pytest.raises(offload.OutOfPagesError, match="pool 'swa'") as caught:
        group.alloc("device", 3, {"swa": 2}, contiguous=True)
    assert (caught.value.contiguous, full.num_free) == (True, most)


@on_both
async def test_allocated_pages_go_straight_into_a_request() -> None:
    """What `alloc` returns for both sides names the pages of a request; freed while moving, they wait."""
    group = v4("page_first")
    fill(group)
    host, device = (group.alloc(side, 2, {"swa": 3}) for side in ("host", "device"))
    async with offload.open_scheduler(group) as scheduler:
        backup = await scheduler.backup(
            device_pages=device.anchor, host_pages=host.anchor, members=host.paired(device)
        )
        group.free("device", device)
        assert [m.device.pages.num_locked for m in group.members if m.name in {"c4", "swa"}] == [
            2,
            3,
        ]
        await backup
        await scheduler.idle(device_pages=device.anchor)
    assert group.members[0].device.pages.num_free == DEVICE
    for member in group.members:
        window = member.name == "swa" or "state" in member.name
        there = host.own["swa"] if window else host.anchor
        here = device.own["swa"] if window else device.anchor
        assert contents(member.host, there.tolist()) == contents(member.device, here.tolist())


def test_a_refusal_names_the_member() -> None:
    """One member that cannot be copied refuses the whole group, and the error says which."""
    group = PoolGroup(
        index=Pair.backed(pool(INDEX), HOST), kv=Pair.backed(pool(KV), HOST, layers=(0, 1, 2))
    )
    with pytest.raises(offload.UnsupportedPairError, match=r"\(mha, pool 'kv'\)") as caught:
        offload.open_scheduler(group, io_backend="direct")
    assert (caught.value.pool, caught.value.layout) == ("kv", "page_first")


@on_both
async def test_members_may_sit_a_request_out() -> None:
    """A request of window pages alone, and one of the anchor's alone, move just those."""
    group = window("page_first")
    fill(group)
    full, swa = group.members
    before = contents(full.device, range(DEVICE))
    wanted = contents(swa.host, [3])
    async with offload.open_scheduler(group) as scheduler:
        only_window = await scheduler.load(
            host_pages=[],
            device_pages=[],
            members={"swa": offload.PagePair(host_pages=[3], device_pages=[5])},
        )
        await only_window
        assert only_window.nbytes == WINDOW.page_bytes
        assert contents(swa.device, [5]) == wanted
        assert contents(full.device, range(DEVICE)) == before
        only_anchor = await scheduler.load(
            host_pages=[1],
            device_pages=[0],
            members={"swa": offload.PagePair(host_pages=[], device_pages=[])},
        )
        await only_anchor
        assert only_anchor.nbytes == KV.page_bytes
    assert contents(full.device, [0]) == contents(full.host, [1])
    assert scheduler.statistics().load.ops == (2 + 3) * 2  # layers of one page, keys and values


@on_both
async def test_a_streaming_backup_covers_all_members() -> None:
    """Layers written in any order reach the host in every pool that has them."""
    group = window("page_first")
    fill(group)
    own = {"swa": offload.PagePair(host_pages=[0], device_pages=[4])}
    async with offload.open_scheduler(group) as scheduler:
        backup = await scheduler.backup(
            device_pages=[2], host_pages=[6], streaming=True, members=own
        )
        for layer in (3, 0, 4, 2, 1):
            backup.layer_written(layer)
            await backup.layer(layer)
        await backup
    full, swa = group.members
    assert contents(full.host, [6]) == contents(full.device, [2])
    assert contents(swa.host, [0]) == contents(swa.device, [4])


def test_groups_over_the_same_pools_never_block_each_other() -> None:
    """Allocators are locked in one order, whatever the order of the members; no page is lost."""
    one, two = Pair.backed(pool(KV), HOST), Pair.backed(pool(KV), HOST)
    own = partial(attrs.evolve, pages="own", layers=range(3, 6))
    crossed = [PoolGroup(a=one, b=own(two)), PoolGroup(a=two, b=own(one))]

    def churn(group: PoolGroup) -> None:
        for _ in range(300):
            try:
                held = group.alloc("device", 5, {"b": 4})
            except offload.OutOfPagesError:
                continue
            group.free("device", held)

    threads = [threading.Thread(target=churn, args=(group,)) for group in crossed * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert (one.device.pages.num_free, two.device.pages.num_free) == (DEVICE, DEVICE)


@pytest.mark.parametrize("members", [{"swa": ([1], [2])}, {"swa": None}, [("swa", 1)]])
@on_both
async def test_members_in_another_form_are_refused_with_the_right_one(members: object) -> None:
    """Page lists without a name for their side are told how to be passed, and nothing is queued."""
    group = window("page_first")
    async with offload.open_scheduler(group) as scheduler:
        with pytest.raises(offload.RequestError, match=r"offload.PagePair\(host_pages="):
            await scheduler.load(host_pages=[1], device_pages=[0], members=members)  # type: ignore[arg-type]
        with pytest.raises(offload.RequestError, match=r"offload.PagePair\(host_pages="):
            scheduler.busy(members=members)  # type: ignore[arg-type]


def test_the_sides_of_a_page_pair_are_named() -> None:
    """Device and host cannot be confused by their order."""
    with pytest.raises(TypeError):
        offload.PagePair([1], [2])  # type: ignore[call-arg]
