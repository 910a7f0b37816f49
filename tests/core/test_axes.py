"""Strides from axis orders, and the longest runs that several sides share, against counting elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from offload.core.axes import Axes, Loop, merge, read_strides
from offload.errors import GeometryError

SIZES = {"p": 3, "l": 1, "2": 2, "t": 2, "h": 1, "d": 4}


def walked(axes: Sequence[Loop], itemsize: int) -> set[tuple[int, ...]]:
    """Return the bytes on each side that loops visit, one by one."""
    sides = len(axes[0][1]) if axes else 1
    found = set()
    for steps in itertools.product(*(range(count) for count, _ in axes)):
        start = [
            sum(step * strides[side] for step, (_, strides) in zip(steps, axes, strict=True))
            for side in range(sides)
        ]
        found |= {tuple(at + byte for at in start) for byte in range(itemsize)}
    return found


LOOPS: dict[str, tuple[list[Loop], int, int, tuple[Loop, ...]]] = {
    "one dense side": ([(2, (24,)), (3, (8,)), (4, (2,))], 2, 48, ()),
    "a size of one": ([(1, (7,)), (3, (4,))], 4, 12, ()),
    "a gap": ([(2, (32,)), (4, (2,))], 2, 8, ((2, (32,)),)),
    "two loops that join": ([(3, (40,)), (5, (8,)), (2, (2,))], 2, 4, ((15, (8,)),)),
    "three loops that join": ([(2, (120,)), (3, (40,)), (5, (8,)), (2, (2,))], 2, 4, ((30, (8,)),)),
    "given inside out": ([(2, (2,)), (5, (8,)), (3, (40,))], 2, 4, ((15, (8,)),)),
    "outer two join": ([(3, (64,)), (2, (32,)), (2, (8,))], 4, 4, ((6, (32,)), (2, (8,)))),
    "inner two join": ([(3, (64,)), (2, (16,)), (2, (8,))], 4, 4, ((3, (64,)), (4, (8,)))),
    "none joins": ([(2, (100,)), (3, (30,)), (2, (7,))], 2, 2, ((2, (100,)), (3, (30,)), (2, (7,)))),
    "sides that step together": ([(2, (8, 8)), (4, (2, 2))], 2, 16, ()),
    "sides that part": ([(2, (8, 64)), (4, (2, 2))], 2, 8, ((2, (8, 64)),)),
    "sides that part and join": (
        [(3, (16, 128)), (2, (8, 64)), (4, (2, 2))], 2, 8, ((6, (8, 64)),)
    ),
    "one side joins alone": (
        [(3, (16, 256)), (2, (8, 64)), (4, (2, 2))], 2, 8, ((3, (16, 256)), (2, (8, 64)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_runs_are_as_long_as_they_can_be(name: str) -> None:
    """Runs and loops are the expected ones, and visit the same bytes."""
    axes, itemsize, run, loops = LOOPS[name]
    assert merge(axes, itemsize) == (run, loops)
    start = (0,) * len(axes[0][1])
    assert {at[0] for at in walked(axes, itemsize)} == {at[0] for at in walked(loops, run)}
    assert start in walked(axes, itemsize)


READ: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, int] | None]] = {
    "dense": ("p t d", (3, 2, 4), (16, 8, 2), {"p": 16, "t": 8, "d": 2}),
    "an axis of size one": ("p t h d", (3, 2, 4), (16, 8, 2), {"p": 16, "t": 8, "h": 8, "d": 2}),
    "a dimension of size one": ("p t d", (3, 1, 2, 4), (16, 5, 8, 2), {"p": 16, "t": 8, "d": 2}),
    "two axes in one dimension": ("pt d", (6, 4), (8, 2), {"p": 16, "t": 8, "d": 2}),
    "elements in two dimensions": ("p t d", (3, 2, 2, 2), (16, 8, 4, 2), {"p": 16, "t": 8, "d": 2}),
    "elements that are not dense": ("p t d", (3, 2, 2, 2), (32, 16, 8, 2), None),
    "a page stride with a gap": ("p t d", (3, 2, 4), (64, 8, 2), {"p": 64, "t": 8, "d": 2}),
    "too few dimensions": ("p t d", (3, 2), (16, 8), None),
    "too many dimensions": ("p t d", (3, 2, 4, 5), (160, 80, 20, 4), None),
    "another size": ("p t d", (3, 3, 4), (24, 8, 2), None),
    "a size that no axes make up": ("pt d", (4, 4), (8, 2), None),
}


@pytest.mark.parametrize("name", READ)
def test_strides_are_read_or_the_shape_is_another(name: str) -> None:
    """Strides by letter of a tensor with these axes; None of one that has others."""
    text, shape, strides, found = READ[name]
    assert read_strides(Axes(text), SIZES, shape, strides, 2) == found


def test_shape_and_strides_are_of_one_tensor() -> None:
    """A stride per dimension, or it is our mistake."""
    with pytest.raises(ValueError, match="zip"):
        read_strides(Axes("p t d"), SIZES, (3, 2, 4), (16, 8), 2)


@pytest.mark.parametrize("letter", ["t", "h"])
def test_axes_of_size_two_must_be_named(letter: str) -> None:
    """From size two on an axis has a place in the order; the layers and the pair need none."""
    from offload.core.axes import require

    sizes = {"p": 3, "l": 2, "2": 2, "t": 1, "h": 1, "d": 4}
    require(Axes("p d"), sizes)
    with pytest.raises(GeometryError, match="absent, with size 2"):
        require(Axes("p d"), {**sizes, letter: 2})
