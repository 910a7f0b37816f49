"""Runs and copies: each byte that was asked for is written once, and no other is touched."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from offload.core.axes import Axes
from offload.core.geometry import Component, ComponentGeometry, Geometry, matched
from offload.core.kinds import Direction, Layout, PoolKind
from offload.core.layout import device_geometry, host_geometry
from offload.core.plan import Ops, Runs, Scratch, coalesce, copy_ops, plan_copy

Pages = NDArray[np.int64]


def expand(runs: Runs) -> list[tuple[int, int]]:
    """Return the page pairs of runs, by plain loops."""
    rows = zip(runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True)
    return [(s + i, d + i) for s, d, count in rows for i in range(count)]


def longest_runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (source, destination, count), found by looking at one sorted pair after the other."""
    found: list[tuple[int, int, int]] = []
    for s, d in sorted(pairs):
        if found and (s, d) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((s, d, 1))
    return found


def columns(pairs: list[tuple[int, int]]) -> tuple[Pages, Pages]:
    """Return sources and destinations."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def random_pairs(draw: random.Random) -> list[tuple[int, int]]:
    """Return pairs with distinct destinations: random ones, stretches, or in order."""
    n = draw.randint(0, 12)
    destinations = draw.sample(range(16), n)
    if draw.random() < 0.5:
        destinations.sort()
    shift = draw.choice((0, 3))
    alike = draw.random() < 0.5
    return [(d + shift if alike else draw.randrange(16), d) for d in destinations]


@pytest.mark.parametrize("block", range(20))
def test_runs_are_the_longest_that_step_together(block: int) -> None:
    """Runs hold every pair once, and no two of them could be joined; with one scratch for all."""
    scratch = Scratch()
    for seed in range(block * 50, block * 50 + 50):
        pairs = random_pairs(random.Random(seed))
        runs = coalesce(*columns(pairs), scratch)
        rows = zip(
            runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True
        )
        assert list(rows) == longest_runs(pairs)
        assert sorted(expand(runs)) == sorted(pairs)
        assert len(runs) == len(runs.source)
        assert runs.num_pages == len(pairs)
        here, there = runs.pages
        assert list(zip(here.tolist(), there.tolist(), strict=True)) == expand(runs)
        here, there = runs.by_destination
        ordered = sorted(pairs, key=lambda pair: pair[1])
        assert list(zip(here.tolist(), there.tolist(), strict=True)) == ordered


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled", "late swap"])
@pytest.mark.parametrize("n", [15, 4096, 4097, 9000])
def test_runs_of_lists_of_any_length(n: int, order: str) -> None:
    """Whether or not they have to be sorted first; the scratch was left full by another plan."""
    draw = random.Random(n)
    sources = sorted(draw.sample(range(2 * n), n))
    pairs = [(s, s + 3 if s % 7 else 5 * n + s) for s in sources]
    if order == "reversed":
        pairs.reverse()
    elif order == "shuffled":
        draw.shuffle(pairs)
    elif order == "late swap":
        pairs[-1], pairs[-2] = pairs[-2], pairs[-1]
    scratch = Scratch()
    coalesce(*columns([(1, 1)] * (n + 5)), scratch)
    runs = coalesce(*columns(pairs), scratch)
    assert runs.num_pages == n
    found = zip(runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True)
    assert list(found) == longest_runs(pairs)


def test_repeated_sources_are_no_neighbours() -> None:
    """One source for several destinations is a run for each, in order already or not."""
    for n in (4, 5000):
        pairs = [(5, d) for d in range(n)]
        assert expand(coalesce(*columns(pairs), Scratch())) == pairs
        assert expand(coalesce(*columns(pairs[::-1]), Scratch())) == pairs


def test_runs_outlive_the_scratch() -> None:
    """A second plan with the same buffers changes nothing in the first."""
    scratch = Scratch()
    first = coalesce(*columns([(0, 5), (1, 6), (9, 1)]), scratch)
    coalesce(*columns([(3, 3), (2, 2), (1, 1)]), scratch)
    assert expand(first) == [(0, 5), (1, 6), (9, 1)]


def test_page_ids_up_to_the_bound_are_exact() -> None:
    """The largest ids that pools allow keep their halves of the key apart."""
    top = (1 << 31) - 1
    pairs = [(top - 1, 0), (top, 1), (0, top), (1, top - 1)]
    assert sorted(expand(coalesce(*columns(pairs)))) == sorted(pairs)


def test_members_that_share_their_pages_are_planned_once() -> None:
    """A group of 40 members under two page rules is planned twice, whatever the number of requests."""
    host, device = columns([(3, 1), (4, 2)])
    other_host, other_device = columns([(7, 0)])
    own = (39, other_host, other_device)
    one = [*((member, host, device) for member in range(39)), own]
    more_host, more_device = columns([(5, 3)])
    two = [(member, more_host, more_device) for member in range(39)]
    plan = plan_copy(Direction.LOAD, one + two)
    assert list(plan) == list(range(40))
    assert len(set(plan.values())) == 2
    assert expand(plan[0]) == [(3, 1), (4, 2), (5, 3)]
    assert len(plan[0]) == 1
    assert plan[0].num_pages == 3
    assert expand(plan[39]) == [(7, 0)]


def test_a_backup_runs_from_device_to_host() -> None:
    """The direction decides which pages are the source."""
    host, device = columns([(3, 1), (4, 2)])
    plan = plan_copy(Direction.BACKUP, [(0, host, device)])
    assert expand(plan[0]) == [(1, 3), (2, 4)]


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("members", [(4,), (4, 2)])
def test_a_plan_says_what_it_is_of(way: Direction, members: tuple[int, ...]) -> None:
    """One member or several: members in their order, and runs once for all, are those of the request."""
    host, device = columns([(3, 1), (4, 2), (9, 7)])
    scratch = Scratch()
    plan = plan_copy(way, [(member, host, device) for member in members], scratch)
    assert list(plan) == list(members)
    assert len(set(plan.values())) == 1
    pairs = [(3, 1), (4, 2), (9, 7)]
    expected = pairs if way is Direction.LOAD else [(d, h) for h, d in pairs]
    assert expand(plan[4]) == expected


def test_members_that_share_one_side_alone_are_planned_apart() -> None:
    """The same host pages into other device pages, or the reverse, are other runs."""
    host, device = columns([(3, 1), (4, 2)])
    other_host, other_device = columns([(8, 6), (9, 5)])
    parts = [(0, host, device), (1, host, other_device), (2, other_host, device)]
    plan = plan_copy(Direction.LOAD, parts)
    assert [expand(runs) for runs in plan.values()] == [
        [(3, 1), (4, 2)],
        [(3, 6), (4, 5)],
        [(8, 1), (9, 2)],
    ]


def test_shifted_copies_move_each_side_by_its_own() -> None:
    """The source goes on by the first number and the destination by the second, both forwards."""
    ops = Ops(np.array([0, 8]), np.array([100, 200]), np.array([8, 4]))
    moved = ops.shifted(1000, 50)
    assert moved.source.tolist() == [1000, 1008]
    assert moved.destination.tolist() == [150, 250]
    assert moved.nbytes.tolist() == [8, 4]


LAYERS = 3
SIDES = {
    PoolKind.MHA: (Component("k", 3, 2, 5, 2), Component("v", 3, 2, 7, 2)),
    PoolKind.MLA: (Component("kv", 3, 1, 6, 2, (("latent", 4), ("rope", 2))),),
    PoolKind.ROWS: (Component("row", 2, 1, 11, 1),),
    PoolKind.STATE: (Component("ssm", 2, 1, 5, 4), Component("conv", 2, 1, 3, 2)),
}


def geometries(kind: PoolKind) -> list[Geometry]:
    """Return the device's geometry and hosts of every layout that has a meaning, padded ones too."""
    opaque = kind in {PoolKind.ROWS, PoolKind.STATE}
    layouts: list[Layout | Axes] = [
        layout
        for layout in Layout
        if not (opaque and layout in {Layout.PAGE_HEAD, Layout.PAGE_FIRST_KV_SPLIT})
    ]
    if not opaque:
        layouts.append(Axes("p l h t d"))
    made = [device_geometry(kind, SIDES[kind], num_layers=LAYERS, num_pages=16)]
    for layout in layouts:
        for align in (1, 64):
            if align > 1 and layout is Layout.LAYER_FIRST:
                continue
            made.append(
                host_geometry(
                    kind, SIDES[kind], layout, num_layers=LAYERS, num_pages=19, page_align=align
                )
            )
    return made


def element_offsets(part: ComponentGeometry, layer: int, page: int) -> list[int]:
    """Return the byte offset of every byte of one layer of one page, in canonical order."""
    return [
        part.at(layer, page)
        + t * part.token_stride
        + h * part.head_stride
        + d * part.dim_stride
        + b
        for t in range(part.component.tokens)
        for h in range(part.component.heads)
        for d in range(part.component.dim)
        for b in range(part.component.itemsize)
    ]


def moved(ops: Ops) -> list[tuple[int, int]]:
    """Return (source byte, destination byte) of every byte that the copies move."""
    rows = zip(ops.source.tolist(), ops.destination.tolist(), ops.nbytes.tolist(), strict=True)
    return [(s + i, d + i) for s, d, n in rows for i in range(n)]


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("kind", PoolKind)
def test_copies_move_each_requested_byte_once_and_no_other(kind: PoolKind, breaks: bool) -> None:
    """For every pair of geometries, both ways: the right bytes, once, and never across a break."""
    draw = random.Random(7)
    device, *hosts = geometries(kind)
    for host in hosts:
        for theirs, ours in matched(host, device):
            pair = (theirs, ours) if draw.random() < 0.5 else (ours, theirs)
            if breaks:
                pair = (broken(pair[0], draw), broken(pair[1], draw))
            source, destination = pair
            pairs = [(s % 16, d) for s, d in random_pairs(draw)]
            layer = draw.randrange(LAYERS)
            ops = copy_ops(coalesce(*columns(pairs)), source, destination, layer)
            wanted = [
                both
                for s, d in pairs
                for both in zip(
                    element_offsets(source, layer, s),
                    element_offsets(destination, layer, d),
                    strict=True,
                )
            ]
            assert sorted(moved(ops)) == sorted(wanted)
            assert not crossings(ops.source, ops.nbytes, source.breaks)
            assert not crossings(ops.destination, ops.nbytes, destination.breaks)


def broken(part: ComponentGeometry, draw: random.Random) -> ComponentGeometry:
    """Return the same geometry in memory that was registered in chunks."""
    end = part.at(LAYERS - 1, 19)
    return attrs.evolve(part, breaks=tuple(sorted(draw.sample(range(1, end), 9))))


@pytest.mark.parametrize("side", ["source", "destination"])
def test_breaks_on_one_side_are_kept(side: str) -> None:
    """A place that no copy may cross cuts copies, whichever side has it."""
    parts = (Component("row", 1, 1, 64, 1),)
    host = host_geometry(PoolKind.ROWS, parts, Layout.LAYER_FIRST, num_layers=1, num_pages=4)
    sides = {"source": host.components[0], "destination": host.components[0]}
    sides[side] = attrs.evolve(sides[side], breaks=(32, 100))
    runs = coalesce(*columns([(0, 0), (1, 1), (2, 2)]))
    ops = copy_ops(runs, sides["source"], sides["destination"], 0)
    assert ops.source.tolist() == [0, 32, 100]
    assert ops.destination.tolist() == [0, 32, 100]
    assert ops.nbytes.tolist() == [32, 68, 92]


def crossings(offsets: Pages, sizes: Pages, breaks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the copies that cross a break."""
    return [
        (start, size)
        for start, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
        if any(start < cut < start + size for cut in breaks)
    ]


def test_pages_that_lie_together_on_both_sides_are_one_copy() -> None:
    """A run of pages is one copy where both pools keep neighbours adjacent, and one per page elsewhere."""
    component = Component("k", 4, 2, 8, 2)
    device = device_geometry(PoolKind.MHA, (component,), num_layers=2, num_pages=8)
    counts = {}
    for layout in (
        Layout.LAYER_FIRST,
        Layout.PAGE_FIRST_DIRECT,
        Layout.PAGE_FIRST,
        Layout.PAGE_HEAD,
    ):
        host = host_geometry(PoolKind.MHA, (component,), layout, num_layers=2, num_pages=8)
        runs = coalesce(*columns([(0, 1), (1, 2), (2, 3)]))
        counts[layout] = len(copy_ops(runs, host.components[0], device.components[0], 1))
    assert counts == {
        Layout.LAYER_FIRST: 1,
        Layout.PAGE_FIRST_DIRECT: 3,
        Layout.PAGE_FIRST: 3 * 4,
        Layout.PAGE_HEAD: 3 * 4 * 2,
    }


def test_copies_of_another_layer_are_the_same_ones_further_on() -> None:
    """Shifting by the layer strides is planning for that layer."""
    component = Component("k", 4, 2, 8, 2)
    device = device_geometry(PoolKind.MHA, (component,), num_layers=3, num_pages=8).components[0]
    host = host_geometry(
        PoolKind.MHA, (component,), Layout.PAGE_FIRST, num_layers=3, num_pages=8
    ).components[0]
    runs = coalesce(*columns([(0, 1), (5, 2)]))
    shifted = copy_ops(runs, host, device, 0).shifted(
        2 * host.layer_stride, 2 * device.layer_stride
    )
    assert moved(shifted) == moved(copy_ops(runs, host, device, 2))


def test_offsets_beyond_two_to_the_31_do_not_wrap() -> None:
    """Byte offsets are 64 bits wide from the first product on."""
    row = Component("row", 1, 1, 37_440, 1)
    host = host_geometry(PoolKind.ROWS, (row,), Layout.PAGE_FIRST, num_layers=2, num_pages=100_001)
    device = device_geometry(PoolKind.ROWS, (row,), num_layers=2, num_pages=4)
    ops = copy_ops(coalesce(*columns([(100_000, 3)])), host.components[0], device.components[0], 1)
    assert ops.source.tolist() == [(100_000 * 2 + 1) * 37_440]
