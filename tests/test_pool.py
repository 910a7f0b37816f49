"""Pools: memory, adoption with checked strides, views for copies, and binding (K04, K06, K14)."""

from __future__ import annotations

import resource
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from offload.core.axes import Axes
from offload.core.geometry import matched
from offload.core.kinds import Layout, PoolKind
from offload.errors import GeometryError, OutOfMemoryError, RequestError, UnknownNameError
from offload.pool import BITS, DevicePool, HostPool, Pool, check_pair
from offload.pool_memory import ALIGNMENT, host_memory
from offload.spec import PoolSpec

SPECS = {
    PoolKind.MHA: PoolSpec.mha(
        num_layers=3, page_size=5, num_kv_heads=7, head_dim=11, v_head_dim=13, dtype=torch.float16
    ),
    PoolKind.MLA: PoolSpec.mla(num_layers=3, page_size=5, latent_dim=17, rope_dim=6),
    PoolKind.ROWS: PoolSpec.rows(num_layers=3, page_size=10, row_bytes=13, slot_page_size=2),
    PoolKind.STATE: PoolSpec.state(
        num_layers=3,
        components={"ssm": ((2, 7), torch.float32), "conv": ((11,), torch.bfloat16)},
        ring_size=2,
    ),
}
MLA = PoolSpec.mla(num_layers=4, page_size=4, latent_dim=20, dtype=torch.float16)


def fill(pool: Pool, seed: int) -> None:
    """Give every byte of a pool, padding too, a value drawn from a seed."""
    draw = np.random.default_rng(seed)
    for array in pool.geometry.arrays:
        held = pool.tensors[array.name]
        for layer in range(len(held) if isinstance(held, list) else 1):
            part = next(c for c in pool.geometry.components if c.array == array.name)
            flat, _ = pool.flat(part.name, layer)
            flat.copy_(torch.from_numpy(draw.integers(0, 256, flat.shape[0], np.uint8)))


def page_bytes(pool: Pool, name: str, layer: int, page: int) -> bytes:
    """Return one layer of one page in canonical order, byte by byte through the geometry."""
    flat, part = pool.flat(name, layer)
    raw, item = flat.numpy(), part.component.itemsize
    starts = (
        part.at(layer, page)
        + sum(at * step for at, (_, step) in zip(index, part.axes, strict=True))
        for index in product(*(range(size) for size, _ in part.axes))
    )
    return b"".join(raw[at : at + item].tobytes() for at in starts)


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("page_align", [None, 64])
def test_views_and_offsets_agree(kind: PoolKind, layout: Layout, page_align: int | None) -> None:
    """A canonical view holds, for every page and layer, the bytes that the offsets point at."""
    if page_align and layout is Layout.LAYER_FIRST:
        return
    device = DevicePool.allocate(SPECS[kind], num_pages=2)
    host = HostPool.like(device, num_pages=2, layout=layout, page_align=page_align)
    fill(host, 1)
    fill(device, 2)
    for ours, theirs in matched(host.geometry, device.geometry):
        for pool, layer, page in product((host, device), range(3), range(2)):
            view = pool.view(ours.name, layer)
            assert view.shape == device.view(theirs.name, layer).shape
            assert view.dtype == BITS[ours.component.itemsize]
            seen = view[page].contiguous().numpy().tobytes()
            assert seen == page_bytes(pool, ours.name, layer, page)


@pytest.mark.parametrize("kind", PoolKind)
def test_tensors_and_views_share_memory(kind: PoolKind) -> None:
    """What a model writes into a device tensor is what a copy reads, in token order."""
    device = DevicePool.allocate(SPECS[kind], num_pages=2)
    for made in SPECS[kind].components:
        held = device.tensors[made.name]
        tensor = held[1]
        tensor.view(-1).view(BITS[made.dtype.itemsize])[:] = torch.arange(tensor.numel()).to(
            BITS[made.dtype.itemsize]
        )
        view = device.view(made.name, 1)
        assert torch.equal(view.reshape(-1), tensor.reshape(-1).view(view.dtype))
        assert device.view(made.name, 1) is view


SHAPES = {
    PoolKind.MHA: {"k": (10, 7, 11), "v": (10, 7, 13)},
    PoolKind.MLA: {"kv": (10, 1, 17)},
    PoolKind.ROWS: {"row": (10, 13)},
    PoolKind.STATE: {"ssm": (4, 2, 7), "conv": (4, 11)},
}


@pytest.mark.parametrize("kind", PoolKind)
def test_device_tensors_have_the_engines_shape(kind: PoolKind) -> None:
    """A device pool has one tensor per layer and component, by token slots."""
    device = DevicePool.allocate(SPECS[kind], num_pages=2)
    found = {name: tuple(held[0].shape) for name, held in device.tensors.items()}
    assert found == SHAPES[kind]
    assert device.nbytes == 2 * SPECS[kind].page_bytes


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("layout", Layout)
def test_host_pools_are_aligned_packed_and_adoptable(kind: PoolKind, layout: Layout) -> None:
    """A host pool starts at 4096, takes no more than its pages, and is read back from its tensors."""
    spec = SPECS[kind]
    host = HostPool.allocate(spec, num_pages=3, layout=layout, pinned=False)
    for held in host.tensors.values():
        assert isinstance(held, torch.Tensor)
        assert held.data_ptr() % ALIGNMENT == 0
    assert (host.nbytes, host.page_stride) == (3 * spec.page_bytes, spec.page_bytes)
    adopted = HostPool.adopt(spec, host.tensors, layout=layout)
    assert adopted.geometry == host.geometry


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("page_align", [None, 4096])
def test_page_memory_is_the_page(kind: PoolKind, layout: Layout, page_align: int | None) -> None:
    """The ranges of a page cover its bytes once, and those of different pages do not meet."""
    if page_align and layout is Layout.LAYER_FIRST:
        return
    host = HostPool.allocate(SPECS[kind], num_pages=3, layout=layout, page_align=page_align)
    spans = [(page, *span) for page in range(3) for span in host.page_memory(page)]
    for page in range(3):
        assert sum(n for at, _, n in spans if at == page) == SPECS[kind].page_bytes
    ordered = sorted((start, start + nbytes) for _, start, nbytes in spans)
    ends = [end for _, end in ordered]
    assert all(start >= end for (start, _), end in zip(ordered[1:], ends, strict=False))
    if page_align:
        assert {start % 4096 for _, start, _ in spans} == {0}
        assert host.page_stride == 4096 * len(host.geometry.components)


def test_k_only() -> None:
    """With v_head_dim=0 there is no v."""
    spec = PoolSpec.mha(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, v_head_dim=0)
    device = DevicePool.allocate(spec, num_pages=3)
    assert device.geometry.names == ("k",)
    assert HostPool.like(device, num_pages=3).nbytes == 2 * 3 * 4 * 2 * 8 * 2


ENGINES = {
    "p t h d": (4, 5, 7, 11),
    "pt h d": (20, 7, 11),
    "p h t d": (4, 7, 5, 11),
    "p h d t": (4, 7, 11, 5),
    "l pt h d": (3, 20, 7, 11),
    "p l t h d": (4, 3, 5, 7, 11),
    "2 p t h d": (2, 4, 5, 7, 11),
    "p 2 t h d": (4, 2, 5, 7, 11),
    "p 2 h t d": (4, 2, 7, 5, 11),
    "l 2 p t h d": (3, 2, 4, 5, 7, 11),
}
SYMMETRIC = PoolSpec.mha(
    num_layers=3, page_size=5, num_kv_heads=7, head_dim=11, dtype=torch.float16
)


@pytest.mark.parametrize("axes", ENGINES)
def test_engine_tensors_in_any_order(axes: str) -> None:
    """A value written through the engine's own indices is found at its page, token, head and dim."""
    letters = axes.replace(" ", "")
    tensors: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    for name in ["kv"] if "2" in axes else ["k", "v"]:
        count = 1 if "l" in axes else 3
        made = [torch.zeros(ENGINES[axes], dtype=torch.float16) for _ in range(count)]
        tensors[name] = made[0] if "l" in axes else made
    pool = DevicePool.adopt(SYMMETRIC, tensors, axes=axes)
    assert pool.num_pages == 4
    where = {"p": 2, "l": 1, "t": 3, "h": 6, "d": 10, "2": 1}
    held = tensors["kv" if "2" in axes else "v"]
    tensor = held[1] if isinstance(held, list) else held
    index = [where[x] for x in letters]
    if "pt" in axes:
        at = letters.index("p")
        index[at : at + 2] = [where["p"] * 5 + where["t"]]
    tensor[tuple(index)] = 1.0
    expected = torch.zeros(4, 5, 7, 11, dtype=torch.float16)
    expected[2, 3, 6, 10] = 1.0
    assert torch.equal(pool.view("v", 1).view(torch.float16), expected)
    assert not pool.view("v", 0).any()
    assert not pool.view("k", 1).any()


def test_strided_rows_are_adopted() -> None:
    """Token rows with a gap between them are read with their own strides, and the gap is not ours."""
    wide = [torch.zeros(20, 7, 16, dtype=torch.float16) for _ in range(6)]
    pool = DevicePool.adopt(
        SYMMETRIC, {"k": [w[..., :11] for w in wide[:3]], "v": [w[..., 3:14] for w in wide[3:]]}
    )
    pool.view("v", 2).fill_(-1)
    assert int((wide[5] != 0).sum()) == 20 * 7 * 11
    assert not wide[5][..., :3].any()
    assert pool.geometry.worst.runs.count == 35


def test_state_tensors_in_the_engines_shape() -> None:
    """States are adopted by slots or by (page, ring), with their own trailing shape."""
    spec = SPECS[PoolKind.STATE]
    for lead in ((6,), (3, 2)):
        tensors = {
            "ssm": [torch.zeros(*lead, 2, 7) for _ in range(3)],
            "conv": torch.zeros(3, *lead, 11, dtype=torch.bfloat16).unbind(0),
        }
        pool = DevicePool.adopt(spec, {**tensors, "conv": list(tensors["conv"])})
        assert pool.num_pages == 3
        assert pool.view("ssm", 0).shape == (3, 2, 1, 14)


def test_mla_halves_are_adopted_apart() -> None:
    """An engine that stores latent and rope apart hands over both."""
    spec = SPECS[PoolKind.MLA]
    dtype = torch.bfloat16
    pool = DevicePool.adopt(
        spec,
        {
            "latent": [torch.zeros(10, 11, dtype=dtype) for _ in range(3)],
            "rope": [torch.zeros(10, 6, dtype=dtype) for _ in range(3)],
        },
    )
    host = HostPool.like(pool, num_pages=2, layout="page_first_kv_split")
    check_pair(pool, host)
    assert [(a.name, a.adjacent, b.adjacent) for a, b in matched(host.geometry, pool.geometry)] == [
        ("latent", False, True),
        ("rope", False, True),
    ]


def half(*shape: int) -> torch.Tensor:
    """Return zeros of 2 bytes."""
    return torch.zeros(shape, dtype=torch.float16)


BAD_DEVICE = {
    "a component is missing": (
        {"k": [half(20, 7, 11)] * 3},
        None,
        "components are k, expected k, v",
    ),
    "one tensor for both, by layer": (
        {"kv": [half(20, 2, 7, 11)] * 3},
        None,
        "components are kv, expected k, v. Or pass axes with a '2', such as 'p t 2 h d'",
    ),
    "one tensor for both and all layers": (
        {"kv": half(3, 20, 2, 7, 11)},
        None,
        "such as 'l p t 2 h d'",
    ),
    "a layer is missing": (
        {"k": [half(20, 7, 11)] * 2, "v": [half(20, 7, 11)] * 3},
        None,
        "tensors are 2, expected 3",
    ),
    "another dtype": (
        {"k": [torch.zeros(20, 7, 11)] * 3, "v": [half(20, 7, 11)] * 3},
        None,
        "dtype is torch.float32, expected torch.float16",
    ),
    "another width": (
        {"k": [half(20, 7, 12)] * 3, "v": [half(20, 7, 11)] * 3},
        None,
        "\\(4 pages\\): shape is \\(20, 7, 12\\), expected \\(20, 7, 11\\)",
    ),
    "another number of pages": (
        {"k": [half(20, 7, 11)] * 3, "v": [half(25, 7, 11)] * 3},
        None,
        "shape is \\(25, 7, 11\\), expected \\(20, 7, 11\\)",
    ),
    "a width that fits another number of pages": (
        {"k": [half(20, 7, 22)] * 3, "v": [half(20, 7, 11)] * 3},
        None,
        "\\(4 pages\\): shape is \\(20, 7, 22\\), expected \\(20, 7, 11\\)",
    ),
    "tokens that are no whole pages": (
        {"k": [half(22, 7, 11)] * 3, "v": [half(22, 7, 11)] * 3},
        None,
        "array 'k' with axes 'pt h d': tokens are 22, expected a multiple of 5, the page size",
    ),
    "no whole pages and another width": (
        {"k": [half(22, 7, 12)] * 3, "v": [half(22, 7, 12)] * 3},
        None,
        "shape is \\(22, 7, 12\\), expected \\(a multiple of 5, 7, 11\\)",
    ),
    "a numpy array": (
        {"k": [np.zeros((20, 7, 11), np.float16)] * 3, "v": [half(20, 7, 11)] * 3},
        None,
        "array 'k': type is list with ndarray, expected a tensor or a list of tensors",
    ),
    "a list in place of a mapping": (
        [half(20, 7, 11)] * 3,
        None,
        "adopted tensors: type is list, expected a mapping such as {'k': \\[...\\], 'v': \\[...\\]}",
    ),
    "layers that differ": (
        {"k": [half(20, 7, 11), half(15, 7, 11), half(20, 7, 11)], "v": [half(20, 7, 11)] * 3},
        None,
        "one shape, stride and dtype",
    ),
    "shared rows": (
        {"k": [half(1, 7, 11).expand(20, 7, 11)] * 3, "v": [half(20, 7, 11)] * 3},
        None,
        "share a byte",
    ),
    "two arrays for one": (
        {"k": [half(2, 4, 5, 7, 11)] * 3, "v": [half(2, 4, 5, 7, 11)] * 3},
        "2 p t h d",
        "as axes have a '2'",
    ),
    "wrong axes": (
        {"k": [half(4, 5, 7, 11)] * 3, "v": [half(4, 5, 7, 11)] * 3},
        "p h t d",
        "shape",
    ),
}


@pytest.mark.parametrize(("tensors", "axes", "said"), BAD_DEVICE.values(), ids=BAD_DEVICE.keys())
def test_wrong_tensors_are_refused(
    tensors: dict[str, list[torch.Tensor]], axes: str | None, said: str
) -> None:
    """Tensors that are not what the spec says raise when they are adopted, with both values."""
    with pytest.raises(GeometryError, match=said):
        DevicePool.adopt(SYMMETRIC, tensors, axes=axes)


def test_a_misdeclared_layout_is_recognised() -> None:
    """A tensor of the right size in another order is refused, and its order is named."""
    spec = PoolSpec.mla(num_layers=3, page_size=5, latent_dim=17)
    tensors = HostPool.allocate(spec, num_pages=2, layout="layer_first").tensors
    with pytest.raises(GeometryError) as caught:
        HostPool.adopt(spec, tensors, layout="page_first")
    assert str(caught.value) == (
        "host pool 'kv' is declared 'page_first', shape (10, 3, 1, 17), but its tensor has shape "
        "(3, 10, 1, 17), which is 'layer_first'. Both need 1020 bytes, so copies would run and read "
        "other layers' bytes. Pass layout='layer_first', or allocate with "
        "HostPool.allocate(layout='page_first')."
    )
    assert (caught.value.expected, caught.value.got) == (
        {"shape": (10, 3, 1, 17)},
        {"shape": (3, 10, 1, 17)},
    )


def test_a_permuted_view_is_refused() -> None:
    """The right shape over another order's memory is refused by its strides."""
    spec = PoolSpec.mla(num_layers=3, page_size=5, latent_dim=17)
    held = HostPool.allocate(spec, num_pages=2, layout="layer_first").tensors["kv"]
    assert isinstance(held, torch.Tensor)
    with pytest.raises(GeometryError, match="byte stride of l is 340, expected 34"):
        HostPool.adopt(spec, {"kv": held.transpose(0, 1)}, layout="page_first")
    pool = HostPool.adopt(spec, {"kv": held.transpose(0, 1)}, axes="pt l h d")
    assert pool.geometry.worst.runs.count == 1


def test_padded_host_pools_are_adopted() -> None:
    """The page stride of a declared layout may be longer than the page."""
    spec = SPECS[PoolKind.MHA]
    host = HostPool.allocate(spec, num_pages=3, layout="page_head", page_align=4096)
    adopted = HostPool.adopt(spec, host.tensors, layout="page_head")
    assert adopted.page_stride == host.page_stride == 8192


def test_an_order_without_a_name() -> None:
    """A host pool may have any axis order, also with one tensor per layer."""
    device = DevicePool.allocate(SYMMETRIC, num_pages=2)
    for axes in ("t l p h d", "p h t d"):
        host = HostPool.allocate(SYMMETRIC, num_pages=2, axes=axes)
        check_pair(device, host)
        assert host.geometry.label == axes
        assert host.view("k", 2).shape == (2, 5, 7, 11)


def test_unknown_layouts_are_refused() -> None:
    """A misspelt layout raises where it is given."""
    with pytest.raises(UnknownNameError, match="did you mean 'page_first'"):
        HostPool.allocate(MLA, num_pages=1, layout="page_frist")


BAD_SPECS: dict[str, Callable[[], object]] = {
    "page_size": lambda: PoolSpec.mha(num_layers=1, page_size=0, num_kv_heads=1, head_dim=1),
    "num_layers": lambda: PoolSpec.rows(num_layers=-1, page_size=1, row_bytes=1),
    "head_dim": lambda: PoolSpec.mha(num_layers=1, page_size=1, num_kv_heads=1, head_dim=1.5),  # type: ignore[arg-type]
    "v_head_dim": lambda: PoolSpec.mha(
        num_layers=1, page_size=1, num_kv_heads=1, head_dim=1, v_head_dim=-1
    ),
    "rope_dim": lambda: PoolSpec.mla(num_layers=1, page_size=1, latent_dim=4, rope_dim=4),
    "slot_page_size": lambda: PoolSpec.rows(
        num_layers=1, page_size=6, row_bytes=1, slot_page_size=4
    ),
    "components": lambda: PoolSpec.state(num_layers=1, components={}),
    "shape": lambda: PoolSpec.state(num_layers=1, components={"s": ((0,), torch.int8)}),
    "dtype": lambda: PoolSpec.mla(num_layers=1, page_size=1, latent_dim=4, dtype="f16"),  # type: ignore[arg-type]
    "layer_names": lambda: PoolSpec.mla(
        num_layers=2, page_size=1, latent_dim=4, layer_names=["a", "a"]
    ),
    "num_pages": lambda: DevicePool.allocate(MLA, num_pages=0),
    "page_align": lambda: HostPool.allocate(MLA, num_pages=1, page_align=-1),
}


@pytest.mark.parametrize("field", BAD_SPECS)
def test_wrong_sizes_are_refused(field: str) -> None:
    """A size that cannot be raises, naming the field, what it is and what it may be."""
    with pytest.raises(GeometryError) as caught:
        BAD_SPECS[field]()
    assert field in caught.value.expected
    assert field in caught.value.got


def test_layers_have_names() -> None:
    """A layer is taken by index or by name; others raise."""
    spec = PoolSpec.rows(num_layers=2, page_size=1, row_bytes=1, layer_names=["full", "swa"])
    pool = DevicePool.allocate(spec, num_pages=1)
    assert [pool.layer_index(x) for x in ("swa", 0, 1)] == [1, 0, 1]
    with pytest.raises(UnknownNameError, match="did you mean 'swa'"):
        pool.layer_index("sva")
    for outside in (-1, 2):
        with pytest.raises(RequestError, match=r"layers 0 to 1\."):
            pool.layer_index(outside)


def test_binding_reports_both_widths() -> None:
    """A host pool of plain rows does not fit device rows with packed extras (K04)."""
    device = DevicePool.allocate(MLA, num_pages=8)
    plain = PoolSpec.mla(num_layers=4, page_size=4, latent_dim=16, dtype=torch.float16)
    with pytest.raises(GeometryError) as caught:
        check_pair(device, HostPool.allocate(plain, num_pages=8))
    assert "kv row is 32 bytes (1 x 16 elements), expected 40 bytes (1 x 20 elements)" in str(
        caught.value
    )
    host = HostPool.like(device, num_pages=8)
    check_pair(device, host)
    assert (host.page_stride, host.nbytes) == (640, 5_120)


def test_binding_reports_everything() -> None:
    """All differences are in one error."""
    device = DevicePool.allocate(SPECS[PoolKind.MHA], num_pages=1)
    other = PoolSpec.mha(
        num_layers=2, page_size=4, num_kv_heads=7, head_dim=11, dtype=torch.bfloat16
    )
    with pytest.raises(GeometryError) as caught:
        check_pair(device, HostPool.allocate(other, num_pages=1))
    names = {"num_layers", "page_size", "k rows per page", "k dtype", "v rows per page", "v dtype"}
    assert set(caught.value.expected) == names | {"v row"}


def test_split_halves_must_agree() -> None:
    """Where one side stores the halves apart, their widths must be the other side's."""
    specs = [
        PoolSpec.mla(num_layers=1, page_size=4, latent_dim=16, rope_dim=rope) for rope in (4, 0)
    ]
    device = DevicePool.allocate(specs[1], num_pages=1)
    with pytest.raises(GeometryError, match="kv pieces is latent 12, rope 4, expected none"):
        check_pair(device, HostPool.allocate(specs[0], num_pages=1, layout="page_first_kv_split"))
    check_pair(device, HostPool.allocate(specs[0], num_pages=1, layout="page_first"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_moved_as_bits(dtype: torch.dtype) -> None:
    """All 256 patterns of an fp8 pool survive a trip through a uint8 host pool (K06)."""
    spec, raw = (
        PoolSpec.mla(num_layers=1, page_size=16, latent_dim=16, dtype=each)
        for each in (dtype, torch.uint8)
    )
    device = DevicePool.allocate(spec, num_pages=1)
    host = HostPool.allocate(raw, num_pages=1, layout="page_first")
    check_pair(device, host)
    patterns = torch.arange(256).to(torch.uint8).view(1, 16, 1, 16)
    device.tensors["kv"][0].view(torch.uint8).copy_(patterns.view(16, 1, 16))
    host.view("kv", 0).copy_(device.view("kv", 0))
    device.view("kv", 0).zero_()
    device.view("kv", 0).copy_(host.view("kv", 0))
    assert torch.equal(device.tensors["kv"][0].view(torch.uint8).view(1, 16, 1, 16), patterns)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.int16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float32, torch.int32),
    ],
    ids=str,
)
def test_other_dtypes_do_not_bind(ours: torch.dtype, theirs: torch.dtype) -> None:
    """Numbers of one width and two meanings are refused at binding (K06)."""
    one, other = (
        PoolSpec.mla(num_layers=1, page_size=4, latent_dim=16, dtype=each)
        for each in (ours, theirs)
    )
    device = DevicePool.allocate(one, num_pages=1)
    with pytest.raises(GeometryError, match=f"kv dtype is {theirs}, expected {ours}"):
        check_pair(device, HostPool.allocate(other, num_pages=1))


def test_a_huge_pool_is_lazy_and_addressed_beyond_two_to_the_31() -> None:
    """A pool of 2.4 GB takes only the pages that are touched, right up to its last row (K14)."""
    spec = PoolSpec.mla(num_layers=1, page_size=4, latent_dim=2_304, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = HostPool.allocate(spec, num_pages=262_144, layout="page_first", pinned=False)
    assert host.nbytes == 2_415_919_104
    view = host.view("kv", 0)
    last, past = 262_143, 932_068 // 4
    for page, value in ((last, 7), (past, 9)):
        view[page].fill_(value)
        flat, part = host.flat("kv", 0)
        start = part.at(0, page)
        assert set(flat[start : start + part.nbytes].tolist()) == {value}
    wrapped = (last * 4 + 3) * 2_304 + 2**31 - 2**32
    for page in (0, 1, abs(wrapped) // (4 * 2_304), past - 1, last - 1):
        assert not view[page].any()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024


def test_host_memory_is_aligned_and_zero() -> None:
    """Raw host memory starts at 4096 and reads as zero, whatever its size."""
    for nbytes in (1, 4095, 4097):
        block = host_memory(nbytes)
        assert block.shape == (nbytes,)
        assert block.data_ptr() % ALIGNMENT == 0
        assert not block.any()


def test_pools_describe_themselves() -> None:
    """The repr has kind, layout and sizes, and no data."""
    host = HostPool.allocate(MLA, num_pages=8, layout="page_first", pinned=False)
    assert repr(host) == "<HostPool mla 'page_first', 8 pages x 4 layers, 5120 bytes, cpu>"


def test_each_pool_has_its_own_pages() -> None:
    """Every pool comes with an allocator of its pages."""
    host = HostPool.allocate(MLA, num_pages=8)
    assert sorted(host.pages.alloc(8).tolist()) == list(range(8))


def test_a_host_pool_needs_one_order() -> None:
    """A pool is made or adopted by a layout or by axes; with both, or none to adopt by, it is refused."""
    held = HostPool.allocate(SYMMETRIC, num_pages=2, layout="page_first").tensors
    with pytest.raises(GeometryError, match="order is neither, expected one of layout= and axes="):
        HostPool.adopt(SYMMETRIC, held)
    with pytest.raises(GeometryError, match="order is layout='page_first' and axes='pt l h d'"):
        HostPool.adopt(SYMMETRIC, held, layout="page_first", axes="pt l h d")
    with pytest.raises(
        GeometryError, match=r"HostPool\.allocate: order is layout='page_first' and"
    ):
        HostPool.allocate(SYMMETRIC, num_pages=2, layout="page_first", axes="pt l h d")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("p x h d", "letter 'x' is unknown, expected one of 'p l 2 t h d'"),
        ("p t h", "letter 'd' is missing, expected once"),
        ("p t t d", "letter 't' is there 2 times, expected once"),
        ("", "letter 'p' is missing, expected once; letter 'd' is missing, expected once"),
    ],
)
def test_wrong_axes_name_the_letter(axes: str, said: str) -> None:
    """Axes that cannot be read name every letter that is wrong, and how."""
    with pytest.raises(GeometryError, match=said):
        Axes(axes)


HUGE = 10**15


@pytest.mark.parametrize("pages", [10**11, HUGE])
@pytest.mark.parametrize("pool", [DevicePool, HostPool])
def test_a_pool_that_memory_does_not_hold_says_how_many_bytes_it_takes(
    pool: type[DevicePool | HostPool], pages: int
) -> None:
    """Too many pages are a MemoryError of ours that names the bytes, however far beyond."""
    spec = PoolSpec.mha(num_layers=2, page_size=16, num_kv_heads=8, head_dim=128)
    with pytest.raises(MemoryError, match=f"{pages * spec.page_bytes} bytes") as caught:
        pool.allocate(spec, num_pages=pages)
    assert isinstance(caught.value, OutOfMemoryError)


@pytest.mark.parametrize("device", ["cuda:77", "banana"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    """Whatever torch raises for it, the caller hears which device, and what works."""
    spec = PoolSpec.rows(num_layers=1, page_size=1, row_bytes=8)
    with pytest.raises(RequestError, match=f"device '{device}' cannot be used here: .*'cpu'"):
        DevicePool.allocate(spec, num_pages=1, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinned_memory_needs_cuda() -> None:
    """Without the CUDA driver, asking for page-locked memory is refused."""
    spec = PoolSpec.rows(num_layers=1, page_size=1, row_bytes=8)
    with pytest.raises(RequestError, match="pinned=True needs the CUDA driver"):
        HostPool.allocate(spec, num_pages=1, pinned=True)
