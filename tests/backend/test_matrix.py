"""Every cell of the strategy table: it copies byte for byte as the oracle does, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from offload.backend import make_backend
from offload.backend.base import POISON, Backend, LayerWork, Prepared
from offload.backend.cpu_ways import ByRuns, Gather, Relay, Scatter, Way, choose
from offload.core.kinds import Direction, IoBackend, Layout, PoolKind
from offload.core.layout import device_geometry, host_geometry
from offload.core.plan import Runs, coalesce
from offload.core.strategy import resolve
from offload.core.table import TABLE, Rejection
from offload.errors import UnknownNameError, UnsupportedPairError
from offload.pool import DevicePool, HostPool, Pool
from offload.spec import PoolSpec
from tests import oracle

DEVICE_PAGES, HOST_PAGES, LAYERS = 7, 11, 3

SPECS: dict[str, PoolSpec] = {
    "mha": PoolSpec.mha(num_layers=LAYERS, page_size=5, num_kv_heads=2, head_dim=8, v_head_dim=6),
    "mha_odd": PoolSpec.mha(
        num_layers=LAYERS, page_size=3, num_kv_heads=5, head_dim=7, dtype=torch.uint8
    ),
    "mha_k_only": PoolSpec.mha(
        num_layers=LAYERS,
        page_size=4,
        num_kv_heads=2,
        head_dim=4,
        v_head_dim=0,
        dtype=torch.float32,
    ),
    "mha_fp8": PoolSpec.mha(
        num_layers=LAYERS, page_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn
    ),
    "mla": PoolSpec.mla(num_layers=LAYERS, page_size=4, latent_dim=36, rope_dim=4),
    "mla_packed": PoolSpec.mla(num_layers=LAYERS, page_size=2, latent_dim=656, dtype=torch.uint8),
    "mla_fp8": PoolSpec.mla(
        num_layers=LAYERS, page_size=2, latent_dim=576, rope_dim=64, dtype=torch.float8_e5m2
    ),
    "rows": PoolSpec.rows(num_layers=LAYERS, page_size=8, row_bytes=132),
    "rows_shared": PoolSpec.rows(num_layers=LAYERS, page_size=8, row_bytes=33, slot_page_size=4),
    "state": PoolSpec.state(
        num_layers=LAYERS,
        components={"ssm": ((2, 3), torch.float32), "conv": ((3, 5), torch.bfloat16)},
        ring_size=2,
    ),
}
"""At least one of every kind; odd sizes, so that no axis can pass for another."""

ON_CPU = (IoBackend.DIRECT, IoBackend.CPU)


def pools(
    name: str, layout: Layout, *, page_align: int | None = None
) -> tuple[DevicePool, HostPool]:
    """Return two pools full of bytes that depend on the position alone."""
    spec = SPECS[name]
    device = DevicePool.allocate(spec, num_pages=DEVICE_PAGES)
    host = HostPool.allocate(
        spec, num_pages=HOST_PAGES, layout=layout, pinned=False, page_align=page_align
    )
    oracle.fill(device, 1)
    oracle.fill(host, 2)
    return device, host


def runs_of(pairs: list[tuple[int, int]]) -> Runs:
    source, destination = np.array(pairs, np.int64).reshape(-1, 2).T
    return coalesce(source.copy(), destination.copy())


def page_sets(direction: Direction) -> list[list[tuple[int, int]]]:
    """Return (source, destination) pairs: none, one, a run, whole pools, repeats, random ones."""
    sizes = (HOST_PAGES, DEVICE_PAGES)
    there, here = sizes if direction is Direction.LOAD else sizes[::-1]
    draw = random.Random(5)
    last = min(there, here)
    scattered = [
        list(zip(draw.choices(range(there), k=n), draw.sample(range(here), n), strict=True))
        for n in (2, 4, 6)
    ]
    return [
        [],
        [(there - 1, here - 1)],
        [(1, 2), (2, 3), (3, 4)],
        [(page, page) for page in range(last)],
        [(page, last - 1 - page) for page in range(last)],
        [(0, 0), (0, 1), (1, 3), (2, 4)],
        *scattered,
    ]


def check(
    backend: Backend,
    make: Callable[[], tuple[DevicePool, HostPool]],
    direction: Direction,
    pairs: list[tuple[int, int]],
) -> None:
    """Copy layers out of order with a backend and with the oracle, and compare all bytes of both pools."""
    device, host = make()
    device_wanted, host_wanted = make()
    prepared = backend.prepare(device, host, direction, runs_of(pairs))
    for layer in (2, 0):
        prepared.copy(layer)
        assert prepared.nbytes(layer) == len(pairs) * device.spec.layer_bytes
        sides: tuple[Pool, Pool] = (host_wanted, device_wanted)
        source, destination = sides if direction is Direction.LOAD else sides[::-1]
        oracle.copy(source, destination, pairs, [layer])
    assert oracle.same_bytes(device, device_wanted)
    assert oracle.same_bytes(host, host_wanted)


@cache
def supported(name: str, layout: Layout, io_backend: IoBackend, direction: Direction) -> bool:
    """Return what `resolve` says of this pair: the table's cell, and the checks of its sizes."""
    spec = SPECS[name]
    host = host_geometry(spec.kind, spec.parts, layout, num_layers=LAYERS, num_pages=HOST_PAGES)
    device = device_geometry(spec.kind, spec.parts, num_layers=LAYERS, num_pages=DEVICE_PAGES)
    try:
        resolve(spec.kind, direction, io_backend, host, device)
    except UnsupportedPairError:
        return False
    return True


CELLS = [
    pytest.param(
        name, layout, io_backend, direction, id=f"{name}-{layout}-{io_backend}-{direction}"
    )
    for name in SPECS
    for layout in Layout
    for io_backend in ON_CPU
    for direction in Direction
    if supported(name, layout, io_backend, direction)
]


def test_the_specs_cover_every_kind() -> None:
    """No kind of pool is left out of the matrix."""
    assert {spec.kind for spec in SPECS.values()} == set(PoolKind)


@pytest.mark.parametrize(("name", "layout", "io_backend", "direction"), CELLS)
def test_a_supported_cell_copies_as_the_oracle_does(
    name: str, layout: Layout, io_backend: IoBackend, direction: Direction
) -> None:
    """Asked bytes arrive, and every other byte of both pools stays, whichever pages are named."""
    device, host = pools(name, layout)
    resolve(device.spec.kind, direction, io_backend, host.geometry, device.geometry)
    backend = make_backend(io_backend)
    for pairs in page_sets(direction):
        check(backend, lambda: pools(name, layout), direction, pairs)


@pytest.mark.parametrize(("name", "layout", "io_backend", "direction"), CELLS)
def test_a_round_trip_restores_the_device(
    name: str, layout: Layout, io_backend: IoBackend, direction: Direction
) -> None:
    """Back up, poison, load into other pages: the bytes are those that were backed up."""
    if not supported(
        name,
        layout,
        io_backend,
        Direction.BACKUP if direction is Direction.LOAD else Direction.LOAD,
    ):
        return
    device, host = pools(name, layout)
    saved = DevicePool.allocate(device.spec, num_pages=DEVICE_PAGES)
    oracle.copy(device, saved, [(0, 4), (1, 6), (2, 5)], range(LAYERS))
    backend = make_backend(io_backend)
    backup = backend.prepare(device, host, Direction.BACKUP, runs_of([(0, 9), (1, 3), (2, 4)]))
    load = backend.prepare(device, host, Direction.LOAD, runs_of([(9, 4), (3, 6), (4, 5)]))
    for layer in range(LAYERS):
        backup.copy(layer)
        load.poison(layer)
        load.copy(layer)
    again = DevicePool.allocate(device.spec, num_pages=DEVICE_PAGES)
    oracle.copy(device, again, [(4, 4), (6, 6), (5, 5)], range(LAYERS))
    assert oracle.same_bytes(saved, again)


@pytest.mark.parametrize(
    ("name", "layout", "io_backend"),
    [
        pytest.param(name, layout, io_backend, id=f"{name}-{layout}-{io_backend}")
        for name in SPECS
        for layout in (Layout.PAGE_FIRST, Layout.PAGE_FIRST_DIRECT, Layout.PAGE_HEAD)
        for io_backend in ON_CPU
        if supported(name, layout, io_backend, Direction.LOAD)
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_padding_between_pages_is_left_alone(
    name: str, layout: Layout, io_backend: IoBackend, direction: Direction
) -> None:
    """With a padded page stride, the bytes between two pages keep what they held."""
    backend = make_backend(io_backend)
    for pairs in page_sets(direction)[2:5]:
        check(backend, lambda: pools(name, layout, page_align=4096), direction, pairs)


REJECTED = [
    pytest.param(
        name, layout, io_backend, direction, id=f"{name}-{layout}-{io_backend}-{direction}"
    )
    for name in SPECS
    for layout in Layout
    for io_backend in IoBackend
    for direction in Direction
    if not supported(name, layout, io_backend, direction)
]


@pytest.mark.parametrize(("name", "layout", "io_backend", "direction"), REJECTED)
def test_a_rejected_cell_is_refused_with_its_reason(
    name: str, layout: Layout, io_backend: IoBackend, direction: Direction
) -> None:
    """What the table rejects raises, says why, and offers only what the table accepts."""
    device, host = pools(name, layout)
    kind = device.spec.kind
    with pytest.raises(UnsupportedPairError) as caught:
        resolve(kind, direction, io_backend, host.geometry, device.geometry)
    assert caught.value.reason
    for other in caught.value.io_backends:
        resolve(kind, direction, IoBackend(other), host.geometry, device.geometry)
    for better in caught.value.layouts:
        there = HostPool.allocate(device.spec, num_pages=2, layout=better, pinned=False)
        resolve(kind, direction, io_backend, there.geometry, device.geometry)


def test_the_number_of_cells_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell is supported or rejected, and none that runs on a CPU is left out."""
    kinds: dict[str, int] = {"copied": 0, "refused": 0}
    for cell in TABLE.values():
        kinds["refused" if isinstance(cell, Rejection) else "copied"] += 1
    assert sum(kinds.values()) == len(PoolKind) * len(Layout) * len(IoBackend) * len(Direction)
    with capsys.disabled():
        print(
            f"\ntable: {len(TABLE)} cells, {kinds['copied']} with a strategy, {kinds['refused']} "
            f"rejected; at the sizes of {len(SPECS)} pools: {len(CELLS)} run here on the CPU, "
            f"{len(REJECTED)} are refused"
        )


WAYS: dict[str, type[Way]] = {"RUN": ByRuns, "GATHER": Gather, "SCATTER": Scatter, "RELAY": Relay}
"""By what the constants of their costs are called."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", ["mha", "mla"])
@pytest.mark.parametrize("direction", Direction)
def test_every_way_of_the_cpu_backend_copies_the_same(
    way: str, layout: Layout, name: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the four ways is chosen is a matter of speed alone."""
    if not supported(name, layout, IoBackend.CPU, direction):
        return
    for each in WAYS:
        price = 0.0 if each == way else 1.0
        monkeypatch.setattr(f"offload.backend.cpu_ways._{each}_CALL", price)
        monkeypatch.setattr(f"offload.backend.cpu_ways._{each}_BYTE", price)
    monkeypatch.setattr("offload.backend.cpu_ways._RELAY_BUFFER", 700)
    monkeypatch.setattr(
        "offload.backend.cpu.choose", lambda runs, nbytes, packed: choose(runs, nbytes, packed=True)
    )
    for pairs in page_sets(direction)[1:]:
        runs = runs_of(pairs)
        assert type(choose(runs, 100, packed=True)) is (WAYS[way] if len(runs) > 1 else ByRuns)
        check(make_backend("cpu"), lambda: pools(name, layout), direction, pairs)


def test_pages_that_do_not_lie_together_are_never_scattered_straight_from_the_pool() -> None:
    """Scattering is for packed sources; a strided source goes through the small buffer."""
    runs = runs_of([(page, 2 * (page * 5 % 1024)) for page in range(1024)])
    assert isinstance(choose(runs, 1 << 22, packed=True), Scatter)
    assert isinstance(choose(runs, 1 << 22, packed=False), Relay)


@pytest.mark.parametrize("io_backend", ON_CPU)
def test_poison_fills_the_destination_and_nothing_else(io_backend: IoBackend) -> None:
    """Named destination pages of one layer read as NaN; other layers and pages keep their bytes."""
    device, host = pools("mha", Layout.PAGE_FIRST_DIRECT)
    wanted, _ = pools("mha", Layout.PAGE_FIRST_DIRECT)
    make_backend(io_backend).prepare(
        device, host, Direction.LOAD, runs_of([(0, 2), (5, 4)])
    ).poison(1)
    for page in (2, 4):
        for made in wanted.spec.components:
            for token in range(made.component.tokens):
                for head in range(made.component.heads):
                    oracle.cell(wanted, made.name, 1, page, token, head).fill_(POISON)
    assert oracle.same_bytes(device, wanted)
    assert device.view("k", 1)[2].view(torch.bfloat16).isnan().all()


def test_the_work_of_a_layer_covers_all_members() -> None:
    """One call moves every member's layer, and the accesses name pools, layers and pages."""
    device, host = pools("mha", Layout.PAGE_FIRST)
    other, there = pools("rows", Layout.LAYER_FIRST)
    backend = make_backend("cpu")
    one: Prepared = backend.prepare(device, host, Direction.LOAD, runs_of([(1, 0), (4, 3)]))
    two: Prepared = backend.prepare(other, there, Direction.LOAD, runs_of([(0, 6)]))
    work = LayerWork([(one, 2), (two, 0)], one.nbytes(2) + two.nbytes(0))
    work.poison()
    work()
    wanted, _ = pools("mha", Layout.PAGE_FIRST)
    oracle.copy(host, wanted, [(1, 0), (4, 3)], [2])
    assert oracle.same_bytes(device, wanted)
    assert [(a.pool, a.layer, list(a.pages), a.write) for a in work.accesses()] == [
        (host, 2, [1, 4], False),
        (device, 2, [0, 3], True),
        (there, 0, [0], False),
        (other, 0, [6], True),
    ]
    assert work.nbytes == 2 * device.spec.layer_bytes + other.spec.layer_bytes


def test_direct_counts_one_copy_per_run() -> None:
    """Pages that lie together on both sides are one copy per component."""
    device, host = pools("mha", Layout.LAYER_FIRST)
    prepared = make_backend("direct").prepare(
        device, host, Direction.LOAD, runs_of([(1, 0), (2, 1), (3, 2), (9, 5)])
    )
    assert prepared.num_ops(0) == 2 * 2


def test_an_unknown_backend_is_refused() -> None:
    """A name that nothing answers to raises with the choices."""
    with pytest.raises(UnknownNameError):
        make_backend("syscall")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("io_backend", ON_CPU)
@pytest.mark.parametrize("stored", ["same", "uint8"])
def test_all_256_eight_bit_patterns_survive(
    dtype: torch.dtype, io_backend: IoBackend, stored: str
) -> None:
    """Eight-bit floats are moved as bits, also into a pool that calls them uint8."""

    def spec(dtype: torch.dtype) -> PoolSpec:
        return PoolSpec.mha(
            num_layers=1, page_size=16, num_kv_heads=1, head_dim=16, v_head_dim=0, dtype=dtype
        )

    device = DevicePool.allocate(spec(dtype), num_pages=2)
    kept = dtype if stored == "same" else torch.uint8
    host = HostPool.allocate(spec(kept), num_pages=2, layout="layer_first", pinned=False)
    patterns = torch.arange(256, dtype=torch.uint8)
    here = device.flat("k", 0)[0]
    here[:256] = patterns
    backend = make_backend(io_backend)
    backend.prepare(device, host, Direction.BACKUP, runs_of([(0, 1)])).copy(0)
    assert torch.equal(host.flat("k", 0)[0][256:], patterns)
    backend.prepare(device, host, Direction.LOAD, runs_of([(1, 1)])).copy(0)
    assert torch.equal(here[256:], patterns)


@pytest.mark.parametrize("io_backend", ON_CPU)
def test_offsets_beyond_two_to_the_31_are_exact(io_backend: IoBackend) -> None:
    """The last page, and the page that crosses 2**31 bytes, of a lazily resident pool of 2.4 GB."""
    spec = PoolSpec.rows(num_layers=1, page_size=4, row_bytes=4 * 2304)
    host = HostPool.allocate(spec, num_pages=1_048_576 // 4, layout="layer_first", pinned=False)
    device = DevicePool.allocate(spec, num_pages=2)
    oracle.fill(device, 3)
    assert host.nbytes == 2_415_919_104
    pages = [932_068 // 4, host.num_pages - 1]
    backend = make_backend(io_backend)
    backend.prepare(device, host, Direction.BACKUP, runs_of([(0, pages[0]), (1, pages[1])])).copy(0)
    far = host.flat("row", 0)[0].view(host.num_pages, -1)
    for index, page in enumerate(pages):
        assert torch.equal(far[page], device.flat("row", 0)[0].view(2, -1)[index])
    assert not far[0].any()
    wrapped = (pages[1] * 4 * 2304) % 2**31 // (4 * 2304)
    assert not far[wrapped - 1 : wrapped + 2].any()
    want = device.flat("row", 0)[0].clone()
    device.flat("row", 0)[0].zero_()
    backend.prepare(device, host, Direction.LOAD, runs_of([(pages[0], 0), (pages[1], 1)])).copy(0)
    assert torch.equal(device.flat("row", 0)[0], want)


@pytest.mark.parametrize("io_backend", ON_CPU)
@pytest.mark.parametrize("direction", Direction)
def test_bytes_around_adopted_tensors_are_left_alone(
    io_backend: IoBackend, direction: Direction
) -> None:
    """An engine's tensors cut out of bigger ones: what lies before, after and between stays."""
    spec = SPECS["mha"]

    def make() -> tuple[DevicePool, HostPool, list[torch.Tensor]]:
        draw = torch.Generator().manual_seed(11)
        wholes: list[torch.Tensor] = []
        tensors: dict[str, list[torch.Tensor]] = {}
        for made in spec.components:
            shape = ((DEVICE_PAGES + 2) * 5, 2, made.component.dim)
            bits = [torch.randint(0, 1 << 15, shape, generator=draw) for _ in range(LAYERS)]
            cut = [each.to(torch.int16).view(torch.bfloat16) for each in bits]
            wholes += cut
            tensors[made.name] = [each[5:-5] for each in cut]
        _, host = pools("mha", Layout.LAYER_FIRST)
        return DevicePool.adopt(spec, tensors), host, wholes

    device, host, wholes = make()
    wanted, host_wanted, wholes_wanted = make()
    pairs = [(0, 6), (6, 0), (2, 3), (3, 4)]
    make_backend(io_backend).prepare(device, host, direction, runs_of(pairs)).copy(1)
    sides: tuple[Pool, Pool] = (host_wanted, wanted)
    source, destination = sides if direction is Direction.LOAD else sides[::-1]
    oracle.copy(source, destination, pairs, [1])
    for got, want in zip(wholes, wholes_wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert oracle.same_bytes(host, host_wanted)
