"""Geometry: where every byte of a pool lives, and in how many pieces one layer of one page lies.

Values made of sizes, shapes and strides alone; `layout` makes them. Two numbers explain nearly every cell of
the strategy table: the *runs* of one layer of one page, and their length. For a copy it is the runs in which
both sides step together that count: `pair_runs`.

Axes: P pages, T tokens per page, L layers, H kv heads, D head dim (row elements), C latent dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from math import gcd, prod

import attrs

from offload.core.axes import Axes, Loop, merge
from offload.core.kinds import Layout, PoolKind

WORD = 16
"""Bytes of the widest word a GPU thread moves at once."""


@attrs.frozen
class Component:
    """One component of one layer of one page, by sizes alone."""

    name: str

    tokens: int
    """T: token rows, or opaque rows, in a page."""

    heads: int
    """H."""

    dim: int
    """D: elements of one head's row."""

    itemsize: int
    """Bytes of one element."""

    parts: tuple[tuple[str, int], ...] = ()
    """(name, elements) of the pieces that `page_first_kv_split` stores apart; empty: it has none."""

    @property
    def nbytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.tokens * self.heads * self.dim * self.itemsize

    def split(self) -> tuple[Component, ...]:
        """Return the pieces as components of their own, or itself where it has none."""
        if not self.parts:
            return (self,)
        return tuple(attrs.evolve(self, name=n, dim=dim, parts=()) for n, dim in self.parts)


@attrs.frozen
class Runs:
    """The contiguous byte ranges in one layer of one page. All of them are equally long."""

    count: int
    nbytes: int
    """Bytes of each."""

    loops: tuple[Loop, ...]
    """How they repeat: (count, byte stride on each side), outermost first. Empty for a single run."""


@attrs.frozen
class Array:
    """One tensor, or one per layer, by shape and byte strides."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, not elements, in the order of `shape`."""

    nbytes: int
    """Bytes from its first to past its last, padding included."""

    separate: bool
    """Whether there is one such tensor per layer."""


@attrs.frozen
class ComponentGeometry:
    """Where one component lies in its array."""

    component: Component
    array: str
    """Name of the array that holds it; `k` and `v` may share one."""

    offset: int
    """Bytes from the array's first byte to this component's first."""

    page_stride: int
    layer_stride: int
    """0 where each layer has an array of its own."""

    token_stride: int
    head_stride: int
    dim_stride: int
    """Bytes, like all strides here. Equal to `itemsize` where `d` is the innermost axis."""

    num_layers: int
    separate: bool
    breaks: tuple[int, ...] = ()
    """Byte offsets in the array that no copy may cross: where registered memory chunks meet."""

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    @property
    def nbytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.component.nbytes

    def at(self, layer: int, page: int) -> int:
        """Return the byte offset of one layer of one page; in the layer's own array where separate."""
        return self.offset + layer * self.layer_stride + page * self.page_stride

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """(size, byte stride) of tokens, heads and elements."""
        part = self.component
        return (
            (part.tokens, self.token_stride),
            (part.heads, self.head_stride),
            (part.dim, self.dim_stride),
        )

    @cached_property
    def runs(self) -> Runs:
        """The runs of one layer of one page."""
        return _runs([(n, (step,)) for n, step in self.axes], self.component.itemsize)

    @cached_property
    def adjacent(self) -> bool:
        """Whether neighbouring pages of a layer are one contiguous range."""
        return self.runs.count == 1 and self.page_stride == self.nbytes

    @cached_property
    def whole_page(self) -> bool:
        """Whether all layers of a page are one contiguous range."""
        if self.separate and self.num_layers > 1:
            return False
        axes = [(n, (step,)) for n, step in (*self.axes, (self.num_layers, self.layer_stride))]
        return _runs(axes, self.component.itemsize).count == 1

    def narrow(self, name: str, start: int, dim: int) -> ComponentGeometry:
        """Return the geometry of `dim` elements of each row, from element `start` on."""
        part = attrs.evolve(self.component, name=name, dim=dim, parts=())
        return attrs.evolve(self, component=part, offset=self.offset + start * self.dim_stride)


@attrs.frozen
class Geometry:
    """One layout with its sizes filled in: where every element of a pool lives."""

    kind: PoolKind
    layout: Layout | None
    """None where the order has no name of its own; `axes` tells it."""

    axes: Axes
    num_layers: int
    num_pages: int
    components: tuple[ComponentGeometry, ...]
    arrays: tuple[Array, ...]

    whole: tuple[Component, ...]
    """The components by sizes, as the spec has them: pieces that are stored apart count as one."""

    def broken(self, breaks: Mapping[str, tuple[int, ...]]) -> Geometry:
        """Return the same geometry with places that no copy may cross, by array name."""
        parts = (attrs.evolve(part, breaks=breaks[part.array]) for part in self.components)
        return attrs.evolve(self, components=tuple(parts))

    @property
    def label(self) -> str:
        """The layout's name, or its axes where it has none."""
        return self.layout.value if self.layout is not None else self.axes.name or self.axes.text

    @property
    def names(self) -> tuple[str, ...]:
        """Component names."""
        return tuple(part.name for part in self.components)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one layer of one page over all components, without padding."""
        return sum(part.nbytes for part in self.components)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        copies = {array.name: self.num_layers if array.separate else 1 for array in self.arrays}
        return sum(array.nbytes * copies[array.name] for array in self.arrays)

    @cached_property
    def page_stride(self) -> int:
        """Bytes that one page takes over all layers and components, its padding included."""
        if not self.axes.order.startswith("p"):
            return self.page_bytes * self.num_layers
        each = {part.array: part.page_stride * self._copies(part) for part in self.components}
        return sum(each.values())

    def _copies(self, part: ComponentGeometry) -> int:
        return self.num_layers if part.separate else 1

    @cached_property
    def _by_name(self) -> dict[str, ComponentGeometry]:
        found = {part.name: part for part in self.components}
        for part in self.components:
            start = 0
            for name, dim in part.component.parts:
                found[name] = part.narrow(name, start, dim)
                start += dim
        return found

    def component(self, name: str) -> ComponentGeometry:
        """Return a component, or a piece of one, by name.

        Raises:
            KeyError: There is none of that name.
        """
        return self._by_name[name]

    @cached_property
    def worst(self) -> ComponentGeometry:
        """The component with the most runs, and of those the shortest: what the checks look at."""
        return max(self.components, key=lambda part: (part.runs.count, -part.runs.nbytes))

    @cached_property
    def whole_page(self) -> bool:
        """Whether a page over all layers is one contiguous range per component."""
        return all(part.whole_page for part in self.components)


def matched(
    host: Geometry, device: Geometry
) -> tuple[tuple[ComponentGeometry, ComponentGeometry], ...]:
    """Return (host, device) pairs of what is copied, finer where one side stores pieces apart."""
    finer = max((host.names, device.names), key=len)
    return tuple((host.component(name), device.component(name)) for name in finer)


@lru_cache(maxsize=1024)
def pair_runs(host: ComponentGeometry, device: ComponentGeometry) -> Runs:
    """Return the runs of one layer of one page in which both sides step together.

    Loops carry both strides: (count, (host, device)).
    """
    axes = [(n, (a, b)) for (n, a), (_, b) in zip(host.axes, device.axes, strict=True)]
    return _runs(axes, host.component.itemsize)


def pair_alignment(host: ComponentGeometry, device: ComponentGeometry) -> int:
    """Return the widest word in bytes, a power of two up to `WORD`, that moves every run whole."""
    runs = pair_runs(host, device)
    steps = (step for _, pair in runs.loops for step in pair)
    ends = (host.offset, host.page_stride, host.layer_stride)
    starts = (device.offset, device.page_stride, device.layer_stride)
    return _alignment(runs.nbytes, *steps, *ends, *starts)


def _runs(axes: Sequence[Loop], itemsize: int) -> Runs:
    nbytes, loops = merge(axes, itemsize)
    return Runs(count=prod(n for n, _ in loops), nbytes=nbytes, loops=loops)


def _alignment(*numbers: int) -> int:
    return gcd(WORD, *numbers)
