"""Offsets and runs of every layout against brute force, with a different prime for every axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from offload.core.axes import Axes, overlaps, read_strides
from offload.core.geometry import (
    Array,
    Component,
    ComponentGeometry,
    Geometry,
    Runs,
    matched,
    pair_alignment,
    pair_runs,
)
from offload.core.kinds import Layout, PoolKind
from offload.core.layout import HOST_AXES, device_geometry, host_geometry, read_array
from offload.errors import GeometryError

Offsets: TypeAlias = NDArray[np.int64]
"""Byte offset of every element, by [P, L, T, H, D]."""

PAGES, LAYERS = 2, 3

PARTS: dict[PoolKind, tuple[Component, ...]] = {
    PoolKind.MHA: (Component("k", 5, 7, 11, 2), Component("v", 5, 7, 13, 2)),
    PoolKind.MLA: (Component("kv", 5, 1, 17, 2, (("latent", 11), ("rope", 6))),),
    PoolKind.ROWS: (Component("row", 5, 1, 13, 1),),
    PoolKind.STATE: (Component("ssm", 3, 1, 7, 4), Component("conv", 3, 1, 11, 2)),
}

ORDERS = [*Layout, Axes("h d p l t"), Axes("t p d h l"), Axes("p l t h d"), Axes("l t p h d")]
CASES = list(product(PoolKind, ORDERS))
IDS = [f"{kind}-{getattr(order, 'text', order)}".replace(" ", "") for kind, order in CASES]


def made(kind: PoolKind, order: Layout | Axes, *, page_align: int = 1) -> Geometry:
    """Return a host geometry of the primes."""
    return host_geometry(
        kind, PARTS[kind], order, num_layers=LAYERS, num_pages=PAGES, page_align=page_align
    )


def brute_offsets(order: str, part: Component, *, start: int = 0, width: int = 0) -> Offsets:
    """Return where elements lie in a dense array, by numbering its elements one after the other.

    `start` and `width` pick a piece of rows that are `width` elements long in storage.
    """
    sizes = {"p": PAGES, "l": LAYERS, "t": part.tokens, "h": part.heads, "d": width or part.dim}
    order += "".join(letter for letter in sizes if letter not in order)  # of size 1
    numbered = np.arange(np.prod([sizes[letter] for letter in order]))
    grid = numbered.reshape([sizes[letter] for letter in order])
    canonical = grid.transpose([order.index(letter) for letter in "plthd"])
    return canonical[..., start : start + part.dim] * part.itemsize


def formula(part: ComponentGeometry) -> Offsets:
    """Return the offsets that a geometry claims."""
    shape = (PAGES, LAYERS, *(size for size, _ in part.axes))
    found = np.empty(shape, np.int64)
    for index in np.ndindex(*shape):
        page, layer, *inner = index
        steps = (at * step for at, (_, step) in zip(inner, part.axes, strict=True))
        found[index] = part.at(layer, page) + sum(steps)
    return found


def brute_runs(
    starts: Sequence[tuple[int, ...]], itemsize: int
) -> set[tuple[tuple[int, ...], int]]:
    """Return (first offsets, bytes) of maximal ranges in which every side steps by one element."""
    runs: list[tuple[tuple[int, ...], int]] = []
    for at in sorted(starts):
        if runs and all(a == b + runs[-1][1] for a, b in zip(at, runs[-1][0], strict=True)):
            runs[-1] = (runs[-1][0], runs[-1][1] + itemsize)
        else:
            runs.append((at, itemsize))
    return set(runs)


def expanded(runs: Runs, base: tuple[int, ...]) -> set[tuple[tuple[int, ...], int]]:
    """Return the same set from the loops of a `Runs`."""
    starts = [base]
    for count, steps in runs.loops:
        starts = [
            tuple(a + index * step for a, step in zip(at, steps, strict=True))
            for at in starts
            for index in range(count)
        ]
    assert len(starts) == runs.count
    return {(at, runs.nbytes) for at in starts}


@pytest.mark.parametrize(("kind", "order"), CASES, ids=IDS)
def test_offsets_equal_brute_force(kind: PoolKind, order: Layout | Axes) -> None:
    """Every element's offset equals its number in a dense array of that axis order."""
    geometry = made(kind, order)
    for part in geometry.components:
        brute = brute_offsets(geometry.axes.order, part.component)
        assert (formula(part) == brute).all()


@pytest.mark.parametrize(("kind", "order"), CASES, ids=IDS)
def test_runs_equal_brute_force(kind: PoolKind, order: Layout | Axes) -> None:
    """Count, length and position of the runs of every page and layer equal brute force."""
    for part in made(kind, order).components:
        for page, layer in product(range(PAGES), range(LAYERS)):
            offsets = formula(part)[page, layer].ravel()
            brute = brute_runs([(int(at),) for at in offsets], part.component.itemsize)
            assert expanded(part.runs, (part.at(layer, page),)) == brute


@pytest.mark.parametrize(("kind", "order"), CASES, ids=IDS)
def test_adjacent_and_whole_page_equal_brute_force(kind: PoolKind, order: Layout | Axes) -> None:
    """Pages of a layer are adjacent, and a page is one range, exactly when its bytes are."""
    for part in made(kind, order).components:
        found, item = formula(part), part.component.itemsize
        layer = brute_runs([(int(at),) for at in found[:, 1].ravel()], item)
        assert part.adjacent == (len(layer) == 1 and part.page_stride == part.nbytes)
        page = brute_runs([(int(at),) for at in found[1].ravel()], item)
        assert part.whole_page == (len(page) == 1)


@pytest.mark.parametrize(("kind", "order"), CASES, ids=IDS)
@pytest.mark.parametrize("device_order", ["", "l p h t d", "l t h d p"])
def test_pair_runs_equal_brute_force(
    kind: PoolKind, order: Layout | Axes, device_order: str
) -> None:
    """The runs of a pair are the ranges in which both sides step together, wherever each lies."""
    host = made(kind, order)
    device = (
        made(kind, Axes(device_order))
        if device_order
        else device_geometry(kind, PARTS[kind], num_layers=LAYERS, num_pages=PAGES)
    )
    for ours, theirs in matched(host, device):
        a, b = formula(ours)[1, 2].ravel(), formula(theirs)[1, 2].ravel()
        pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
        brute = brute_runs(pairs, ours.component.itemsize)
        base = (ours.at(2, 1), theirs.at(2, 1))
        assert expanded(pair_runs(ours, theirs), base) == brute


def test_split_pieces_lie_in_the_whole_rows() -> None:
    """Latent and rope of an unsplit mla pool are the two ends of each row."""
    geometry = made(PoolKind.MLA, Layout.PAGE_FIRST)
    latent, rope = (geometry.component(name) for name in ("latent", "rope"))
    order = geometry.axes.order
    assert (formula(latent) == brute_offsets(order, latent.component, width=17)).all()
    assert (formula(rope) == brute_offsets(order, rope.component, start=11, width=17)).all()


def test_split_pairs_take_the_finer_side() -> None:
    """A split host pool and a whole device pool are matched piece by piece."""
    host = made(PoolKind.MLA, Layout.PAGE_FIRST_KV_SPLIT)
    device = device_geometry(PoolKind.MLA, PARTS[PoolKind.MLA], num_layers=LAYERS, num_pages=PAGES)
    assert [(a.name, b.name) for a, b in matched(host, device)] == [("latent",) * 2, ("rope",) * 2]
    assert host.page_bytes == device.page_bytes == 5 * 17 * 2


RUNS_64_8_128 = {
    Layout.LAYER_FIRST: (1, 131_072, False),
    Layout.PAGE_FIRST: (64, 2_048, True),
    Layout.PAGE_FIRST_DIRECT: (1, 131_072, True),
    Layout.PAGE_HEAD: (512, 256, True),
    Layout.PAGE_FIRST_KV_SPLIT: (1, 131_072, True),
}


@pytest.mark.parametrize("layout", Layout)
def test_runs_of_a_common_model(layout: Layout) -> None:
    """64 tokens, 8 heads, dim 128, 2 bytes: the numbers that explain the table."""
    geometry = host_geometry(
        PoolKind.MHA, (Component("k", 64, 8, 128, 2),), layout, num_layers=32, num_pages=4
    )
    runs = geometry.worst.runs
    assert (runs.count, runs.nbytes, geometry.whole_page) == RUNS_64_8_128[layout]


SHAPES = {
    PoolKind.MHA: [(3, 10, 7, 11), (10, 3, 7, 11), (2, 3, 5, 7, 11), (2, 7, 5, 3, 11)],
    PoolKind.MLA: [(3, 10, 1, 17), (10, 3, 1, 17), (2, 3, 5, 1, 17), (2, 1, 5, 3, 17)],
    PoolKind.ROWS: [(3, 2, 65), (2, 3, 65), (2, 3, 1, 65), (2, 1, 5, 3, 13)],
    PoolKind.STATE: [(3, 2, 21), (2, 3, 21), (2, 3, 1, 21), (2, 1, 3, 3, 7)],
}


@pytest.mark.parametrize("kind", PoolKind)
def test_shapes_of_the_named_layouts(kind: PoolKind) -> None:
    """Arrays have the shapes that the layouts are known by."""
    found = [made(kind, layout).arrays[0].shape for layout in list(Layout)[:4]]
    assert found == SHAPES[kind]


PAGE_MAJOR = [layout for layout in Layout if layout is not Layout.LAYER_FIRST]


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("layout", PAGE_MAJOR)
def test_page_align_pads_the_page_stride_alone(kind: PoolKind, layout: Layout) -> None:
    """Padding moves pages apart and leaves the inside of a page as it was."""
    packed, padded = made(kind, layout), made(kind, layout, page_align=4096)
    for one, other in zip(packed.components, padded.components, strict=True):
        assert other.page_stride == 4096
        assert (formula(one)[0] == formula(other)[0]).all()
        assert other.runs == one.runs
    assert padded.page_stride == 4096 * len(padded.components)
    assert padded.nbytes == PAGES * padded.page_stride


def test_page_align_needs_page_major() -> None:
    """Where pages are not outermost there is no page stride to pad."""
    with pytest.raises(GeometryError, match="outermost axis is l, expected p"):
        made(PoolKind.MHA, Layout.LAYER_FIRST, page_align=4096)


@pytest.mark.parametrize("text", ["", "p p t h d", "p x d", "l t h d", "p t h"])
def test_axes_are_checked(text: str) -> None:
    """Axes need p and d, and know each letter once."""
    with pytest.raises(GeometryError):
        Axes(text)


def test_an_absent_axis_has_size_one() -> None:
    """Axes without heads cannot describe a pool that has several."""
    with pytest.raises(GeometryError, match="h is absent, with size 7"):
        made(PoolKind.MHA, Axes("p l t d"))
    assert made(PoolKind.MLA, Axes("p l t d")).worst.runs.count == 1


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("layout", Layout)
def test_strides_are_read_back(kind: PoolKind, layout: Layout) -> None:
    """Adopting a dense array of a layout gives the geometry that the layout has."""
    geometry = made(kind, layout)
    for part, array in zip(geometry.components, geometry.arrays, strict=True):
        found = read_array(
            (part.component,), geometry.axes, array, num_layers=LAYERS, num_pages=PAGES
        )
        assert found is not None
        assert (formula(found[0]) == formula(part)).all()


def test_another_order_is_not_read() -> None:
    """A tensor whose axes have other sizes in that order is no such array."""
    sizes = {"p": 2, "l": 3, "t": 5, "h": 7, "d": 11}
    axes = HOST_AXES[PoolKind.MHA][Layout.PAGE_FIRST]
    assert read_strides(axes, sizes, (3, 10, 7, 11), (770, 77, 11, 1), 1) is None


def test_shared_bytes_are_refused() -> None:
    """Strides that let two pages share bytes raise when the array is adopted."""
    part = Component("k", 5, 7, 11, 2)
    array = Array("k", (2, 5, 7, 11), (770 - 2, 154, 22, 2), 2000, separate=True)
    with pytest.raises(GeometryError, match="share a byte"):
        read_array((part,), Axes("p t h d"), array, num_layers=LAYERS, num_pages=PAGES)
    assert overlaps([(4, 0), (2, 2)], 2)
    assert not overlaps([(4, 0), (1, 2)][1:], 2)


def test_k_and_v_share_an_array() -> None:
    """With a 2 among the axes, v lies one stride of it after k."""
    k = Component("k", 5, 7, 11, 2)
    parts = (k, attrs.evolve(k, name="v"))
    array = Array("kv", (2, 2, 5, 7, 11), (1540, 770, 154, 22, 2), 3080, separate=True)
    found = read_array(parts, Axes("p 2 t h d"), array, num_layers=LAYERS, num_pages=PAGES)
    assert found is not None
    assert [(part.offset, part.page_stride, part.runs.count) for part in found] == [
        (0, 1540, 1),
        (770, 1540, 1),
    ]
    assert not found[0].adjacent


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_apart_are_one_range_when_there_is_one(layers: int) -> None:
    """With an array per layer, a page over all its layers is one range only of a model with one layer."""
    geometry = device_geometry(
        PoolKind.MHA, PARTS[PoolKind.MHA], num_layers=layers, num_pages=PAGES
    )
    assert geometry.whole_page is (layers == 1)


def test_pieces_of_a_row_lie_one_behind_the_other() -> None:
    """Each piece of a token row begins where those before it end, and a name that is none is a KeyError."""
    part = Component("kv", 5, 1, 17, 2, (("a", 2), ("b", 4), ("c", 8), ("d", 3)))
    geometry = device_geometry(PoolKind.MLA, (part,), num_layers=1, num_pages=PAGES)
    pieces = [geometry.component(name) for name in "abcd"]
    assert [piece.offset for piece in pieces] == [0, 4, 12, 28]
    assert [piece.component.dim for piece in pieces] == [2, 4, 8, 3]
    with pytest.raises(KeyError, match="e"):
        geometry.component("e")


def test_alignment_is_what_divides_everything() -> None:
    """The widest word of a pair divides run length, offsets and strides of both sides."""
    widths = {}
    for row in (1155, 132, 584, 37_440):
        parts = (Component("row", 1, 1, row, 1),)
        device = device_geometry(PoolKind.ROWS, parts, num_layers=LAYERS, num_pages=PAGES)
        host = host_geometry(
            PoolKind.ROWS, parts, Layout.PAGE_FIRST, num_layers=LAYERS, num_pages=PAGES
        )
        widths[row] = pair_alignment(host.worst, device.worst)
    assert widths == {1155: 1, 132: 4, 584: 8, 37_440: 16}


def test_offsets_beyond_two_to_the_31() -> None:
    """Offsets are Python integers: the last row of a 2.4 GB pool is not narrowed (K14)."""
    parts = (Component("row", 1, 1, 2_304, 1),)
    geometry = device_geometry(PoolKind.ROWS, parts, num_layers=1, num_pages=1_048_576)
    assert geometry.worst.at(0, 1_048_575) == 2_415_916_800
    assert geometry.nbytes == 2_415_919_104


def test_a_piece_of_a_component_is_whole() -> None:
    """A narrowed component has its own name, width and offset, and no pieces."""
    part = made(PoolKind.MLA, Layout.PAGE_FIRST).components[0]
    rope = part.narrow("rope", 11, 6)
    assert (rope.name, rope.component.dim, rope.component.parts) == ("rope", 6, ())
    assert rope.offset == part.offset + 11 * part.dim_stride


def test_breaks_are_those_of_the_array() -> None:
    """`broken` gives each component the places of its own array, and leaves the rest."""
    plain = made(PoolKind.MHA, Layout.PAGE_FIRST)
    broken = plain.broken({"k": (64, 128), "v": (96,)})
    assert [part.breaks for part in broken.components] == [(64, 128), (96,)]
    assert broken.broken({"k": (), "v": ()}) == plain


def test_a_page_counts_once_per_array() -> None:
    """With an array per layer, a page takes its stride in each of them."""
    apart = made(PoolKind.MHA, Axes("p t h d"))
    joint = made(PoolKind.MHA, Axes("p l t h d"))
    assert apart.page_stride == joint.page_stride == LAYERS * apart.page_bytes


@pytest.mark.parametrize(
    ("side", "field"),
    [(side, field) for side in (0, 1) for field in ("offset", "page_stride", "layer_stride")],
)
def test_every_start_counts_for_the_word(side: int, field: str) -> None:
    """An offset or a stride of two bytes on either side allows words of two bytes."""
    parts = (Component("k", 4, 1, 16, 2),)
    pair = [host_geometry(PoolKind.MHA, parts, Layout.PAGE_FIRST, num_layers=2, num_pages=2)] * 2
    sides = [each.components[0] for each in pair]
    assert pair_alignment(*sides) == 16
    sides[side] = attrs.evolve(sides[side], **{field: getattr(sides[side], field) + 2})
    assert pair_alignment(*sides) == 2


def test_the_length_of_a_run_counts_for_the_word() -> None:
    """Runs of six bytes move in words of two, wherever they start."""
    parts = (Component("k", 1, 1, 3, 2),)
    host = host_geometry(
        PoolKind.MHA, parts, Layout.PAGE_FIRST, num_layers=1, num_pages=2, page_align=16
    )
    part = attrs.evolve(host.components[0], layer_stride=0)
    assert (part.page_stride, pair_alignment(part, part)) == (16, 2)


def test_absent_axes_have_no_stride() -> None:
    """An axis that an order leaves out because its size is 1 is never stepped along."""
    parts = (Component("row", 1, 1, 8, 1),)
    row = host_geometry(PoolKind.ROWS, parts, Axes("p d"), num_layers=1, num_pages=2).components[0]
    assert (row.layer_stride, row.token_stride, row.head_stride) == (0, 0, 0)


def test_padded_pages_have_a_dimension_of_their_own() -> None:
    """Pages that are rounded up cannot share a dimension with their tokens."""
    assert made(PoolKind.MHA, Axes("pt l h d"), page_align=2).axes.text == "p t l h d"
    assert made(PoolKind.MHA, Axes("pt l h d"), page_align=1).axes.text == "pt l h d"
    host = made(PoolKind.MHA, Axes("pt l h d"), page_align=4096)
    assert host.arrays[0].shape == (PAGES, 5, LAYERS, 7, 11)


@pytest.mark.parametrize("kind", PoolKind)
def test_device_geometries_know_their_kind(kind: PoolKind) -> None:
    """What engines allocate is of the kind that was asked for, and has no layout."""
    device = device_geometry(kind, PARTS[kind], num_layers=LAYERS, num_pages=PAGES)
    assert (device.kind, device.layout) == (kind, None)


def test_an_adopted_axis_of_size_one_steps_as_in_a_dense_array() -> None:
    """Strides of axes that no dimension tells come from the element size upwards."""
    part = Component("k", 2, 1, 1, 4)
    array = Array("k", (3, 2), (8, 4), 24, separate=True)
    found = read_array((part,), Axes("p t h d"), array, num_layers=1, num_pages=3)
    assert found is not None
    assert (found[0].dim_stride, found[0].head_stride, found[0].token_stride) == (4, 4, 4)


def test_the_finer_side_names_what_is_copied() -> None:
    """Where one side stores pieces apart, pieces are copied, whatever they are called."""
    part = Component("zz", 2, 1, 4, 2, (("aa", 1), ("bb", 3)))
    split = host_geometry(
        PoolKind.MLA, (part,), Layout.PAGE_FIRST_KV_SPLIT, num_layers=1, num_pages=2
    )
    whole = device_geometry(PoolKind.MLA, (part,), num_layers=1, num_pages=2)
    for pair in (matched(split, whole), matched(whole, split)):
        assert [(one.name, other.name) for one, other in pair] == [("aa", "aa"), ("bb", "bb")]
