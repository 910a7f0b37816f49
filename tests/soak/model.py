"""What every page must hold: a graph of who wrote it from what, read when all outcomes are known.

A cell is one page of one layer of one pool. Every write makes a new `Version` of it, in the order of
submission. What a version holds is asked at the end: the stamp of a user's write; what its source held,
for a copy that landed; what was there before, for a copy that never began; nothing certain otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from offload.errors import TransferFailed
from offload.transfer import Transfer


class Cell(NamedTuple):
    """One page of one layer of one pool."""

    member: int
    device: bool
    layer: int
    """The pool's own layer."""

    page: int


@attrs.define(eq=False)
class Copy:
    """One load or backup."""

    number: int
    request: int
    load: bool
    pairs: Sequence[tuple[int, int, int]]
    """(member, host page, device page)."""

    streaming: bool
    transfer: Transfer
    rides_on: Copy | None = None
    """An earlier copy of the same pages, whose bytes it shares. To be sound, that must make no difference."""

    versions: dict[tuple[int, int], list[tuple[Version, Cell]]] = attrs.field(factory=dict)
    """By (member, pool layer): versions that wait for `layer_written`, with the cells they will copy."""

    began: set[int] = attrs.field(factory=set)
    """Model layers of which a copy began, whatever came of it."""

    def landed(self, layer: int) -> bool:
        """Return whether somebody was promised that a model layer has landed. All have settled."""
        rides_on = self.rides_on
        return _landed(self.transfer, layer) or (rides_on is not None and rides_on.landed(layer))

    def device_pages(self, member: int) -> set[int]:
        """Return the device pages of one member."""
        return {device for index, _, device in self.pairs if index == member}


def _landed(transfer: Transfer, layer: int) -> bool:
    try:
        transfer.wait_layer(layer)
    except TransferFailed:
        return False
    return True


@attrs.define(eq=False)
class Version:
    """What a cell holds from one write on."""

    stamp: int | None = None
    """What a user wrote."""

    copy: Copy | None = None
    model_layer: int = 0
    source: Version | None = None
    """What a copy copies; None until the layer of a streaming backup is written."""

    previous: Version | None = None

    def holds(self) -> int | None:
        """Return the stamp that must be there, or None where nothing certain is."""
        version: Version | None = self
        while version is not None and version.copy is not None:
            copy = version.copy
            if copy.landed(version.model_layer):
                version = version.source
            elif version.model_layer not in copy.began:
                version = version.previous
            else:
                return None
        return None if version is None else version.stamp


@attrs.define(eq=False)
class Model:
    """All cells of all pools of a group.

    Args:
        pool_layers: For each member, its own layer by model layer.
    """

    pool_layers: Sequence[Sequence[int | None]]
    cells: dict[Cell, Version] = attrs.field(factory=dict)
    copies: list[Copy] = attrs.field(factory=list)
    seen: list[tuple[str, Cell, Version, bytes]] = attrs.field(factory=list)
    """What a program read: what it was, the cell, the version it meant, the bytes it got."""

    stamps: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    """Raised by the threads of forwards, too."""

    def write(self, cell: Cell) -> int:
        """Let a user write a cell; return the stamp to write."""
        stamp = next(self.stamps)
        self.cells[cell] = Version(stamp=stamp)
        return stamp

    def submit(self, copy: Copy) -> None:
        """Give a copy its place in the order."""
        self.copies.append(copy)
        for model_layer in range(len(self.pool_layers[0])):
            made = []
            for member, host, device in copy.pairs:
                layer = self.pool_layers[member][model_layer]
                if layer is None:
                    continue
                ends = Cell(member, False, layer, host), Cell(member, True, layer, device)
                source, target = ends if copy.load else ends[::-1]
                version = Version(copy=copy, model_layer=model_layer, previous=self.cells[target])
                if copy.streaming:
                    copy.versions.setdefault((member, model_layer), []).append((version, source))
                else:
                    version.source = self.cells[source]
                made.append((target, version))
            # All reads come before all writes: no page of one request is both.
            self.cells.update(made)

    def written(self, copy: Copy, model_layer: int) -> None:
        """Give one layer of a streaming backup its place in the order of its device pages."""
        for member in range(len(self.pool_layers)):
            for version, source in copy.versions.get((member, model_layer), ()):
                version.source = self.cells[source]

    def cells_of(self, member: int, pages: Iterable[int], model_layer: int) -> list[Cell]:
        """Return the device cells of some pages at a model layer; none where the member has none."""
        layer = self.pool_layers[member][model_layer]
        return [] if layer is None else [Cell(member, True, layer, page) for page in pages]
