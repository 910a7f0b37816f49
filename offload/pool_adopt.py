"""Adopting tensors: which array is which component, and whether shapes and strides are what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.core.axes import Axes, packed_strides, read_strides, shape_of
from offload.core.geometry import Array, Component, ComponentGeometry, Geometry
from offload.core.kinds import Layout, PoolKind
from offload.core.layout import DEVICE_AXES, HOST_AXES, read_array, sizes_of
from offload.errors import GeometryError
from offload.pool_apart import check_apart
from offload.pool_base import Held
from offload.spec import PoolSpec


def adopt_device(
    spec: PoolSpec,
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    axes: Axes | None,
) -> tuple[Geometry, Held]:
    """Return the geometry of an engine's tensors, and the tensors by array."""
    held = _listed(spec, tensors)
    if axes is None:
        axes = DEVICE_AXES[spec.kind]
        if not any(isinstance(each, list) for each in held.values()):
            axes = Axes(f"l {axes}")
    return _read(spec, held, axes, None), held


def adopt_host(
    spec: PoolSpec,
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    order: Layout | Axes,
) -> tuple[Geometry, Held]:
    """Return the geometry of host tensors that are declared to have an order."""
    held = _listed(spec, tensors)
    _check_host(held)
    axes = HOST_AXES[spec.kind][order] if isinstance(order, Layout) else order
    return _read(spec, held, axes, order if isinstance(order, Layout) else None), held


def _check_host(held: Held) -> None:
    """Refuse tensors that are not in host memory."""
    for name, each in held.items():
        for tensor in each if isinstance(each, list) else [each]:
            if tensor.device.type != "cpu":
                raise GeometryError(
                    f"array {name!r} of a host pool",
                    expected={"device": "cpu"},
                    got={"device": str(tensor.device)},
                )


def _listed(spec: PoolSpec, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> Held:
    """Return tensors and lists of tensors by name, and refuse everything else."""
    if not isinstance(tensors, Mapping):
        names = ", ".join(f"{part.name!r}: [...]" for part in spec.parts)
        raise GeometryError(
            "adopted tensors",
            expected={"type": f"a mapping such as {{{names}}}"},
            got={"type": type(tensors).__name__},
        )
    return {name: _tensors(name, each) for name, each in tensors.items()}


def _tensors(name: str, given: object) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return _stored(name, given)
    items = list(given) if isinstance(given, Sequence) else []
    found = [each for each in items if isinstance(each, torch.Tensor)]
    if items and len(found) == len(items):
        return [_stored(name, each) for each in found]
    odd = next((type(each).__name__ for each in items if not isinstance(each, torch.Tensor)), "")
    raise GeometryError(
        f"array {name!r}",
        expected={"type": "a tensor or a list of tensors"},
        got={"type": f"{type(given).__name__}{' with ' if odd else ''}{odd}"},
    )


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Refuse a tensor without bytes that could be copied."""
    got = "empty" if not tensor.numel() else str(tensor.layout)
    if tensor.device.type == "meta":
        got = "on the meta device"
    elif tensor.numel() and tensor.layout is torch.strided:
        return tensor
    raise GeometryError(
        f"array {name!r}", expected={"memory": "strided elements"}, got={"memory": got}
    )


def _read(spec: PoolSpec, held: Held, axes: Axes, layout: Layout | None) -> Geometry:
    placed: list[ComponentGeometry] = []
    arrays: list[Array] = []
    num_pages = 0
    for name, components in _assigned(spec, held, axes, layout).items():
        first, array = _array(spec, name, held[name], axes)
        _check_dtype(spec, name, components[0], first.dtype)
        known = num_pages
        num_pages = known or _count_pages(spec, components[0], axes, first.numel())
        found = read_array(components, axes, array, num_layers=spec.num_layers, num_pages=num_pages)
        if found is None:
            if layout is not None:
                _check_declared(spec, array, components[0], axes, layout, num_pages, first)
            raise _wrong_shape(spec, array, components[0], axes, known, num_pages)
        if layout is not None:
            _check_dense(spec, array, components[0], axes, layout, num_pages)
        placed += found
        arrays.append(array)
    check_apart(held)
    return Geometry(
        spec.kind,
        layout,
        axes,
        spec.num_layers,
        num_pages,
        tuple(placed),
        tuple(arrays),
        spec.parts,
    )


def _assigned(
    spec: PoolSpec, held: Held, axes: Axes, layout: Layout | None
) -> dict[str, tuple[Component, ...]]:
    """Return which components each array holds: one each, all of them (`2`), or the split pieces."""
    whole: dict[str, tuple[Component, ...]] = {part.name: (part,) for part in spec.parts}
    split: dict[str, tuple[Component, ...]] = {
        piece.name: (piece,) for part in spec.parts for piece in part.split()
    }
    remedy = ""
    same = len(spec.parts) == 2 and spec.parts[0].dim == spec.parts[1].dim
    if "2" in axes.order:
        if same and len(held) == 1:
            return {next(iter(held)): spec.parts}
        expected = "one, of k and v of equal width, as axes have a '2'"
    elif layout is Layout.PAGE_FIRST_KV_SPLIT and set(held) == set(split):
        return split
    elif layout is not Layout.PAGE_FIRST_KV_SPLIT and set(held) in (set(whole), set(split)):
        return whole if set(held) == set(whole) else split
    else:
        right = split if layout is Layout.PAGE_FIRST_KV_SPLIT else whole
        expected = ", ".join(sorted(right))
        if same and spec.kind is PoolKind.MHA and len(held) == 1 and layout is None:
            layers = "" if any(isinstance(each, list) for each in held.values()) else "l "
            remedy = (
                f"Or pass axes with a '2', such as '{layers}p t 2 h d', if one tensor holds both."
            )
    got = ", ".join(sorted(held)) or "none"
    raise GeometryError(
        f"adopted tensors of a pool of kind {spec.kind.value!r}",
        expected={"components": expected},
        got={"components": got},
        remedy=remedy,
    )


def _array(
    spec: PoolSpec, name: str, held: torch.Tensor | list[torch.Tensor], axes: Axes
) -> tuple[torch.Tensor, Array]:
    """Return an array's first tensor and its shape and strides; all layers must agree."""
    separate = "l" not in axes.order
    layers = held if isinstance(held, list) else [held]
    wanted = spec.num_layers if separate else 1
    if len(layers) != wanted:
        raise GeometryError(
            f"array {name!r} with axes {axes.text!r}",
            expected={"tensors": f"{wanted}, {'one per layer' if separate else 'of all layers'}"},
            got={"tensors": len(layers)},
        )
    kinds = {(tuple(t.shape), t.stride(), t.dtype) for t in layers}
    if len(kinds) > 1:
        raise GeometryError(
            f"array {name!r}",
            expected={"layers": "tensors of one shape, stride and dtype"},
            got={"layers": ", ".join(str(kind) for kind in sorted(kinds, key=str))},
        )
    first, item = layers[0], layers[0].element_size()
    strides = tuple(step * item for step in first.stride())
    span = item + sum((n - 1) * step for n, step in zip(first.shape, strides, strict=True))
    return first, Array(name, tuple(first.shape), strides, span, separate)


def _check_dtype(spec: PoolSpec, name: str, component: Component, got: torch.dtype) -> None:
    parts = {piece.name: made.dtype for made in spec.components for piece in made.component.split()}
    wanted = parts | {made.name: made.dtype for made in spec.components}
    dtype = wanted[component.name]
    if got != dtype and not (got.itemsize == dtype.itemsize == 1 and torch.uint8 in {got, dtype}):
        raise GeometryError(f"array {name!r}", expected={"dtype": dtype}, got={"dtype": got})


def _count_pages(spec: PoolSpec, component: Component, axes: Axes, elements: int) -> int:
    """Return how many pages an array of so many elements has; 1 where it is no whole number."""
    sizes = sizes_of(component, spec.num_layers, 1)
    each = 1
    for letter in axes.order:
        each *= sizes[letter]
    return elements // each if elements and elements % each == 0 else 1


def _check_declared(
    spec: PoolSpec,
    array: Array,
    component: Component,
    axes: Axes,
    layout: Layout,
    num_pages: int,
    tensor: torch.Tensor,
) -> None:
    """Raise for a tensor that has the size of its layout and the shape of another."""
    sizes = sizes_of(component, spec.num_layers, num_pages)
    for other, order in HOST_AXES[spec.kind].items():
        if read_strides(order, sizes, array.shape, array.strides, 1) is not None:
            raise GeometryError.misdeclared(
                f"host pool {array.name!r}",
                declared=layout.value,
                shape=shape_of(axes, sizes),
                got=array.shape,
                looks_like=other.value,
                nbytes=tensor.numel() * tensor.element_size(),
            )


def _wrong_shape(
    spec: PoolSpec, array: Array, component: Component, axes: Axes, known: int, counted: int
) -> GeometryError:
    """Return the error for a shape; the pages are counted along their own dimension where it has one.

    Args:
        known: Pages of the arrays before it; 0 for the first.
        counted: Pages by the number of elements, which is wrong where another dimension is.
    """
    subject = f"array {array.name!r} with axes {axes.text!r}"
    at = next(index for index, group in enumerate(axes.groups) if "p" in group)
    each = shape_of(axes, sizes_of(component, spec.num_layers, 1))
    pages, rest = counted, 0
    if not known and len(array.shape) == len(each):
        pages, rest = divmod(array.shape[at], each[at])
    expected = shape_of(axes, sizes_of(component, spec.num_layers, pages))
    if not rest:
        return GeometryError(
            f"{subject} ({pages} pages)", expected={"shape": expected}, got={"shape": array.shape}
        )
    if array.shape[:at] + array.shape[at + 1 :] == each[:at] + each[at + 1 :]:
        what = ("tokens", ", the page size") if axes.groups[at] in {"pt", "tp"} else ("rows", "")
        return GeometryError(
            subject,
            expected={what[0]: f"a multiple of {each[at]}{what[1]}"},
            got={what[0]: array.shape[at]},
        )
    shape = ", ".join(
        f"a multiple of {n}" if index == at else str(n) for index, n in enumerate(each)
    )
    return GeometryError(subject, expected={"shape": f"({shape})"}, got={"shape": array.shape})


def _check_dense(
    spec: PoolSpec,
    array: Array,
    component: Component,
    axes: Axes,
    layout: Layout,
    num_pages: int,
) -> None:
    """Refuse strides that are not the layout's: the shape says one order and the memory another."""
    sizes = sizes_of(component, spec.num_layers, num_pages)
    packed = packed_strides(axes, sizes, component.itemsize)
    got = read_strides(axes, sizes, array.shape, array.strides, component.itemsize)
    assert got is not None
    padded = axes.order[0] if axes.groups[0] == "p" else ""
    wrong = [
        letter
        for letter in axes.order
        if sizes[letter] != 1 and letter != padded and got[letter] != packed[letter]
    ]
    if wrong:
        raise GeometryError(
            f"host pool {array.name!r} is declared {layout.value!r}",
            expected={f"byte stride of {letter}": packed[letter] for letter in wrong},
            got={f"byte stride of {letter}": got[letter] for letter in wrong},
            remedy="Pass axes= to describe tensors that are not dense in that order.",
        )
