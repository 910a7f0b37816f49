"""Layouts: what each name means in axes, and the geometry of a pool that is allocated or read so.

Axes: P pages, T tokens per page, L layers, H kv heads, D head dim (row elements), C latent dim.

| layout              | mha, mla          | rows, state     |
|---------------------|-------------------|-----------------|
| layer_first         | [L, P*T, H, D]    | [L, P, T*D]     |
| page_first          | [P*T, L, H, D]    | [P, L, T*D]     |
| page_first_direct   | [P, L, T, H, D]   | [P, L, 1, T*D]  |
| page_head           | [P, H, T, L, D]   | (no meaning)    |
| page_first_kv_split | [P, L, T, H, D]   | (no meaning)    |

One such array per component. A device pool has one array `[P*T, H, D]` per component and layer unless
it was adopted in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from offload.core.axes import (
    Axes,
    overlaps,
    packed_strides,
    read_strides,
    require,
    shape_of,
)
from offload.core.geometry import (
    Array,
    Component,
    ComponentGeometry,
    Geometry,
)
from offload.core.kinds import Layout, PoolKind
from offload.errors import GeometryError

_TOKENS = {
    Layout.LAYER_FIRST: Axes("l pt h d"),
    Layout.PAGE_FIRST: Axes("pt l h d"),
    Layout.PAGE_FIRST_DIRECT: Axes("p l t h d"),
    Layout.PAGE_HEAD: Axes("p h t l d"),
    Layout.PAGE_FIRST_KV_SPLIT: Axes("p l t h d"),
}
_OPAQUE = {
    Layout.LAYER_FIRST: Axes("l p td"),
    Layout.PAGE_FIRST: Axes("p l td"),
    Layout.PAGE_FIRST_DIRECT: Axes("p l h td"),
    Layout.PAGE_HEAD: Axes("p h t l d"),
    Layout.PAGE_FIRST_KV_SPLIT: Axes("p l h td"),
}
HOST_AXES: Mapping[PoolKind, Mapping[Layout, Axes]] = {
    PoolKind.MHA: _TOKENS,
    PoolKind.MLA: _TOKENS,
    PoolKind.ROWS: _OPAQUE,
    PoolKind.STATE: _OPAQUE,
}
"""Axis order of each named layout. Order alone: whether it has a meaning, the strategy table says."""

DEVICE_AXES: Mapping[PoolKind, Axes] = {
    PoolKind.MHA: Axes("pt h d"),
    PoolKind.MLA: Axes("pt h d"),
    PoolKind.ROWS: Axes("pt d"),
    PoolKind.STATE: Axes("pt d"),
}
"""Axis order of a device pool's per-layer arrays, as engines allocate them."""


def host_geometry(
    kind: PoolKind,
    components: tuple[Component, ...],
    layout: Layout | Axes,
    *,
    num_layers: int,
    num_pages: int,
    page_align: int = 1,
) -> Geometry:
    """Return the geometry of a dense host pool, one array per component.

    Args:
        page_align: Round the page stride up to a multiple of this many bytes (page-major orders only).

    Raises:
        GeometryError: `page_align` on an order in which pages are not outermost.
    """
    named = layout if isinstance(layout, Layout) else None
    axes = HOST_AXES[kind][layout] if isinstance(layout, Layout) else layout
    if "2" in axes.order:
        raise GeometryError(
            f"axes {axes.text!r} of a host pool",
            expected={"axes": "one array per component"},
            got={"axes": "a '2', by which k and v share one"},
        )
    if page_align > 1 and not axes.order.startswith("p"):
        raise GeometryError(
            f"page_align={page_align} of layout {str(named or axes.text)!r}",
            expected={"outermost axis": "p"},
            got={"outermost axis": axes.order[0]},
            remedy="Use 'page_first', 'page_first_direct', 'page_head' or 'page_first_kv_split'.",
        )
    if page_align > 1:
        axes = attrs.evolve(axes, text=axes.text.replace("pt", "p t"))
    return _dense(kind, components, axes, named, num_layers, num_pages, page_align)


def device_geometry(
    kind: PoolKind, components: tuple[Component, ...], *, num_layers: int, num_pages: int
) -> Geometry:
    """Return the geometry of a device pool as engines allocate it: one array per component and layer."""
    return _dense(kind, components, DEVICE_AXES[kind], None, num_layers, num_pages, 1)


def sizes_of(component: Component, num_layers: int, num_pages: int) -> dict[str, int]:
    """Return the size of every axis by letter."""
    return {
        "p": num_pages,
        "l": num_layers,
        "2": 2,
        "t": component.tokens,
        "h": component.heads,
        "d": component.dim,
    }


def place(
    component: Component,
    array: Array,
    strides: Mapping[str, int],
    *,
    num_layers: int,
    offset: int = 0,
) -> ComponentGeometry:
    """Return where a component lies, given byte strides by letter; absent axes have stride 0."""
    return ComponentGeometry(
        component=component,
        array=array.name,
        offset=offset,
        page_stride=strides["p"],
        layer_stride=strides.get("l", 0),
        token_stride=strides.get("t", 0),
        head_stride=strides.get("h", 0),
        dim_stride=strides["d"],
        num_layers=num_layers,
        separate=array.separate,
    )


def read_array(
    components: tuple[Component, ...],
    axes: Axes,
    array: Array,
    *,
    num_layers: int,
    num_pages: int,
) -> tuple[ComponentGeometry, ...] | None:
    """Return where components lie in an adopted array, or None where its shape has other axes.

    Args:
        components: One, or the two that share the array where `axes` has a `2`.

    Raises:
        GeometryError: The strides let two elements share a byte.
    """
    first = components[0]
    sizes = sizes_of(first, num_layers, num_pages)
    require(axes, sizes)
    strides = read_strides(axes, sizes, array.shape, array.strides, first.itemsize)
    if strides is None:
        return None
    if overlaps([(sizes[letter], step) for letter, step in strides.items()], first.itemsize):
        raise GeometryError(
            f"array {array.name!r} of shape {array.shape}",
            expected={"byte strides": "such that no two elements share a byte"},
            got={"byte strides": array.strides},
        )
    pair = strides.get("2", 0)
    return tuple(
        place(part, array, strides, num_layers=num_layers, offset=index * pair)
        for index, part in enumerate(components)
    )


def _dense(
    kind: PoolKind,
    components: tuple[Component, ...],
    axes: Axes,
    layout: Layout | None,
    num_layers: int,
    num_pages: int,
    page_align: int,
) -> Geometry:
    placed, arrays = [], []
    split = layout is Layout.PAGE_FIRST_KV_SPLIT
    for part in (piece for whole in components for piece in (whole.split() if split else (whole,))):
        sizes = sizes_of(part, num_layers, num_pages)
        require(axes, sizes)
        strides = packed_strides(axes, sizes, part.itemsize, page_align=page_align)
        outer = axes.order[0]
        array = Array(
            name=part.name,
            shape=shape_of(axes, sizes),
            strides=tuple(strides[group[-1]] for group in axes.groups),
            nbytes=strides[outer] * sizes[outer],
            separate="l" not in axes.order,
        )
        arrays.append(array)
        placed.append(place(part, array, strides, num_layers=num_layers))
    return Geometry(
        kind, layout, axes, num_layers, num_pages, tuple(placed), tuple(arrays), components
    )
