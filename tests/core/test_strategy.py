"""The strategy table: total, explained, and true in what it offers."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest

from offload.core.axes import Axes
from offload.core.checks import worst_runs
from offload.core.geometry import Component, Geometry, matched
from offload.core.kinds import AUTO, Direction, IoBackend, Layout, PoolKind
from offload.core.layout import device_geometry, host_geometry
from offload.core.strategy import LONG_RUN, Table, auto_order, resolve
from offload.core.table import TABLE, Rejection, Strategy
from offload.errors import UnsupportedPairError
from offload.verdict import NOMINAL

CELLS = list(product(PoolKind, Layout, IoBackend, Direction))
IDS = ["-".join(cell) for cell in CELLS]

ODD = {
    PoolKind.MHA: (Component("k", 5, 7, 11, 2), Component("v", 5, 7, 13, 2)),
    PoolKind.MLA: (Component("kv", 5, 1, 17, 2, (("latent", 11), ("rope", 6))),),
    PoolKind.ROWS: (Component("row", 1, 1, 1155, 1),),
    PoolKind.STATE: (Component("ssm", 3, 1, 7, 4), Component("conv", 3, 1, 11, 2)),
}


def pair(
    kind: PoolKind, layout: Layout | Axes, parts: tuple[Component, ...] | None = None
) -> tuple[Geometry, Geometry]:
    """Return a host geometry of that layout, and a device geometry as engines allocate it."""
    parts = parts or NOMINAL[kind]
    return (
        host_geometry(kind, parts, layout, num_layers=3, num_pages=2),
        device_geometry(kind, parts, num_layers=3, num_pages=2),
    )


def test_the_table_is_total() -> None:
    """Every kind, layout, io backend and direction has exactly one cell."""
    assert set(TABLE) == set(CELLS)


def test_rejections_have_a_reason() -> None:
    """A cell is a strategy, or says why not in one sentence without a full stop."""
    for cell in TABLE.values():
        assert isinstance(cell, Strategy) or (cell.reason and not cell.reason.endswith("."))


@pytest.mark.parametrize("sizes", [NOMINAL, ODD], ids=["nominal", "odd"])
@pytest.mark.parametrize("cell", CELLS, ids=IDS)
def test_a_rejection_offers_only_what_works(
    cell: tuple[PoolKind, Layout, IoBackend, Direction],
    sizes: dict[PoolKind, tuple[Component, ...]],
) -> None:
    """Every io backend and layout in a refusal resolves, and none that resolves is left out."""
    kind, layout, io_backend, way = cell
    table = Table()
    host, device = pair(kind, layout, sizes[kind])
    if isinstance(table.judge(kind, way, io_backend, host, device), Strategy):
        return
    with pytest.raises(UnsupportedPairError) as caught:
        table.resolve(kind, way, io_backend, host, device)
    error = caught.value
    for name in IoBackend:
        works = isinstance(table.judge(kind, way, name, host, device), Strategy)
        assert works == (name in error.io_backends)
    for other in Layout:
        relaid, _ = pair(kind, other, sizes[kind])
        works = isinstance(table.judge(kind, way, io_backend, relaid, device), Strategy)
        assert works == (other in error.layouts)
    if error.pair is not None:
        relaid, _ = pair(kind, Layout(error.pair[1]), sizes[kind])
        assert table.resolve(kind, way, error.pair[0], relaid, device)
    assert error.io_backends or error.layouts or error.pair
    named = (*error.io_backends, *error.layouts, layout, io_backend)
    assert [word for word in named if f"'{word}'" not in str(error)] == []


TEXTS = {
    (PoolKind.MHA, Layout.PAGE_FIRST, IoBackend.DIRECT, Direction.LOAD): (
        "io_backend 'direct' cannot load layout 'page_first' (mha): one layer of one page is 64 runs "
        "of 2048 bytes, and 'direct' copies one run. Keep 'page_first' and use io_backend "
        "'memcpy_batch', 'kernel', 'staged' or 'cpu'; or keep 'direct' and use layout 'layer_first', "
        "'page_first_direct' or 'page_first_kv_split'."
    ),
    (PoolKind.MHA, Layout.LAYER_FIRST, IoBackend.KERNEL_ASCEND, Direction.BACKUP): (
        "io_backend 'kernel_ascend' cannot back up layout 'layer_first' (mha): it needs an Ascend "
        "driver, and none is registered. Keep 'layer_first' and use io_backend 'direct', "
        "'memcpy_batch', 'kernel', 'staged' or 'cpu'."
    ),
    (PoolKind.MHA, Layout.PAGE_HEAD, IoBackend.MEMCPY_BATCH, Direction.LOAD): (
        "io_backend 'memcpy_batch' cannot load layout 'page_head' (mha): one layer of one page is 512 "
        "runs of 256 bytes, and 'memcpy_batch' takes at most one run per token (64). Keep 'page_head' "
        "and use io_backend 'kernel', 'staged' or 'cpu'; or keep 'memcpy_batch' and use layout "
        "'layer_first', 'page_first', 'page_first_direct' or 'page_first_kv_split'."
    ),
    (PoolKind.MLA, Layout.PAGE_HEAD, IoBackend.KERNEL, Direction.BACKUP): (
        "io_backend 'kernel' cannot back up layout 'page_head' (mla): page_head splits token rows by "
        "head, and an mla row has no heads. Keep 'kernel' and use layout 'layer_first', 'page_first', "
        "'page_first_direct' or 'page_first_kv_split'."
    ),
    (PoolKind.ROWS, Layout.PAGE_FIRST, IoBackend.KERNEL, Direction.LOAD): (
        "io_backend 'kernel' cannot load layout 'page_first' (rows): a row is 1155 bytes, and 'kernel' "
        "moves words of at least 4. Keep 'page_first' and use io_backend 'direct', 'memcpy_batch' or "
        "'cpu'."
    ),
}


@pytest.mark.parametrize("cell", TEXTS, ids=["-".join(cell) for cell in TEXTS])
def test_texts_of_refusals(cell: tuple[PoolKind, Layout, IoBackend, Direction]) -> None:
    """What was asked, why not, what works: one formatter over one table, with every column built."""
    kind, layout, io_backend, way = cell
    parts = (Component("row", 1, 1, 35 * 33, 1),) if kind is PoolKind.ROWS else None
    host, device = pair(kind, layout, parts)
    with pytest.raises(UnsupportedPairError) as caught:
        Table().resolve(kind, way, io_backend, host, device)
    assert str(caught.value) == TEXTS[cell]


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("way", Direction)
def test_rows_go_by_any_io_backend(kind: PoolKind, way: Direction) -> None:
    """Opaque rows are one run in every layout that has a meaning, so all built-in copies take them."""
    if kind not in {PoolKind.ROWS, PoolKind.STATE}:
        return
    layouts = (Layout.LAYER_FIRST, Layout.PAGE_FIRST, Layout.PAGE_FIRST_DIRECT)
    for layout, name in product(layouts, set(IoBackend) - {IoBackend.KERNEL_ASCEND}):
        host, device = pair(kind, layout)
        assert Table().resolve(kind, way, name, host, device)


def test_one_token_pages_make_page_first_direct() -> None:
    """A check looks at sizes and not at names: with one token a page, page_first is one run."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST, (Component("k", 1, 8, 128, 2),))
    found = resolve(PoolKind.MHA, Direction.LOAD, IoBackend.DIRECT, host, device)
    assert found is Strategy.PAGE_RUNS


def test_both_sides_count() -> None:
    """A device pool with heads before tokens cuts a page that is one run on both sides."""
    parts = (Component("k", 64, 8, 128, 2),)
    host, _ = pair(PoolKind.MHA, Layout.PAGE_FIRST_DIRECT, parts)
    device, _ = pair(PoolKind.MHA, Axes("l p h t d"), parts)
    assert host.worst.runs.count == device.worst.runs.count == 1
    with pytest.raises(
        UnsupportedPairError, match="512 runs of 256 bytes in which host and device"
    ):
        resolve(PoolKind.MHA, Direction.LOAD, IoBackend.DIRECT, host, device)
    same, _ = pair(PoolKind.MHA, Axes("p l h t d"), parts)
    assert resolve(PoolKind.MHA, Direction.LOAD, IoBackend.DIRECT, same, device)


UNNAMED = {
    "p l t h d": Strategy.ROW_KERNEL,
    "t p l h d": Strategy.ROW_KERNEL,
    "h p t l d": Strategy.HEAD_KERNEL,
}


@pytest.mark.parametrize("text", UNNAMED)
def test_unnamed_orders_take_the_row_of_the_nearest(text: str) -> None:
    """An order without a name is resolved by its runs, and its label is its axes."""
    host, device = pair(PoolKind.MHA, Axes(text))
    assert host.label == text
    assert Table().resolve(PoolKind.MHA, Direction.LOAD, "kernel", host, device) == UNNAMED[text]


def test_unaligned_starts_are_refused() -> None:
    """Runs of whole words that do not start at words are refused as such."""
    parts = (Component("kv", 4, 1, 5, 2, (("latent", 2), ("rope", 3))),)
    host, device = pair(PoolKind.MLA, Layout.PAGE_FIRST_KV_SPLIT, parts)
    verdict = Table().judge(PoolKind.MLA, Direction.LOAD, IoBackend.KERNEL, host, device)
    assert isinstance(verdict, Rejection)
    assert verdict.reason.startswith("runs start at multiples of 2 bytes, and 'kernel'")


def test_a_device_narrows_what_is_offered() -> None:
    """On host tensors no GPU column is taken or offered; on a GPU the cpu column is not."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    args = (PoolKind.MHA, Direction.LOAD, host, device)
    assert Table(on="cpu").io_backends(*args) == ("cpu",)
    assert Table(on="cuda").io_backends(*args) == ("memcpy_batch", "kernel", "staged")
    with pytest.raises(UnsupportedPairError, match="'kernel' needs a GPU") as caught:
        Table(on="cpu").resolve(PoolKind.MHA, Direction.LOAD, "kernel", host, device)
    assert (caught.value.io_backends, caught.value.layouts) == (("cpu",), ())


def test_kernels_need_a_pinned_host_pool() -> None:
    """What reads host memory in place is refused on pageable memory, and `auto` passes it over."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_HEAD)
    table = Table(on="cuda", pinned=False)
    args = (PoolKind.MHA, Direction.LOAD)
    with pytest.raises(UnsupportedPairError, match="this host pool is not pinned"):
        table.resolve(*args, "kernel", host, device)
    assert table.choose(*args, host, device) is IoBackend.STAGED


def test_auto_prefers_engines_for_long_runs() -> None:
    """`auto` takes the first that passes: copy engines for long runs, kernels for short ones."""
    ways: dict[Layout, list[str]] = {}
    for layout in (Layout.LAYER_FIRST, Layout.PAGE_HEAD):
        host, device = pair(PoolKind.MHA, layout)
        order = auto_order(host, device)
        assert set(order) == set(IoBackend) - {IoBackend.KERNEL_ASCEND}
        ways[layout] = [
            Table(on=on).choose(PoolKind.MHA, Direction.LOAD, host, device).value
            for on in ("cuda", "cpu")
        ]
    assert ways == {
        Layout.LAYER_FIRST: ["memcpy_batch", "cpu"],
        Layout.PAGE_HEAD: ["kernel", "cpu"],
    }


def test_auto_says_when_nothing_copies() -> None:
    """Where no io backend passes, `auto` raises with the layouts that have one."""
    host, device = pair(PoolKind.MLA, Layout.PAGE_HEAD)
    with pytest.raises(UnsupportedPairError) as caught:
        Table().choose(PoolKind.MLA, Direction.LOAD, host, device)
    assert caught.value.io_backend == AUTO
    assert caught.value.reason == (
        "page_head splits token rows by head, and an mla row has no heads"
    )
    assert (caught.value.layouts, caught.value.pair) == (
        ("layer_first", "page_first", "page_first_direct", "page_first_kv_split"),
        None,
    )


def test_registered_columns_decide_for_themselves() -> None:
    """A column function's answer is the cell, and its name is offered by every refusal."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    table = Table(columns={"mine": lambda *_: "my_copies"})
    args = (PoolKind.MHA, Direction.LOAD)
    assert table.resolve(*args, "mine", host, device) == "my_copies"
    with pytest.raises(UnsupportedPairError, match="'staged', 'cpu' or 'mine'; or keep"):
        table.resolve(*args, "direct", host, device)


BROKEN: dict[str, tuple[object, str]] = {
    "raises": (ValueError("no runs"), "its column raised ValueError('no runs')"),
    "nothing": (None, "its column returned None, which is no strategy's name and no Rejection"),
    "an empty name": ("", "its column returned '', which is no strategy's name and no Rejection"),
    "a number": (5, "its column returned 5, which is no strategy's name and no Rejection"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_column_rejects_and_says_why(case: str) -> None:
    """A column that raises, or returns neither a name nor a rejection, is a cell that copies nothing."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    answer, reason = BROKEN[case]

    def column(*_: object) -> str:
        if isinstance(answer, Exception):
            raise answer
        return cast("str", answer)

    table = Table(columns={"mine": column})
    verdict = table.judge(PoolKind.MHA, Direction.LOAD, "mine", host, device)
    assert verdict == Rejection(reason)


def test_a_column_may_reject_in_its_own_words() -> None:
    """What a registered column gives as its reason is the reason."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    table = Table(columns={"mine": lambda *_: Rejection("it is Tuesday")})
    verdict = table.judge(PoolKind.MHA, Direction.LOAD, "mine", host, device)
    assert verdict == Rejection("it is Tuesday")


def test_a_missing_package_is_named() -> None:
    """An io backend whose package is not installed is a rejection that says which, and how to get it."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    table = Table(missing={"kernel": "triton"})
    verdict = table.judge(PoolKind.MHA, Direction.LOAD, "kernel", host, device)
    assert verdict == Rejection("it needs triton, which is not installed (extra 'kernel')")
    assert table.resolve(PoolKind.MHA, Direction.LOAD, "staged", host, device)


@pytest.mark.parametrize(("dims", "worst"), [((8, 6), 6), ((6, 8), 6), ((8, 8), 8)])
def test_the_worst_runs_are_the_shortest_of_as_many(dims: tuple[int, int], worst: int) -> None:
    """Of components that are cut into as many runs the one with the shortest counts, wherever it stands."""
    parts = tuple(Component(name, 4, 2, dim, 2) for name, dim in zip("kv", dims, strict=True))
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST, parts)
    part, runs = worst_runs(matched(host, device))
    assert (part.component.dim, runs.count, runs.nbytes) == (worst, 4, 2 * worst * 2)
    assert host.worst is part


def test_auto_gives_every_reason_once() -> None:
    """Where io backends refuse for reasons of their own, `auto` tells them all."""
    parts = (Component("k", 4, 2, 1, 1),)
    host, device = pair(PoolKind.MHA, Layout.PAGE_HEAD, parts)
    with pytest.raises(UnsupportedPairError) as caught:
        Table(on="cuda").choose(PoolKind.MHA, Direction.LOAD, host, device)
    assert caught.value.reason == (
        "a run is 1 byte, and 'kernel' moves words of at least 4; a run is 1 byte, and 'staged' moves "
        "words of at least 4; one layer of one page is 8 runs of 1 byte, and 'memcpy_batch' takes at "
        "most one run per token (4); 'cpu' copies between host tensors, and the device pool is on a "
        "GPU; one layer of one page is 8 runs of 1 byte, and 'direct' copies one run"
    )


def test_columns_are_asked_with_the_pair_itself() -> None:
    """A registered column sees kind, direction and both geometries as they are."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    asked: list[tuple[object, ...]] = []

    def column(*given: object) -> str:
        asked.append(given)
        return "mine"

    table = Table(columns={"mine": column})
    assert table.judge(PoolKind.MHA, Direction.BACKUP, "mine", host, device) == "mine"
    assert asked == [(PoolKind.MHA, Direction.BACKUP, host, device)]


def test_a_table_without_an_io_backend_refuses_that_one_alone() -> None:
    """For the reason that is given; others, registered ones too, copy as before."""
    host, device = pair(PoolKind.MHA, Layout.LAYER_FIRST, NOMINAL[PoolKind.MHA])
    whole = Table(columns={"mine": lambda *_: "my way"})
    table = whole.without(IoBackend.CPU, Rejection("it is broken"))
    for name in whole.names:
        verdict = table.judge(PoolKind.MHA, Direction.LOAD, name, host, device)
        same = whole.judge(PoolKind.MHA, Direction.LOAD, name, host, device)
        assert verdict == (Rejection("it is broken") if name == IoBackend.CPU else same)


def test_a_pair_that_nothing_copies_offers_nothing() -> None:
    """With every cell rejected there is no io backend, no layout and no pair to offer."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    nothing = Table(cells=dict.fromkeys(TABLE, Rejection("no")))
    error = nothing.refusal(PoolKind.MHA, Direction.LOAD, "cpu", host, device, "no")
    assert (error.io_backends, error.layouts, error.pair) == ((), (), None)


def test_registered_orders_that_fit_are_offered() -> None:
    """An order that lacks an axis is passed over, and the next one is offered by its name."""
    orders = {
        "short": Axes("p d", name="short"),
        "long": Axes("p l t h d", name="long"),
    }
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST)
    offered = Table(orders=orders).layouts(PoolKind.MHA, Direction.LOAD, "cpu", host, device)
    assert "long" in offered
    assert "short" not in offered


@pytest.mark.parametrize(("dim", "engines"), [(LONG_RUN - 1, False), (LONG_RUN, True)])
def test_runs_are_long_from_the_bound_on(dim: int, engines: bool) -> None:
    """A run of exactly the bound goes to a copy engine first."""
    host, device = pair(PoolKind.ROWS, Layout.PAGE_FIRST, (Component("row", 1, 1, dim, 1),))
    assert (auto_order(host, device)[0] is IoBackend.MEMCPY_BATCH) is engines


@pytest.mark.parametrize(("tokens", "copied"), [(1, True), (2, False)])
def test_direct_copies_one_run_and_not_two(tokens: int, copied: bool) -> None:
    """Two runs are as many too many as five hundred."""
    host, device = pair(PoolKind.MHA, Layout.PAGE_FIRST, (Component("k", tokens, 2, 8, 2),))
    verdict = Table().judge(PoolKind.MHA, Direction.LOAD, "direct", host, device)
    assert isinstance(verdict, Rejection) is not copied


@pytest.mark.parametrize(("latent", "copied"), [(2, True), (1, False)])
def test_words_of_four_bytes_are_enough(latent: int, copied: bool) -> None:
    """Runs that start at multiples of four bytes are moved, of two bytes are not."""
    parts = (Component("kv", 4, 1, 2 * latent, 2, (("latent", latent), ("rope", latent))),)
    host, device = pair(PoolKind.MLA, Layout.PAGE_FIRST_KV_SPLIT, parts)
    verdict = Table().judge(PoolKind.MLA, Direction.LOAD, "kernel", host, device)
    assert isinstance(verdict, Rejection) is not copied
