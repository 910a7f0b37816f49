"""What the kernels are told of a copy: its rows, and the widest words that they divide into."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, prod

import attrs
import torch

from offload.core.geometry import ComponentGeometry, pair_alignment, pair_runs

MAX_PROGRAMS = 16
"""Programs of one launch. Each keeps a tile of 16 KiB in flight, and a link of 55 GB/s with 1.2 us of latency
wants 64 KiB; vLLM takes 12 and SGLang 2 bigger ones. Few, so that compute keeps its multiprocessors."""

_TILE = 2048  # words: 16 KiB, and 16 words for each of 128 threads, so pairs of words stay together
_WIDEST = 16
_WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 1: torch.uint8}


@attrs.frozen
class Shape:
    """One component's rows as the kernels count them."""

    unit_bytes: int
    """Bytes of the unit in which rows start: one word or two."""

    dtype: torch.dtype
    counts: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]
    """Bytes on each side between rows, one pair per count."""

    nbytes: int
    """Bytes of a row."""

    @classmethod
    def of(
        cls, source: ComponentGeometry, destination: ComponentGeometry, starts: Iterable[int]
    ) -> Shape:
        """Return the shape of the rows of arrays that start at these addresses."""
        runs = pair_runs(source, destination)
        loops = (*([(1, (0, 0))] * (3 - len(runs.loops))), *runs.loops)
        widest = gcd(_WIDEST, pair_alignment(source, destination), *starts)
        unit = next(size for size in _WORDS if widest % size == 0)
        counts, strides = zip(*loops, strict=True)
        return cls(unit, _WORDS[unit], counts, strides, runs.nbytes)

    def constants(self, source_page: int, destination_page: int) -> dict[str, object]:
        """Return the kernels' compile-time arguments; the page strides are given in bytes."""
        unit, block = self.unit_bytes, self._block
        named: dict[str, object] = {
            "SOURCE_PAGE": source_page // unit,
            "DESTINATION_PAGE": destination_page // unit,
            "WIDTH": self._width,
            "UNIT": unit // self.dtype.itemsize,
            "ROWS": _TILE // block,
            "BLOCK": block,
        }
        for axis, (count, (source, destination)) in enumerate(
            zip(self.counts, self.strides, strict=True)
        ):
            named[f"COUNT_{axis}"] = count
            named[f"SOURCE_{axis}"] = source // unit
            named[f"DESTINATION_{axis}"] = destination // unit
        return named

    def programs(self, num_pages: int, num_layers: int = 1) -> int:
        """Return how many programs to start."""
        block = self._block
        rows = -(-num_pages * prod(self.counts) // (_TILE // block))
        return max(1, min(MAX_PROGRAMS, num_layers * rows * -(-self._width // block)))

    @property
    def _width(self) -> int:
        """Words of a row."""
        return self.nbytes // self.dtype.itemsize

    @property
    def _block(self) -> int:
        """Words of a row that a tile covers."""
        return min(_TILE, 1 << (self._width - 1).bit_length())
