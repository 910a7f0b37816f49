"""Device and host memory: tensors with a geometry, and the allocator of their pages.

A pool owns its tensors when it allocated them, and borrows them when it adopted an engine's. Every way of
addressing them comes from one geometry, whose strides were checked against the tensors' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, TypeAlias

import torch

from offload import registry
from offload.arguments import expect, positive
from offload.core.axes import Axes
from offload.core.geometry import ComponentGeometry, Geometry
from offload.core.kinds import Layout
from offload.core.layout import device_geometry, host_geometry
from offload.core.page_ids import as_pages
from offload.errors import GeometryError, shown
from offload.pool_adopt import adopt_device, adopt_host
from offload.pool_allocate import device_tensors, host_tensors
from offload.pool_base import BITS, Held, Pool
from offload.pool_memory import naming_bytes, usable_device
from offload.pool_pair import check_pair
from offload.spec import PoolSpec

__all__ = ["BITS", "DevicePool", "HostPool", "Pool", "check_pair"]

Tensors: TypeAlias = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""By array name, one tensor, or a list of one tensor per layer."""


class DevicePool(Pool):
    """Pages where the model computes. Made by `allocate` or `adopt`."""

    @classmethod
    def allocate(
        cls, spec: PoolSpec, *, num_pages: int, device: str | torch.device = "cpu"
    ) -> Self:
        """Return a pool of zeroed pages, one tensor per component and layer.

        Shapes:
            tensors[component][layer]: [P*T, H, D] (mha), [P*T, 1, C] (mla), [P*R, B] (rows, R rows a
            page), [P*ring_size, *shape] (state).

        Raises:
            RequestError: There is no such device here.
            OutOfMemoryError: It has too little memory.
        """
        call = "DevicePool.allocate"
        expect(call, "spec", spec, PoolSpec, "a PoolSpec")
        expect(
            call, "device", device, (str, int, torch.device), "a device such as 'cuda:0' or 'cpu'"
        )
        positive(call, num_pages=num_pages)
        where = usable_device(call, device)
        geometry = device_geometry(
            spec.kind, spec.parts, num_layers=spec.num_layers, num_pages=num_pages
        )
        nbytes = num_pages * spec.page_bytes
        place = "this machine" if where.type == "cpu" else str(where)
        with naming_bytes(call, num_pages=num_pages, nbytes=nbytes, where=place):
            tensors = device_tensors(spec, num_pages, where)
            return cls._made(spec, geometry, where, tensors)

    @classmethod
    def adopt(cls, spec: PoolSpec, tensors: Tensors, *, axes: str | None = None) -> Self:
        """Return a pool over an engine's own tensors, which it borrows.

        Args:
            tensors: By component. With a `2` in `axes` there is one entry, of any name.
            axes: Dimensions of each tensor, such as `"p 2 t h d"`. None: tokens or pages first, as
                `allocate` makes them, with the layers in front where one tensor holds them all.

        Raises:
            GeometryError: Components, shapes, strides or dtypes are not those of `spec`, or two tensors
                share bytes.
        """
        expect("DevicePool.adopt", "spec", spec, PoolSpec, "a PoolSpec")
        geometry, held = adopt_device(spec, tensors, None if axes is None else Axes(axes))
        return cls._made(spec, geometry, _device_of(held), held)


class HostPool(Pool):
    """Pages in host memory. Made by `like`, `allocate` or `adopt`."""

    @classmethod
    def like(
        cls,
        device: DevicePool,
        *,
        num_pages: int,
        layout: str | Layout = Layout.PAGE_FIRST,
        page_align: int | None = None,
    ) -> Self:
        """Return a host pool for a device pool's pages; pinned when that is on a GPU.

        Pinned memory is near that GPU. Pinning is said to take about 0.1 s per GB: call this before serving.
        It counts as shared memory against a cgroup's limit, and goes with the last reference to its tensors.
        """
        expect("HostPool.like", "device", device, DevicePool, "a DevicePool")
        pinned = device.device.type == "cuda"
        return cls._allocated(
            device.spec,
            num_pages=num_pages,
            layout=layout,
            pinned=pinned,
            page_align=page_align,
            near=device.device.index if pinned else None,
        )

    @classmethod
    def allocate(
        cls,
        spec: PoolSpec,
        *,
        num_pages: int,
        layout: str | Layout | None = None,
        axes: str | None = None,
        pinned: bool | None = None,
        page_align: int | None = None,
    ) -> Self:
        """Return a host pool whose pages read as zero and become resident when touched.

        Args:
            layout: None: `page_first`, unless `axes` is given.
            axes: An order without a name, such as `"p l h t d"`, in place of `layout`.
            pinned: None: where there is a CUDA device. Near the current one; `like` takes the pool's.
            page_align: Pad the page stride to a multiple of this many bytes (page-major orders).

        Shapes:
            tensors[component]: as `offload.core.layout` lists by layout.

        Raises:
            UnknownNameError: No layout has that name.
            GeometryError: A size is wrong, both `layout` and `axes` were given, or `page_align` on an
                order that is not page-major.
            RequestError: `pinned=True`, and there is no CUDA.
            OutOfMemoryError: This machine has too little memory.
            CudaError: CUDA refuses to lock it, for another reason.
        """
        return cls._allocated(
            spec,
            num_pages=num_pages,
            layout=layout,
            axes=axes,
            pinned=pinned,
            page_align=page_align,
        )

    @classmethod
    def _allocated(
        cls,
        spec: PoolSpec,
        *,
        num_pages: int,
        layout: str | Layout | None,
        axes: str | None = None,
        pinned: bool | None,
        page_align: int | None,
        near: int | None = None,
    ) -> Self:
        """Return a host pool, near this GPU if it is pinned (None: the current one)."""
        call = "HostPool.allocate"
        expect(call, "spec", spec, PoolSpec, "a PoolSpec")
        expect(call, "pinned", pinned, (bool, type(None)), "True, False or None")
        positive(call, num_pages=num_pages)
        positive(call, page_align=1 if page_align is None else page_align)
        pinned = torch.cuda.is_available() if pinned is None else pinned
        geometry = host_geometry(
            spec.kind,
            spec.parts,
            _order(call, _default(layout, axes), axes),
            num_layers=spec.num_layers,
            num_pages=num_pages,
            page_align=page_align or 1,
        )
        _check_padding(geometry)
        nbytes = num_pages * geometry.page_stride
        with naming_bytes(call, num_pages=num_pages, nbytes=nbytes, where="this machine"):
            geometry, tensors = host_tensors(spec, geometry, pinned=pinned, near=near)
            return cls._made(spec, geometry, torch.device("cpu"), tensors, pinned=pinned)

    @classmethod
    def adopt(
        cls,
        spec: PoolSpec,
        tensors: Tensors,
        *,
        layout: str | Layout | None = None,
        axes: str | None = None,
    ) -> Self:
        """Return a host pool over tensors that someone else owns.

        Args:
            layout: The tensors are dense in this order; the page stride alone may be longer.
            axes: Or: their dimensions, whatever the strides.

        Raises:
            GeometryError: Components, shapes, strides or dtypes are not those of `spec`, or two tensors
                share bytes; or not one of `layout` and `axes` was given.
        """
        expect("HostPool.adopt", "spec", spec, PoolSpec, "a PoolSpec")
        order = _order("HostPool.adopt", layout, axes)
        geometry, held = adopt_host(spec, tensors, order)
        pinned = torch.cuda.is_available() and all(tensor.is_pinned() for tensor in _all(held))
        return cls._made(spec, geometry, _device_of(held), held, pinned=pinned)

    @property
    def page_stride(self) -> int:
        """Bytes of host memory that one page takes, over all layers and components, with padding."""
        return self.geometry.page_stride

    def page_memory(self, page: int) -> list[tuple[int, int]]:
        """Return (address, nbytes) of every contiguous range of a page, padding left out.

        Raises:
            RequestError: There is no such page.
        """
        (page,) = as_pages([page], self.num_pages, what="host page").tolist()
        spans: list[tuple[int, int]] = []
        for part in self.geometry.components:
            nbytes = part.nbytes * self.num_layers if part.whole_page else part.runs.nbytes
            layers = range(1 if part.whole_page else self.num_layers)
            for layer in layers:
                flat, _ = self.flat(part.name, layer)
                start = flat.data_ptr() + part.at(layer, page)
                ends = [0] if part.whole_page else _offsets(part)
                spans += [(start + offset, nbytes) for offset in ends]
        return spans


def _default(layout: str | Layout | None, axes: str | None) -> str | Layout | None:
    return Layout.PAGE_FIRST if layout is None and axes is None else layout


def _order(call: str, layout: str | Layout | None, axes: str | None) -> Layout | Axes:
    """Return the one order that was given."""
    if (layout is None) == (axes is None):
        raise GeometryError(
            call,
            expected={"order": "one of layout= and axes="},
            got={
                "order": "neither"
                if axes is None
                else f"layout={shown(layout)} and axes={shown(axes)}"
            },
            remedy="Pass one, such as layout='page_first' or axes='p l t h d'.",
        )
    return Axes("" if axes is None else axes) if layout is None else registry.layout(layout)


def _check_padding(geometry: Geometry) -> None:
    """Refuse a page stride that is no whole number of elements."""
    for part in geometry.components:
        if part.page_stride % part.component.itemsize:
            raise GeometryError(
                "HostPool.allocate",
                expected={"page_align": f"a multiple of {part.component.itemsize}, one element"},
                got={"page_align": part.page_stride},
            )


def _offsets(part: ComponentGeometry) -> list[int]:
    offsets = [0]
    for count, steps in part.runs.loops:
        offsets = [base + index * steps[0] for base in offsets for index in range(count)]
    return offsets


def _all(held: Held) -> list[torch.Tensor]:
    return [t for each in held.values() for t in (each if isinstance(each, list) else [each])]


def _device_of(held: Held) -> torch.device:
    devices = {tensor.device for tensor in _all(held)}
    if len(devices) > 1:
        raise GeometryError(
            "adopted tensors",
            expected={"device": "one for all"},
            got={"device": ", ".join(sorted(map(str, devices)))},
        )
    return devices.pop()
