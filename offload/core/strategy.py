"""The strategy table: which copy a (kind, layout, io backend, direction) gets, or why it gets none.

`TABLE` is total. A cell is a strategy or a rejection; a rejection is a layout without meaning for the
kind, a driver that is missing, or a column that is not built yet. What depends on sizes is in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import product

import attrs

from offload.core.axes import Axes
from offload.core.checks import CHECKS, worst_runs
from offload.core.geometry import Geometry, matched
from offload.core.kinds import AUTO, Direction, IoBackend, Layout, PoolKind
from offload.core.layout import host_geometry
from offload.errors import GeometryError, UnsupportedPairError


class Strategy(StrEnum):
    """How a pair is copied."""

    PAGE_RUNS = "page_runs"
    """One copy per maximal run of pages that are adjacent on both sides."""

    TOKEN_RUNS = "token_runs"
    """One copy per token row of a page, or fewer where rows lie together."""

    ROW_KERNEL = "row_kernel"
    """A GPU kernel gathers or scatters whole token rows."""

    HEAD_KERNEL = "head_kernel"
    """A GPU kernel gathers or scatters one head of a token row."""

    STAGED_ROWS = "staged_rows"
    """Rows are put in order in a staging ring on the device, between few large copies."""

    STAGED_HEADS = "staged_heads"
    """The same, one head of a row at a time."""

    INDEX_COPY = "index_copy"
    """Indexed copies between host tensors."""


@attrs.frozen
class Rejection:
    """Why a pair is not copied."""

    reason: str
    """One sentence without its full stop."""


Cell = Strategy | Rejection

BUILT = frozenset(IoBackend) - {IoBackend.KERNEL_ASCEND}
"""The columns that this version can run. Add one here when its backend exists."""

PAGE_RUNS = Strategy.PAGE_RUNS
TOKEN_RUNS = Strategy.TOKEN_RUNS
ROW_KERNEL = Strategy.ROW_KERNEL
HEAD_KERNEL = Strategy.HEAD_KERNEL
STAGED_ROWS = Strategy.STAGED_ROWS
STAGED_HEAD = Strategy.STAGED_HEADS
INDEX_COPY = Strategy.INDEX_COPY
NO_ASCEND = Rejection("it needs an Ascend driver, and none is registered")
NO_HEADS_ = Rejection("page_head splits token rows by head, and an mla row has no heads")
NO_HEAD_R = Rejection("page_head splits token rows by head, and an opaque row has no heads")
NO_PIECES = Rejection(
    "page_first_kv_split stores pieces of a row apart, and an opaque row has none"
)

Row = tuple[Cell, ...]

# fmt: off
_MHA: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (PAGE_RUNS, TOKEN_RUNS, HEAD_KERNEL, STAGED_HEAD, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_KV_SPLIT: (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
}
_MLA: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (NO_HEADS_, NO_HEADS_,  NO_HEADS_,   NO_HEADS_,   NO_HEADS_,  NO_HEADS_),
    Layout.PAGE_FIRST_KV_SPLIT: (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
}
_OPAQUE: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (NO_HEAD_R, NO_HEAD_R,  NO_HEAD_R,   NO_HEAD_R,   NO_HEAD_R,  NO_HEAD_R),
    Layout.PAGE_FIRST_KV_SPLIT: (NO_PIECES, NO_PIECES,  NO_PIECES,   NO_PIECES,   NO_PIECES,  NO_PIECES),
}
# fmt: on

# Both directions of a kind take the same copies, with source and destination exchanged.
_MATRICES: Mapping[tuple[PoolKind, Direction], Mapping[Layout, Row]] = {
    (PoolKind.MHA, Direction.LOAD): _MHA,
    (PoolKind.MHA, Direction.BACKUP): _MHA,
    (PoolKind.MLA, Direction.LOAD): _MLA,
    (PoolKind.MLA, Direction.BACKUP): _MLA,
    (PoolKind.ROWS, Direction.LOAD): _OPAQUE,
    (PoolKind.ROWS, Direction.BACKUP): _OPAQUE,
    (PoolKind.STATE, Direction.LOAD): _OPAQUE,
    (PoolKind.STATE, Direction.BACKUP): _OPAQUE,
}
_COLUMNS = {
    io_backend: index
    for index, io_backend in enumerate(
        (
            IoBackend.DIRECT,
            IoBackend.MEMCPY_BATCH,
            IoBackend.KERNEL,
            IoBackend.STAGED,
            IoBackend.CPU,
            IoBackend.KERNEL_ASCEND,
        )
    )
}

Key = tuple[PoolKind, Layout, IoBackend, Direction]


def build_table(built: frozenset[IoBackend]) -> dict[Key, Cell]:
    """Return the whole table, with the strategies of columns outside `built` as rejections."""
    table: dict[Key, Cell] = {}
    for kind, layout, io_backend, direction in product(PoolKind, Layout, IoBackend, Direction):
        cell = _MATRICES[kind, direction][layout][_COLUMNS[io_backend]]
        if isinstance(cell, Strategy) and io_backend not in built:
            cell = Rejection(f"this version has no {io_backend.value!r} copies yet")
        table[kind, layout, io_backend, direction] = cell
    return table


TABLE: Mapping[Key, Cell] = build_table(BUILT)
"""Every (kind, layout, io backend, direction)."""

# ---- what can run where, and what `auto` prefers -----------------------------------------------------

GPU_ONLY = frozenset({IoBackend.MEMCPY_BATCH, IoBackend.KERNEL, IoBackend.STAGED})
HOST_ONLY = frozenset({IoBackend.CPU})
PINNED_ONLY = frozenset({IoBackend.KERNEL})
"""Read and write host memory in place, from the GPU."""

LONG_RUN = 64 * 1024
"""Bytes. From here on one copy call per run keeps up with the link, so copy engines beat kernels."""

_ENGINES_FIRST = (
    IoBackend.MEMCPY_BATCH,
    IoBackend.DIRECT,
    IoBackend.KERNEL,
    IoBackend.STAGED,
    IoBackend.CPU,
)
_KERNELS_FIRST = (
    IoBackend.KERNEL,
    IoBackend.STAGED,
    IoBackend.MEMCPY_BATCH,
    IoBackend.CPU,
    IoBackend.DIRECT,
)

Column = Callable[[PoolKind, Direction, Geometry, Geometry], "str | Rejection"]
"""What a registered io backend says of a pair: its strategy's name, or a rejection."""


def auto_order(host: Geometry, device: Geometry) -> tuple[IoBackend, ...]:
    """Return the io backends in the order in which `auto` tries them.

    Runs of `LONG_RUN` bytes or more go to copy engines first, shorter ones to kernels. Registered io
    backends are used when they are named, never by `auto`.
    """
    _, runs = worst_runs(matched(host, device))
    return _ENGINES_FIRST if runs.nbytes >= LONG_RUN else _KERNELS_FIRST


@attrs.frozen
class Table:
    """The table with what was registered, on one sort of device."""

    cells: Mapping[Key, Cell] = TABLE
    columns: Mapping[str, Column] = {}
    """Io backends that were registered, by name."""

    orders: Mapping[str, Axes] = {}
    """Layouts that were registered, by name."""

    on: str | None = None
    """`cpu`, `cuda`, or None: whatever the device. Rejects what cannot run there."""

    pinned: bool = True
    """Whether the host pool is page-locked."""

    @property
    def names(self) -> tuple[str, ...]:
        """All io backends, in the table's order."""
        return tuple(dict.fromkeys([*(each.value for each in IoBackend), *self.columns]))

    def judge(
        self,
        kind: PoolKind,
        direction: Direction,
        io_backend: str,
        host: Geometry,
        device: Geometry,
    ) -> str | Rejection:
        """Return the strategy of a pair, or why it has none."""
        if io_backend in self.columns:
            return self.columns[io_backend](kind, direction, host, device)
        name = IoBackend(io_backend)
        cell = self.cells[kind, host.layout or _nearest(host, device), name, direction]
        if isinstance(cell, Rejection):
            return cell
        if misplaced := _misplaced(name, self.on, self.pinned):
            return Rejection(misplaced)
        check = CHECKS.get(name)
        reason = check(matched(host, device), name.value) if check else None
        return cell if reason is None else Rejection(reason)

    def choose(
        self, kind: PoolKind, direction: Direction, host: Geometry, device: Geometry
    ) -> IoBackend:
        """Return what `auto` stands for.

        Raises:
            UnsupportedPairError: No io backend copies this pair.
        """
        for io_backend in auto_order(host, device):
            if isinstance(self.judge(kind, direction, io_backend, host, device), str):
                return io_backend
        raise self.refusal(
            kind, direction, AUTO, host, device, "no io backend copies this pair here"
        )

    def resolve(
        self,
        kind: PoolKind,
        direction: Direction,
        io_backend: str,
        host: Geometry,
        device: Geometry,
    ) -> str:
        """Return how this pair is copied, or raise with what would work.

        Args:
            io_backend: A known name, not `auto`. It is never replaced by another.
            host: Axis order, sizes and strides of the host pool.
            device: The device pool's own; an adopted pool need not be layer-major.

        Raises:
            UnsupportedPairError: The cell is a rejection, or a size check failed. Carries the io
                backends and the layouts that do work.
        """
        verdict = self.judge(kind, direction, io_backend, host, device)
        if isinstance(verdict, Rejection):
            raise self.refusal(kind, direction, io_backend, host, device, verdict.reason)
        return verdict

    def io_backends(
        self, kind: PoolKind, direction: Direction, host: Geometry, device: Geometry
    ) -> tuple[str, ...]:
        """Return every io backend that copies this pair."""
        return tuple(
            name
            for name in self.names
            if isinstance(self.judge(kind, direction, name, host, device), str)
        )

    def layouts(
        self,
        kind: PoolKind,
        direction: Direction,
        io_backend: str,
        host: Geometry,
        device: Geometry,
    ) -> tuple[str, ...]:
        """Return every layout of a host pool of these sizes that an io backend copies."""
        if io_backend == AUTO:
            return ()
        return tuple(
            layout
            for layout, other in _relaid(host, self.orders).items()
            if isinstance(self.judge(kind, direction, io_backend, other, device), str)
        )

    def refusal(
        self,
        kind: PoolKind,
        direction: Direction,
        io_backend: str,
        host: Geometry,
        device: Geometry,
        reason: str,
    ) -> UnsupportedPairError:
        """Return the error for a pair, with everything that works instead."""
        io_backends = self.io_backends(kind, direction, host, device)
        layouts = self.layouts(kind, direction, io_backend, host, device)
        pairs = (
            (name, layout)
            for layout, other in _relaid(host, self.orders).items()
            for name in self.io_backends(kind, direction, other, device)
        )
        return UnsupportedPairError(
            kind=kind.value,
            layout=host.label,
            io_backend=str(io_backend),
            direction=direction.value,
            reason=reason,
            io_backends=io_backends,
            layouts=layouts,
            pair=None if io_backends or layouts else next(pairs, None),
        )


def resolve(
    kind: PoolKind, direction: Direction, io_backend: IoBackend, host: Geometry, device: Geometry
) -> str:
    """Return how this pair is copied by the built-in table, whatever the device; see `Table.resolve`.

    Raises:
        UnsupportedPairError: It is not.
    """
    return Table().resolve(kind, direction, io_backend, host, device)


def _nearest(host: Geometry, device: Geometry) -> Layout:
    """Return the named layout whose row an unnamed order takes: one with runs of the same sort."""
    part, runs = worst_runs(matched(host, device))
    if runs.count == 1:
        return Layout.PAGE_FIRST_DIRECT
    by_head = host.kind is PoolKind.MHA and runs.count > part.component.tokens
    return Layout.PAGE_HEAD if by_head else Layout.PAGE_FIRST


def _misplaced(io_backend: IoBackend, on: str | None, pinned: bool) -> str | None:
    if on == "cpu" and io_backend in GPU_ONLY:
        return f"{io_backend.value!r} needs a GPU, and these pools are in host memory"
    if on not in {None, "cpu"} and io_backend in HOST_ONLY:
        return f"{io_backend.value!r} copies between host tensors, and the device pool is on a GPU"
    if not pinned and io_backend in PINNED_ONLY:
        return f"{io_backend.value!r} reads host memory in place, and this host pool is not pinned"
    return None


def _relaid(host: Geometry, orders: Mapping[str, Axes]) -> dict[str, Geometry]:
    """Return the pool in every layout that can hold it, by name."""
    found: dict[str, Geometry] = {}
    for layout in (*Layout, *orders.values()):
        try:
            other = host_geometry(
                host.kind,
                host.whole,
                layout,
                num_layers=host.num_layers,
                num_pages=host.num_pages,
            )
        except GeometryError:  # a registered order that lacks an axis of this kind
            continue
        found[other.label] = other
    return found
