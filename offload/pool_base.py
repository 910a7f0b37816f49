"""What device and host pools share: tensors with a geometry, every way of addressing them, an allocator."""

from __future__ import annotations

import threading
from typing import Self, TypeAlias
from weakref import WeakKeyDictionary

import attrs
import torch

from offload.core.geometry import ComponentGeometry, Geometry
from offload.core.pages import PageAllocator
from offload.errors import RequestError
from offload.pool_memory import flat_view
from offload.spec import PoolSpec

Held: TypeAlias = dict[str, torch.Tensor | list[torch.Tensor]]
"""A pool's memory: by array name one tensor, or one for each layer."""

BITS: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By itemsize, the dtype as which elements are moved: bits, never numbers that could be converted."""


@attrs.define(eq=False, kw_only=True, init=False)
class Pool:
    """Pages of one spec in one memory. Made by `allocate` or `adopt`."""

    spec: PoolSpec
    geometry: Geometry
    device: torch.device

    tensors: Held
    """By array name, in the layout's shape. The pool's own, or the adopted ones."""

    pinned: bool = False
    """Whether its memory is page-locked."""

    pages: PageAllocator = attrs.field(init=False)
    """Hands out page ids. An engine with an allocator of its own leaves it alone."""

    matches: WeakKeyDictionary[Pool, tuple[tuple[ComponentGeometry, ComponentGeometry], ...]] = (
        attrs.field(init=False, factory=WeakKeyDictionary)
    )
    """By the other pool of a pair, which components go with which; found once."""

    _views: dict[tuple[str, int], torch.Tensor] = attrs.field(init=False, factory=dict)
    _flats: dict[tuple[str, int], torch.Tensor] = attrs.field(init=False, factory=dict)

    def __init__(self, *args: object, **named: object) -> None:
        name = type(self).__name__
        raise RequestError(
            f"{name} is not called to make one: {name}.allocate(spec, num_pages=...) makes its memory, "
            f"{name}.adopt(spec, tensors) takes an engine's own."
        )

    @classmethod
    def _made(
        cls,
        spec: PoolSpec,
        geometry: Geometry,
        device: torch.device,
        tensors: Held,
        *,
        pinned: bool = False,
    ) -> Self:
        pool = cls.__new__(cls)
        pool.__attrs_init__(
            spec=spec, geometry=geometry, device=device, tensors=tensors, pinned=pinned
        )
        return pool

    def __attrs_post_init__(self) -> None:
        """Make the allocator; its lock is shared with the table of pages in use."""
        self.pages = PageAllocator(self.geometry.num_pages, lock=threading.RLock())

    @property
    def num_pages(self) -> int:
        """How many pages it has."""
        return self.geometry.num_pages

    @property
    def num_layers(self) -> int:
        """How many layers each page has."""
        return self.spec.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, padding included."""
        return self.geometry.nbytes

    def layer_index(self, layer: int | str) -> int:
        """Return the index of a layer that is given by index or by name."""
        return self.spec.layer_index(layer)

    def view(self, component: str, layer: int) -> torch.Tensor:
        """Return one layer of a component as bits, in canonical axes whatever the storage order.

        Two pools that were checked as a pair have views of equal shape, apart from `P`, and equal
        dtype. Cached: the same tensor each time.

        Shapes:
            [P, T, H, D] with the storage's own strides; dtype from `BITS`.
        """
        key = (component, layer)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._make_view(self.geometry.component(component), layer)
        return view

    def flat(self, component: str, layer: int) -> tuple[torch.Tensor, ComponentGeometry]:
        """Return the bytes of the array that holds a layer, and where the component lies in them.

        `geometry.at(layer, page)` is an offset into this tensor. Cached.

        Shapes:
            [nbytes] of uint8.
        """
        part = self.geometry.component(component)
        key = (part.array, layer if part.separate else 0)
        flat = self._flats.get(key)
        if flat is None:
            array = next(array for array in self.geometry.arrays if array.name == part.array)
            flat = self._flats[key] = flat_view(self._tensor(part, layer), array.nbytes)
        return flat, part

    def _tensor(self, part: ComponentGeometry, layer: int) -> torch.Tensor:
        held = self.tensors[part.array]
        return held[layer] if isinstance(held, list) else held

    def _make_view(self, part: ComponentGeometry, layer: int) -> torch.Tensor:
        flat, _ = self.flat(part.name, layer)
        item = part.component.itemsize
        sizes = (self.num_pages, *(size for size, _ in part.axes))
        steps = (part.page_stride, *(step for _, step in part.axes))
        start = flat.storage_offset() + part.at(layer, 0)
        bits = torch.empty(0, dtype=BITS[item], device=flat.device)
        return bits.set_(
            flat.untyped_storage(), start // item, sizes, tuple(step // item for step in steps)
        )

    def __repr__(self) -> str:
        """Return kind, layout and sizes."""
        return (
            f"<{type(self).__name__} {self.spec.kind} {self.geometry.label!r}, "
            f"{self.num_pages} pages x {self.num_layers} layers, {self.nbytes} bytes, {self.device}>"
        )
