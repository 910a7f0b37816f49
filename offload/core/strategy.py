"""What becomes of a pair: its cell in the table, then what sizes and the device forbid, and what works instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from offload.core.axes import Axes
from offload.core.checks import CHECKS, worst_runs
from offload.core.geometry import Geometry, matched
from offload.core.kinds import AUTO, Direction, IoBackend, Layout, PoolKind
from offload.core.layout import host_geometry
from offload.core.table import TABLE, Cell, Key, Rejection
from offload.errors import GeometryError, UnsupportedPairError, told

GPU_ONLY = frozenset({IoBackend.MEMCPY_BATCH, IoBackend.KERNEL, IoBackend.STAGED})
HOST_ONLY = frozenset({IoBackend.CPU})
PINNED_ONLY = frozenset({IoBackend.KERNEL})
"""Read and write host memory in place, from the GPU."""

LONG_RUN = 32 * 1024
"""Bytes. From here on copy engines keep up with the link and leave multiprocessors to compute: on an H100
runs of 24 KiB went at 5-7 GB/s, of 28 KiB at 28-44, of 64 KiB at 39-52 (vllm#42212). The cut moves with
device and number of runs (vllm#57555); it is one constant, never tuned while running."""

# `cpu` runs on host memory alone, and there it is quicker than `direct`, which makes a call for each run.
_ENGINES_FIRST = (
    IoBackend.MEMCPY_BATCH,
    IoBackend.CPU,
    IoBackend.DIRECT,
    IoBackend.KERNEL,
    IoBackend.STAGED,
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

    missing: Mapping[str, str] = {}
    """Io backends that need a package which is not installed: (what is missing) by name."""

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
            return _asked(self.columns[io_backend], kind, direction, host, device)
        name = IoBackend(io_backend)
        cell = self.cells[kind, host.layout or _nearest(host, device), name, direction]
        if isinstance(cell, Rejection):
            return cell
        if misplaced := _misplaced(name, self.on, self.pinned):
            return Rejection(misplaced)
        if name in self.missing:
            package = f"{self.missing[name]}, which is not installed (extra 'kernel')"
            return Rejection(f"it needs {package}")
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
        reasons: list[str] = []
        for io_backend in auto_order(host, device):
            verdict = self.judge(kind, direction, io_backend, host, device)
            if isinstance(verdict, str):
                return io_backend
            reasons.append(verdict.reason)
        told = "; ".join(dict.fromkeys(reasons))
        raise self.refusal(kind, direction, AUTO, host, device, told)

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
            refused = self.refusal(kind, direction, io_backend, host, device, verdict.reason)
            raise refused from verdict.error
        return verdict

    def without(self, io_backend: str, why: Rejection) -> Table:
        """Return the table in which this io backend copies nothing."""
        return attrs.evolve(self, columns={**self.columns, io_backend: lambda *_: why})

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
        return tuple(
            layout
            for layout, other in _relaid(host, self.orders).items()
            for names in [auto_order(other, device) if io_backend == AUTO else (io_backend,)]
            if any(isinstance(self.judge(kind, direction, n, other, device), str) for n in names)
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


def _asked(
    column: Column, kind: PoolKind, direction: Direction, host: Geometry, device: Geometry
) -> str | Rejection:
    """Return what a registered column says. One that is broken rejects, and harms no other cell."""
    try:
        verdict: object = column(kind, direction, host, device)
    except Exception as error:  # noqa: BLE001 - somebody else's code, asked for every matrix and error
        return Rejection(f"its column raised {told(error)}", error)
    if isinstance(verdict, Rejection) or (isinstance(verdict, str) and verdict):
        return verdict
    return Rejection(
        f"its column returned {verdict!r}, which is no strategy's name and no Rejection"
    )


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
