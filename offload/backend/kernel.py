"""io backend `kernel`: one Triton launch per component, of a layer or of several; host memory is used in place.

The kernel moves words. The widest that all addresses, strides and lengths of a launch divide into is taken:
16 bytes (two 8-byte words at once), 8, 4, or single bytes where an adopted pool begins at an odd address.
Page ids are checked at submit, because nothing checks them on the device.

Several layers go in one launch where nobody follows them one by one: a launch costs the issuing thread more
than a small layer takes to move. Every variant is launched once, for no pages, when a scheduler opens:
compiling it and loading its code would stall the first request, and may not happen while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import cast

import attrs
import numpy as np
import torch

from offload.backend.addresses import addresses
from offload.backend.base import PoolCopy, Prepared
from offload.backend.direct import DirectCopy
from offload.backend.kernel_rows import Rows
from offload.backend.kernel_triton import copy_layers, copy_rows
from offload.core.kinds import Direction
from offload.core.plan import Runs, coalesce, copy_ops
from offload.driver.cuda_calls import CudaCalls, Launch, Spans, Words, here
from offload.pool import DevicePool, HostPool, Pool


class KernelBackend:
    """Gathers and scatters rows with Triton kernels."""

    name = "kernel"

    def __init__(self) -> None:
        self._rows: dict[tuple[Pool, Pool], tuple[Rows, ...]] = {}
        self._warm: list[Launch] = []
        """Launches for no pages: a stream may still have to pass them."""

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> KernelCopy:
        """Put the page ids where the kernel can read them; the rest is kept from batch to batch."""
        both = PoolCopy.of(device, host, direction, runs)
        key = (both.source, both.destination)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = rows_of(both)
        return KernelCopy.of(both, rows)

    def copy_layers(self, prepared: Prepared, layers: Sequence[int]) -> None:
        """Launch one kernel per component for all these pool layers."""
        cast("KernelCopy", prepared).copy_layers(layers)

    def warm_up(self, device: DevicePool, host: HostPool, direction: Direction) -> None:
        """Launch every variant that these pools can need, for no pages."""
        page = np.zeros(1, np.int64)
        copy = self.prepare(device, host, direction, coalesce(page, page))
        self.warm_up_copy(copy, layers_at_once=direction is Direction.BACKUP)

    def warm_up_copy(self, copy: KernelCopy, *, layers_at_once: bool) -> None:
        """Launch every variant of one copy, for no pages."""
        for launch in copy.variants(layers_at_once=layers_at_once):
            self._warm.append(launch)
            here().launch(launch)


def rows_of(both: PoolCopy) -> tuple[Rows, ...]:
    """Return the rows of each component.

    Raises:
        GeometryError: The device does not reach a pool as one range, and a row may cross its chunks.
    """
    rows = tuple(Rows(both.source, both.destination, *pair) for pair in both.pairs)
    for each in rows:
        if each.ours.breaks or each.theirs.breaks:
            each.all  # noqa: B018 - looks at every address
    return rows


@attrs.define(eq=False)
class KernelCopy(DirectCopy):
    """Prepared copies of `kernel`. Owns the page ids and every table that a launch was given."""

    _rows: tuple[Rows, ...]
    _calls: CudaCalls
    _source_pages: torch.Tensor
    _destination_pages: torch.Tensor
    _kept: list[Launch] = attrs.field(init=False, factory=list)

    @classmethod
    def of(cls, both: PoolCopy, rows: tuple[Rows, ...]) -> KernelCopy:
        """Return the copies, their page ids where a kernel reads them."""
        calls = here()
        pages = [calls.host_numbers(np.ascontiguousarray(side)) for side in both.pages]
        return cls(both, rows, calls, *pages)

    def copy(self, layer: int) -> None:
        """Launch one kernel per component on the current stream."""
        for index in range(self.num_ops(layer)):
            self._start(self._one(index, layer, self._both.runs.num_pages))

    def copy_layers(self, layers: Sequence[int]) -> None:
        """Launch one kernel per component for several pool layers."""
        for index in range(self.num_ops(layers[0])):
            self._start(self._several(index, layers, self._both.runs.num_pages))

    def num_ops(self, layer: int) -> int:
        """Return the number of launches."""
        return len(self._rows) if self._both.runs.num_pages else 0

    def variants(self, *, layers_at_once: bool) -> Iterable[Launch]:
        """Return one launch, for no pages, of each variant that these pools can need."""
        found: dict[Hashable, Launch] = {}
        for index, rows in enumerate(self._rows):
            layers = range(rows.ours.num_layers)
            launches = [self._one(index, layer, 0) for layer in layers]
            if layers_at_once:
                launches.append(self._several(index, layers, 0))
            found |= {variant(launch): launch for launch in launches}
        return found.values()

    def _start(self, launch: Launch) -> None:
        self._kept.append(launch)
        self._calls.launch(launch)

    def _one(self, index: int, layer: int, num_pages: int) -> Launch:
        """Return the launch for one component of one layer."""
        rows = self._rows[index].layer(layer)
        pages = self._source_pages, self._destination_pages
        return Launch(
            kernel=copy_rows,
            grid=(rows.shape.programs(num_pages),),
            args=(rows.source, rows.destination, *pages, num_pages, *rows.bases),
            meta=rows.meta,
            spans=partial(_spans, self._both, index, [layer] if num_pages else []),
        )

    def _several(self, index: int, layers: Sequence[int], num_pages: int) -> Launch:
        """Return the launch for one component of several layers."""
        rows, numbers = self._rows[index].all, self._calls.host_numbers
        return Launch(
            kernel=copy_layers,
            grid=(rows.shape.programs(num_pages, len(layers)),),
            args=(
                numbers(np.array([rows.starts[layer] for layer in layers], np.int64)),
                numbers(np.array([rows.ends[layer] for layer in layers], np.int64)),
                self._source_pages,
                self._destination_pages,
                num_pages,
                len(layers),
            ),
            meta=rows.meta,
            spans=partial(_spans, self._both, index, layers if num_pages else []),
        )


def variant(launch: Launch) -> Hashable:
    """Return what decides which machine code a launch runs."""
    tensors = [arg for arg in launch.args if isinstance(arg, torch.Tensor)]
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    return launch.kernel, kinds, tuple((name, str(each)) for name, each in launch.meta.items())


def _spans(both: PoolCopy, index: int, layers: Sequence[int]) -> tuple[Spans, Spans]:
    """Return what the rows of one component read and write."""
    none: Words = np.zeros(0, np.uint64)
    found = [(none, none, none)]
    for layer in layers:
        ops = copy_ops(both.runs, *both.pairs[index], layer)
        found.append(addresses(both, index, layer, ops))
    source, destination, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
    return Spans(source, sizes), Spans(destination, sizes)
