"""io backend `kernel`: one Triton launch per layer and component; host memory is read and written in place.

The kernel moves words. The widest that all addresses, strides and lengths of a launch divide into is taken:
16 bytes (two 8-byte words at once), 8, 4, or single bytes where an adopted pool begins at an odd address.
Page ids are checked at submit, because nothing checks them on the device.
"""

from __future__ import annotations

from functools import partial
from math import gcd, prod

import attrs
import torch

from offload.backend.addresses import addresses
from offload.backend.base import PoolCopy
from offload.backend.direct import DirectCopy
from offload.backend.kernel_triton import copy_rows
from offload.core.geometry import ComponentGeometry, pair_alignment, pair_runs
from offload.core.kinds import Direction
from offload.core.plan import Runs, copy_ops
from offload.driver.cuda_calls import CudaCalls, Launch, Spans, here
from offload.pool import DevicePool, HostPool

MAX_PROGRAMS = 16
"""Programs of one launch. Each keeps a tile of 16 KiB in flight, and a link of 55 GB/s with 1.2 us of latency
wants 64 KiB; vLLM takes 12 and SGLang 2 bigger ones. Few, so that compute keeps its multiprocessors."""

_TILE = 2048  # words: 16 KiB, and 16 words for each of 128 threads, so pairs of words stay together
_WARPS = 4
_WIDEST = 16
_WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 1: torch.uint8}


class KernelBackend:
    """Gathers and scatters rows with a Triton kernel."""

    name = "kernel"

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> KernelCopy:
        """Put the page ids where the kernel can read them."""
        both = PoolCopy.of(device, host, direction, runs)
        calls = here()
        source, destination = both.pages
        return KernelCopy(both, calls, calls.host_numbers(source), calls.host_numbers(destination))


@attrs.frozen
class Shape:
    """One component's rows as the kernel counts them."""

    unit_bytes: int
    """Bytes of the unit in which rows start: one word or two."""

    dtype: torch.dtype
    counts: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]
    """Bytes on each side between rows, one pair per count."""

    nbytes: int
    """Bytes of a row."""

    @classmethod
    def of(cls, source: ComponentGeometry, destination: ComponentGeometry, start: int) -> Shape:
        """Return the shape of rows that start at multiples of what divides `start` as well."""
        runs = pair_runs(source, destination)
        loops = (*([(1, (0, 0))] * (3 - len(runs.loops))), *runs.loops)
        widest = gcd(pair_alignment(source, destination), start)
        unit = next(size for size in _WORDS if widest % size == 0)
        counts, strides = zip(*loops, strict=True)
        return cls(unit, _WORDS[unit], counts, strides, runs.nbytes)

    def constants(self, source_page: int, destination_page: int) -> dict[str, object]:
        """Return the kernel's compile-time arguments; the page strides are given in bytes."""
        word = self.dtype.itemsize
        width = self.nbytes // word
        block = min(_TILE, 1 << (width - 1).bit_length())
        unit = self.unit_bytes
        named: dict[str, object] = {
            "SOURCE_PAGE": source_page // unit,
            "DESTINATION_PAGE": destination_page // unit,
            "WIDTH": width,
            "UNIT": unit // word,
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

    def programs(self, num_pages: int) -> int:
        """Return how many programs to start."""
        width = self.nbytes // self.dtype.itemsize
        block = min(_TILE, 1 << (width - 1).bit_length())
        rows = _TILE // block
        tiles = -(-num_pages * prod(self.counts) // rows) * -(-width // block)
        return min(MAX_PROGRAMS, tiles)


@attrs.define(eq=False)
class KernelCopy(DirectCopy):
    """Prepared copies of `kernel`. Owns the page ids and every view that a launch was given."""

    _calls: CudaCalls
    _source_pages: torch.Tensor
    _destination_pages: torch.Tensor
    _kept: list[Launch] = attrs.field(init=False, factory=list)

    def copy(self, layer: int) -> None:
        """Launch one kernel per component on the current stream."""
        if self._both.runs.num_pages:
            for index in range(len(self._both.pairs)):
                launch = self._launch(index, layer)
                self._kept.append(launch)
                self._calls.launch(launch)

    def num_ops(self, layer: int) -> int:
        """Return the number of launches."""
        return len(self._both.pairs) if self._both.runs.num_pages else 0

    def _launch(self, index: int, layer: int) -> Launch:
        both = self._both
        ours, theirs = both.pairs[index]
        source, _ = both.source.flat(ours.name, layer)
        destination, _ = both.destination.flat(theirs.name, layer)
        shape = Shape.of(ours, theirs, _alignment(source, destination))
        unit, num_pages = shape.unit_bytes, both.runs.num_pages
        return Launch(
            kernel=copy_rows,
            grid=(shape.programs(num_pages),),
            args=(
                _words(source, shape.dtype),
                _words(destination, shape.dtype),
                self._source_pages,
                self._destination_pages,
                num_pages,
                ours.at(layer, 0) // unit,
                theirs.at(layer, 0) // unit,
            ),
            meta={
                **shape.constants(ours.page_stride, theirs.page_stride),
                "num_warps": _WARPS,
                "enable_fp_fusion": False,  # no floats here; left open, Triton 3.9 warns about a default
            },
            spans=partial(_spans, both, index, layer),
        )


def _spans(both: PoolCopy, index: int, layer: int) -> tuple[Spans, Spans]:
    """Return what the rows of one component read and write."""
    ops = copy_ops(both.runs, *both.pairs[index], layer)
    source, destination, sizes = addresses(both, index, layer, ops)
    return Spans(source, sizes), Spans(destination, sizes)


def _alignment(*tensors: torch.Tensor) -> int:
    """Return what divides the addresses of all tensors, up to the widest word."""
    starts = (each for t in tensors for each in (t.data_ptr(), t.storage_offset()))
    return gcd(_WIDEST, *starts)


def _words(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as words; a tail that fills none belongs to no row."""
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
