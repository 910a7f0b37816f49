"""What the launches of one component between two pools have in common: found once, and kept between batches."""

from __future__ import annotations

from functools import cached_property

import attrs
import torch

from offload.backend.addresses import address
from offload.backend.kernel_shape import Shape
from offload.backend.kernel_triton import WORDS
from offload.core.geometry import ComponentGeometry
from offload.pool import Pool

_OPTIONS = {
    "num_warps": 4,
    "enable_fp_fusion": False,  # no floats here; left open, Triton 3.9 warns about a default
}


@attrs.frozen(eq=False)
class OneLayer:
    """A layer's arrays as words, and where it begins in them, in units of the shape."""

    shape: Shape
    source: torch.Tensor
    destination: torch.Tensor
    bases: tuple[int, int]
    meta: dict[str, object]


@attrs.frozen(eq=False)
class AllLayers:
    """Where each layer begins, as addresses that a kernel reaches."""

    shape: Shape
    starts: list[int]
    ends: list[int]
    meta: dict[str, object]


@attrs.define(eq=False)
class Rows:
    """One component between two pools."""

    source: Pool
    destination: Pool
    ours: ComponentGeometry
    theirs: ComponentGeometry
    _layers: dict[int, OneLayer] = attrs.field(init=False, factory=dict)

    def layer(self, layer: int) -> OneLayer:
        """Return what a launch for one pool layer is given."""
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = self._layer(layer)
        return found

    def _layer(self, layer: int) -> OneLayer:
        source, _ = self.source.flat(self.ours.name, layer)
        destination, _ = self.destination.flat(self.theirs.name, layer)
        shape = Shape.of(self.ours, self.theirs, (*_start(source), *_start(destination)))
        bases = (
            self.ours.at(layer, 0) // shape.unit_bytes,
            self.theirs.at(layer, 0) // shape.unit_bytes,
        )
        words = _words(source, shape.dtype), _words(destination, shape.dtype)
        return OneLayer(shape, *words, bases, self._meta(shape))

    @cached_property
    def all(self) -> AllLayers:
        """What launches for several layers are given; one variant serves any of them.

        Raises:
            GeometryError: The device does not reach a pool as one range.
        """
        layers = range(self.ours.num_layers)
        starts = [address(self.source, self.ours, n) + self.ours.at(n, 0) for n in layers]
        ends = [address(self.destination, self.theirs, n) + self.theirs.at(n, 0) for n in layers]
        shape = Shape.of(self.ours, self.theirs, (*starts, *ends))
        word = {"WORD": WORDS[shape.dtype.itemsize], "ALIGNMENT": shape.unit_bytes}
        return AllLayers(shape, starts, ends, self._meta(shape) | word)

    def _meta(self, shape: Shape) -> dict[str, object]:
        return shape.constants(self.ours.page_stride, self.theirs.page_stride) | _OPTIONS


def _start(flat: torch.Tensor) -> tuple[int, int]:
    """Return what a tensor's words must divide: its address, and its place in its storage."""
    return flat.data_ptr(), int(flat.storage_offset())


def _words(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as words; a tail that fills none belongs to no row."""
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
