"""Answers without pools: is this pair copied, how, why not, and what works instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import attrs

from offload import registry
from offload.arguments import expect
from offload.core.checks import worst_runs
from offload.core.geometry import Component, Geometry, matched
from offload.core.kinds import AUTO, Direction, IoBackend, Layout, PoolKind, parse
from offload.core.layout import device_geometry, host_geometry
from offload.core.strategy import Table
from offload.core.table import Strategy
from offload.errors import GeometryError, UnknownNameError, UnsupportedPairError, counted, one_of

if TYPE_CHECKING:  # for its name alone: it needs torch, and answers do not
    from offload.spec import PoolSpec

DEVICES = ("cpu", "cuda")

NOMINAL: dict[PoolKind, tuple[Component, ...]] = {
    PoolKind.MHA: (Component("k", 64, 8, 128, 2), Component("v", 64, 8, 128, 2)),
    PoolKind.MLA: (Component("kv", 64, 1, 576, 2, (("latent", 512), ("rope", 64))),),
    PoolKind.ROWS: (Component("row", 1, 1, 37_440, 1),),
    PoolKind.STATE: (Component("ssm", 1, 1, 64 * 128, 4), Component("conv", 1, 1, 3 * 512, 2)),
}
"""The sizes that the printed matrix is about: 64 tokens, 8 heads, dim 128, 2 bytes, and their like."""


@attrs.frozen
class Verdict:
    """What becomes of one (kind, layout, io backend, direction), and what else there is."""

    kind: str
    layout: str
    io_backend: str
    """As asked; `auto` is answered in `chosen`."""
    direction: str
    supported: bool
    chosen: str | None
    """The io backend that would copy; None where none does."""
    strategy: str | None
    reason: str | None
    """Why not, as a sentence without its full stop."""
    io_backends: tuple[str, ...]
    """What copies this layout in this direction."""
    layouts: tuple[str, ...]
    """What this io backend copies in this direction."""
    runs: int
    """Contiguous ranges in one layer of one page of one component, where both sides step together."""
    run_bytes: int
    """Bytes of each: of the component with the most and shortest runs."""
    whole_page: bool
    """Whether a host page over all its layers is one contiguous range per component."""
    text: str
    """Everything above as one paragraph."""
    note: str | None = None
    """What else there is to know of how it copies, as a sentence without its full stop."""

    def __str__(self) -> str:
        """Return the paragraph."""
        return self.text


def explain(
    spec: PoolSpec,
    *,
    layout: str | Layout,
    io_backend: str | IoBackend = AUTO,
    direction: str | Direction = Direction.LOAD,
    device: str | None = None,
) -> Verdict:
    """Return whether and how pools of this spec are copied. Pure: needs no pools and no GPU.

    Args:
        layout: Of the host pool.
        device: `cpu` or `cuda`: count only what runs there. None: whatever the device.

    Raises:
        UnknownNameError: A name is none of the choices.
        RequestError: `spec` is none.
    """
    from offload.spec import PoolSpec

    expect("explain", "spec", spec, PoolSpec, "a PoolSpec")
    return explain_parts(
        spec.kind,
        spec.parts,
        num_layers=spec.num_layers,
        layout=layout,
        io_backend=io_backend,
        direction=direction,
        device=device,
    )


def explain_parts(
    kind: PoolKind,
    parts: tuple[Component, ...],
    *,
    layout: str | Layout,
    io_backend: str | IoBackend,
    direction: str | Direction,
    num_layers: int = 32,
    device: str | None = None,
) -> Verdict:
    """Return the verdict for components that are given by their sizes alone."""
    where = None if device is None else str(device).split(":")[0]
    if where is not None and where not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    table = registry.table(where)
    way = parse(Direction, direction)
    name = registry.io_backend(io_backend)
    host = host_geometry(
        kind, parts, registry.layout(layout), num_layers=num_layers, num_pages=_PAGES
    )
    device_side = device_geometry(kind, parts, num_layers=num_layers, num_pages=_PAGES)
    return _verdict(table, kind, way, name, host, device_side)


_PAGES = 2
"""Any number gives the same verdict; with two, page strides exist."""


def _verdict(
    table: Table, kind: PoolKind, way: Direction, name: str, host: Geometry, device: Geometry
) -> Verdict:
    chosen: str | None = name
    strategy: str | None = None
    reason: str | None = None
    refusal: UnsupportedPairError | None = None
    try:
        chosen = table.choose(kind, way, host, device).value if name == AUTO else name
        strategy = str(table.resolve(kind, way, chosen, host, device))
    except UnsupportedPairError as error:
        chosen, reason, refusal = None, error.reason, error
    _, runs = worst_runs(matched(host, device))
    io_backends = table.io_backends(kind, way, host, device)
    verdict = Verdict(
        kind=kind.value,
        layout=host.label,
        io_backend=name,
        direction=way.value,
        supported=strategy is not None,
        chosen=chosen,
        strategy=strategy,
        reason=reason,
        io_backends=io_backends,
        layouts=table.layouts(kind, way, chosen or name, host, device),
        runs=runs.count,
        run_bytes=runs.nbytes,
        whole_page=host.whole_page,
        text="",
        note=_note(strategy, host),
    )
    return attrs.evolve(verdict, text=str(refusal) if refusal else _paragraph(verdict))


def _note(strategy: str | None, host: Geometry) -> str | None:
    """Say into how many copies over the link `staged` cuts a layer of a page: those of the host's order."""
    runs = max((part.runs for part in host.components), key=lambda runs: (runs.count, -runs.nbytes))
    if strategy not in (Strategy.STAGED_ROWS, Strategy.STAGED_HEADS) or runs.count == 1:
        return None
    return (
        f"over the link 'staged' copies each of the host page's {runs.count} runs of "
        f"{counted(runs.nbytes, 'byte')} by itself"
    )


def _paragraph(verdict: Verdict) -> str:
    verb = "backs up" if verdict.direction == "backup" else "loads"
    asked = "" if verdict.chosen == verdict.io_backend else " ('auto' picks it)"
    pieces = f"{counted(verdict.runs, 'run')} of {counted(verdict.run_bytes, 'byte')}"
    others = [name for name in verdict.io_backends if name != verdict.chosen]
    also = (
        f" So {'do' if len(others) > 1 else 'does'} {one_of(others, word='and')}." if others else ""
    )
    calls = _ONE_CALL if verdict.chosen == IoBackend.MEMCPY_BATCH else ""
    note = f" {verdict.note[0].upper()}{verdict.note[1:]}." if verdict.note else ""
    return (
        f"io_backend {verdict.chosen!r}{asked} {verb} layout {verdict.layout!r} ({verdict.kind}) by "
        f"{verdict.strategy!r}: one layer of one page is {pieces}.{calls}{note}{also}"
    )


_ONE_CALL = (
    " A layer is one call of the CUDA driver; one older than 12.8 takes a call for each run."
)


def cells(kind: PoolKind | None = None, *, device: str | None = None) -> Iterator[Verdict]:
    """Yield the verdict of every cell of the table at the nominal sizes, registered ones included."""
    kinds = list(PoolKind) if kind is None else [kind]
    layouts = [*Layout, *registry.layouts()]
    for each, way, layout in product(kinds, Direction, layouts):
        for name in registry.table().names if _holds(layout, each) else ():
            yield explain_parts(
                each,
                NOMINAL[each],
                layout=layout,
                io_backend=name,
                direction=way,
                device=device,
            )


def _holds(layout: str, kind: PoolKind) -> bool:
    """Return whether a layout has every axis of a kind; a registered one may lack some."""
    try:
        host_geometry(kind, NOMINAL[kind], registry.layout(layout), num_layers=2, num_pages=_PAGES)
    except GeometryError:
        return False
    return True
