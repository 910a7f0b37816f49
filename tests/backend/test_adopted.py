"""Engines' own tensors, in every order that engines use, against every layout of a host pool."""

# Axes: P pages, T tokens per page, L layers, H kv heads, D head dim; 2 the k/v pair.

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from offload.backend import make_backend
from offload.core.checks import worst_runs
from offload.core.geometry import matched
from offload.core.kinds import Direction, Layout
from offload.core.plan import coalesce
from offload.core.strategy import Table
from offload.core.table import Rejection
from offload.errors import GeometryError
from offload.pool import DevicePool, HostPool
from offload.spec import PoolSpec
from tests import oracle

SIZES = {"2": 2, "l": 3, "p": 6, "t": 5, "h": 2, "d": 4}
SPEC = PoolSpec.mha(
    num_layers=SIZES["l"],
    page_size=SIZES["t"],
    num_kv_heads=SIZES["h"],
    head_dim=SIZES["d"],
    dtype=torch.float16,
)
HOST_PAGES = 9
ORDERS = [
    "p t h d",
    "p h t d",
    "p h d t",
    "l p t h d",
    "p l t h d",
    "p h t l d",
    "2 p t h d",
    "p 2 t h d",
    "p 2 h t d",
    "l 2 p t h d",
    "p l 2 t h d",
]
PAGES = torch.tensor([[4, 0], [5, 1], [0, 5], [8, 2]])  # host, device


class Engine:
    """Tensors of one order, with `beside` more elements after each, and how to read them by index."""

    def __init__(self, axes: str, beside: int) -> None:
        self.axes, self.inner = axes, SIZES[axes[-1]]
        letters = axes.split()
        shape = [SIZES[letter] for letter in letters]
        names = ["kv"] if "2" in letters else ["k", "v"]
        count = 1 if "l" in letters else SIZES["l"]
        self.tensors: dict[str, list[torch.Tensor]] = {}
        draw = torch.Generator().manual_seed(7)
        for name in names:
            wide = [
                torch.randint(0, 1 << 15, (*shape[:-1], shape[-1] + beside), generator=draw)
                for _ in range(count)
            ]
            self.tensors[name] = [each.to(torch.int16).view(torch.float16) for each in wide]

    def adopted(self) -> DevicePool:
        """Return a pool over the tensors, the bytes around the rows left out."""
        cut = {
            name: [each[..., : self.inner] for each in held] for name, held in self.tensors.items()
        }
        one = {name: held if "l" not in self.axes else held[0] for name, held in cut.items()}
        return DevicePool.adopt(SPEC, one, axes=self.axes)

    def whole(self) -> torch.Tensor:
        """Return all bits in one order, [2, L, P, T, H, D], by permuting axes alone."""
        letters = self.axes.split()
        parts = []
        for name in ("k", "v"):
            held = self.tensors.get(name) or self.tensors["kv"]
            for layer in range(SIZES["l"]):
                each = held[layer if "l" not in letters else 0][..., : self.inner]
                left = list(letters)
                for letter, index in (("2", "kv".index(name)), ("l", layer)):
                    if letter in left:
                        each = each.select(left.index(letter), index)
                        left.remove(letter)
                parts.append(each.permute([left.index(letter) for letter in "pthd"]))
        return torch.stack([part.contiguous().view(torch.int16) for part in parts])

    def around(self) -> list[torch.Tensor]:
        """Return the bits beside the rows."""
        return [each[..., self.inner :].clone() for held in self.tensors.values() for each in held]


def host_bits(host: HostPool) -> torch.Tensor:
    """Return the host pool's bits as `Engine.whole` has them, read cell by cell."""
    found = torch.empty(2 * SIZES["l"], HOST_PAGES, SIZES["t"], SIZES["h"], SIZES["d"])
    bits = found.to(torch.int16)
    for component, layer in product(range(2), range(SIZES["l"])):
        for page, token, head in product(range(HOST_PAGES), range(SIZES["t"]), range(SIZES["h"])):
            row = oracle.cell(host, "kv"[component], layer, page, token, head)
            bits[component * SIZES["l"] + layer, page, token, head] = row.view(torch.int16)
    return bits


CASES = [
    pytest.param(axes, layout, io_backend, id=f"{axes.replace(' ', '')}-{layout}-{io_backend}")
    for axes, layout, io_backend in product(ORDERS, Layout, ("direct", "cpu"))
]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("axes", "layout", "io_backend"), CASES)
def test_adopted_orders_are_copied_or_refused_for_their_runs(
    axes: str, layout: Layout, io_backend: str, direction: Direction
) -> None:
    """Named pages arrive in every layer, nothing else changes; only `direct` refuses, for its runs."""
    beside = 0 if io_backend == "direct" else 2  # rows apart are many runs
    assert check_adopted(axes, layout, io_backend, direction, beside) or io_backend == "direct"


def check_adopted(
    axes: str,
    layout: Layout,
    io_backend: str,
    direction: Direction,
    beside: int,
    moved: Callable[[], None] = lambda: None,
) -> bool:
    """Copy every layer and compare all bits, or return False where the pair is refused for its runs.

    Args:
        moved: Called when everything is enqueued; what was, has happened when it returns.
    """
    engine = Engine(axes, beside)
    device = engine.adopted()
    host = HostPool.allocate(SPEC, num_pages=HOST_PAGES, layout=layout, pinned=False)
    oracle.fill(host, 2)
    verdict = Table().judge(SPEC.kind, direction, io_backend, host.geometry, device.geometry)
    if isinstance(verdict, Rejection):
        _, runs = worst_runs(matched(host.geometry, device.geometry))
        assert runs.count > (1 if io_backend == "direct" else SIZES["t"])
        return False
    ours, theirs, around = engine.whole(), host_bits(host), engine.around()
    there, here = PAGES.T
    pairs = (there, here) if direction is Direction.LOAD else (here, there)
    runs_found = coalesce(*(side.contiguous().numpy() for side in pairs))
    prepared = make_backend(io_backend).prepare(device, host, direction, runs_found)
    for layer in range(SIZES["l"]):
        prepared.copy(layer)
    moved()
    if direction is Direction.LOAD:
        ours[:, here] = theirs[:, there]
    else:
        theirs[:, there] = ours[:, here]
    assert torch.equal(engine.whole(), ours)
    assert torch.equal(host_bits(host), theirs)
    for got, want in zip(engine.around(), around, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    return True


def _bits(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


SLOTS = SIZES["p"] * SIZES["t"]
H, D = SIZES["h"], SIZES["d"]


def _layers(width: int = D) -> list[torch.Tensor]:
    return [_bits(SLOTS, H, width) for _ in range(SIZES["l"])]


def _values_are_the_keys() -> dict[str, list[torch.Tensor]]:
    keys = _layers()
    return {"k": keys, "v": keys}


def _two_layers_are_one() -> dict[str, list[torch.Tensor]]:
    keys = _layers()
    return {"k": [keys[0], keys[1], keys[0]], "v": _layers()}


def _values_begin_inside_the_keys() -> dict[str, list[torch.Tensor]]:
    both = _layers(2 * D - 1)
    return {"k": [b[..., :D] for b in both], "v": [b[..., D - 1 :] for b in both]}


def _a_layer_begins_before_the_last_ends() -> dict[str, list[torch.Tensor]]:
    block = _bits(SIZES["l"] * SLOTS * H * D)
    step = SLOTS * H * D - 1
    return {
        "k": [block[n * step :][: SLOTS * H * D].view(SLOTS, H, D) for n in range(SIZES["l"])],
        "v": _layers(),
    }


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_values_are_the_keys, r"layer (\d) of 'k' and layer \1 of 'v'"),
        (_two_layers_are_one, "layer 0 of 'k' and layer 2 of 'k'"),
        (_values_begin_inside_the_keys, r"layer (\d) of 'k' and layer \1 of 'v'"),
        (_a_layer_begins_before_the_last_ends, "layer 0 of 'k' and layer 1 of 'k'"),
    ],
)
def test_tensors_that_share_bytes_are_refused(
    make: Callable[[], dict[str, list[torch.Tensor]]], said: str
) -> None:
    """Two copies into one byte would race, so aliases are refused where they come in, and named."""
    with pytest.raises(GeometryError, match=f"{said}: bytes is shared, expected of their own"):
        DevicePool.adopt(SPEC, make())


def test_tensors_cut_out_of_one_block_are_adopted() -> None:
    """Keys beside values in each row, and layers that take turns in each slot, share no byte."""
    both = _layers(2 * D)
    beside = {"k": [b[..., :D] for b in both], "v": [b[..., D:] for b in both]}
    turns = _bits(SLOTS, 2 * SIZES["l"], H, D)
    taking = {
        "k": [turns[:, 2 * n] for n in range(SIZES["l"])],
        "v": [turns[:, 2 * n + 1] for n in range(SIZES["l"])],
    }
    for held in (beside, taking):
        assert DevicePool.adopt(SPEC, held).num_pages == SIZES["p"]
    host = {name: _bits(SIZES["p"], SIZES["l"], SIZES["t"], H, D) for name in "kv"}
    assert HostPool.adopt(SPEC, host, layout="page_first_direct").num_pages == SIZES["p"]
    with pytest.raises(GeometryError, match="'k' and 'v'"):
        HostPool.adopt(SPEC, dict.fromkeys("kv", host["k"]), layout="page_first_direct")
