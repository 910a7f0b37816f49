"""Axis orders: how a name such as `"p l t h d"` and a tensor's shape and strides become byte strides.

Axes: p pages, l layers, t tokens per page, h heads, d head dim (or row elements), 2 the k/v pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import attrs

from offload.errors import GeometryError

LETTERS = "pl2thd"


@attrs.frozen
class Axes:
    """The axes of one array, outermost first: `"p l t h d"`.

    Letters written together are one dimension of the tensor: `"pt l h d"` is `[P*T, L, H, D]`. No `l`
    means one array per layer. `2` means that `k` and `v` share the array. Axes of size 1 may be absent.
    """

    text: str

    name: str | None = attrs.field(default=None, eq=False, kw_only=True)
    """What `register_layout` called it."""

    def __attrs_post_init__(self) -> None:
        """Refuse unknown, repeated or missing letters."""
        given: object = self.text
        if not isinstance(given, str):
            raise GeometryError(
                "axes",
                expected={"type": "a string such as 'p l t h d'"},
                got={"type": type(given).__name__},
            )
        letters = self.order
        counts = {letter: letters.count(letter) for letter in dict.fromkeys([*letters, *"pd"])}
        expected: dict[str, object] = {}
        got: dict[str, object] = {}
        for letter, count in counts.items():
            if letter in LETTERS and count == 1:
                continue
            name = f"letter {letter!r}"
            expected[name] = "once" if letter in LETTERS else "one of 'p l 2 t h d'"
            known = f"there {count} times" if count else "missing"
            got[name] = known if letter in LETTERS else "unknown"
        if got:
            raise GeometryError(f"axes {self.text!r}", expected=expected, got=got)

    @property
    def order(self) -> str:
        """The letters alone, outermost first."""
        return "".join(self.text.split())

    @property
    def groups(self) -> tuple[str, ...]:
        """The letters of each tensor dimension."""
        return tuple(self.text.split())

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def require(axes: Axes, sizes: Mapping[str, int]) -> None:
    """Raise unless every axis that is longer than 1 stands in `axes`; layers may have arrays apart.

    Raises:
        GeometryError: Names the axes that are missing, with their sizes.
    """
    missing = {
        letter: size
        for letter, size in sizes.items()
        if size > 1 and letter not in axes.order and letter not in "l2"
    }
    if missing:
        raise GeometryError(
            f"axes {axes.text!r}",
            expected=dict.fromkeys(missing, "among the axes, or of size 1"),
            got={letter: f"absent, with size {size}" for letter, size in missing.items()},
        )


def packed_strides(
    axes: Axes, sizes: Mapping[str, int], itemsize: int, *, page_align: int = 1
) -> dict[str, int]:
    """Return byte strides by letter of a dense array, its page stride rounded up to `page_align`."""
    strides: dict[str, int] = {}
    step = itemsize
    for letter in reversed(axes.order):
        if letter == "p":
            step = -(-step // page_align) * page_align
        strides[letter] = step
        step *= sizes[letter]
    return strides


def shape_of(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tensor shape: one dimension per group of letters."""
    return tuple(prod(sizes[letter] for letter in group) for group in axes.groups)


def read_strides(
    axes: Axes,
    sizes: Mapping[str, int],
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
) -> dict[str, int] | None:
    """Return byte strides by letter of a tensor that has these axes, or None where its shape differs.

    Dimensions of size 1 are ignored on both sides; such an axis gets the stride that it would have in a
    dense array. One dimension may hold several neighbouring axes
    (`P*T` slots), and `d` may lie over several dimensions that are dense among themselves.
    """
    dims = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    found = dict.fromkeys(axes.order, 0)
    letters = [letter for letter in axes.order if sizes[letter] != 1]
    while letters and dims:
        size, step = dims.pop(0)
        taken = [letters.pop(0)]
        while prod(sizes[letter] for letter in taken) < size and letters:
            taken.append(letters.pop(0))
        if taken == ["d"]:
            while size < sizes["d"] and dims and step == dims[0][0] * dims[0][1]:
                inner, step = dims.pop(0)
                size *= inner
        if prod(sizes[letter] for letter in taken) != size:
            return None
        for letter in reversed(taken):
            found[letter] = step
            step *= sizes[letter]
    if letters or dims:
        return None
    step = itemsize
    for letter in reversed(axes.order):
        if sizes[letter] == 1:
            found[letter] = step
        step = found[letter] * sizes[letter]
    return found


def overlaps(strides: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Return whether two elements of an array with these (size, byte stride) axes may share a byte.

    Exact for nested strides, which every view by slicing and permuting has; others count as overlapping.
    """
    span = itemsize
    for size, step in sorted((pair for pair in strides if pair[0] > 1), key=lambda pair: pair[1]):
        if step < span:
            return True
        span += (size - 1) * step
    return False


Loop = tuple[int, tuple[int, ...]]
"""A repeat count and the byte stride on each side."""


def merge(axes: Sequence[Loop], itemsize: int) -> tuple[int, tuple[Loop, ...]]:
    """Return the longest run that all sides share, and the loops over such runs.

    With one side it finds the runs of an array; with two, the runs in which a source and a destination
    step together. Loops are ordered by the first side's stride, longest first.
    """
    run = itemsize
    rest = [axis for axis in axes if axis[0] > 1]
    while inner := next((axis for axis in rest if set(axis[1]) == {run}), None):
        rest.remove(inner)
        run *= inner[0]
    rest.sort(key=lambda axis: axis[1], reverse=True)
    index = len(rest) - 1
    while index > 0:
        outer, inner = rest[index - 1], rest[index]
        if outer[1] == tuple(inner[0] * step for step in inner[1]):
            rest[index - 1 : index + 1] = [(outer[0] * inner[0], inner[1])]
        index -= 1
    return run, tuple(rest)
