"""Whether adopted tensors have bytes of their own: two copies into shared bytes would race."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import torch

from offload.errors import GeometryError

_MAX_WORK = 1_000_000
"""Steps of the search for a shared byte: a millisecond. Tensors cut out of one block need a handful; two for
which this is not enough count as sharing."""


@attrs.frozen(eq=False)
class _Extent:
    """One tensor as numpy sees it, by address and strides alone: its memory is never read."""

    name: str
    layer: int | None
    start: int
    end: int
    bytes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

    def __str__(self) -> str:
        return f"{self.name!r}" if self.layer is None else f"layer {self.layer} of {self.name!r}"

    def meets(self, other: _Extent) -> bool:
        """Return whether some byte belongs to both."""
        try:
            return np.shares_memory(self.bytes, other.bytes, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except RuntimeError:  # numpy calls it too hard
            return True


@attrs.frozen
class _Memory:
    """What numpy asks of an object that describes memory."""

    __array_interface__: dict[str, object]


def check_apart(held: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
    """Refuse arrays, or layers of one, that share bytes.

    Raises:
        GeometryError: Names the first two that do.
    """
    open_: list[_Extent] = []
    for extent in sorted(_extents(held), key=lambda each: each.start):
        open_ = [other for other in open_ if other.end > extent.start]
        for other in open_:
            if extent.meets(other):
                raise GeometryError(
                    f"adopted tensors: {other} and {extent}",
                    expected={"bytes": "of their own"},
                    got={"bytes": "shared"},
                    remedy="Adopt each cache once: layers that share one are a single layer of the "
                    "pool (Pair(layers=...) says of which model layer), and where values are the "
                    "keys the pool has no values (v_head_dim=0).",
                )
        open_.append(extent)


def _extents(held: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Iterator[_Extent]:
    for name, each in held.items():
        if isinstance(each, torch.Tensor):
            yield _extent(name, None, each)
            continue
        for layer, tensor in enumerate(each):
            yield _extent(name, layer, tensor)


def _extent(name: str, layer: int | None, tensor: torch.Tensor) -> _Extent:
    item, start = tensor.element_size(), tensor.data_ptr()
    strides = tuple(step * item for step in tensor.stride())
    memory = _Memory(
        {
            "data": (start, True),
            "shape": (*tensor.shape, item),
            "strides": (*strides, 1),
            "typestr": "|u1",
            "version": 3,
        }
    )
    span = sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)) + item
    return _Extent(name, layer, start, start + span, np.asarray(memory))
