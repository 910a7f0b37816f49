"""The ways in which io backend `cpu` moves the pages of a batch, and which of them is the quickest.

The interpreter lock decides how well a copy hides behind a forward: numpy and torch let go of it while bytes
move, the Python around a call holds it.

1. *runs*: one numpy assignment per run, whose call costs a tenth of torch's. Few or long runs.
2. *gather*: one `index_select` straight into each run of destination pages, whatever the order of the sources.
   Loads into fresh pages and backups into fresh pages.
3. *scatter*: one `index_copy_` straight from each run of source pages. The same into scattered pages.
4. *relay*: gather into a small buffer that stays in the cache, then scatter from it. Many short pages,
   scattered on both sides.
"""

from __future__ import annotations

from math import inf
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from offload.core.hazards import Pages
from offload.core.plan import Runs

# Measured on one core of a server CPU, torch 2.13; the choice needs the ratios alone. Seconds.
_RUN_CALL = 0.5e-6  # nearly all of it with the interpreter lock
_GATHER_CALL = 3e-6
_SCATTER_CALL = 4e-6
_RELAY_CALL = 10e-6
_RUN_BYTE = 1 / 16e9
_GATHER_BYTE = 1 / 15e9
_SCATTER_BYTE = 1 / 10e9
_RELAY_BYTE = 1 / 6e9
_RELAY_BUFFER = 1 << 20  # bytes; second-level caches are this large

Spans: TypeAlias = list[tuple[int, int, int]]


@attrs.frozen(eq=False)
class Sides:
    """One component and layer of two pools, [P, *loops, words] each and equal apart from `P`; twice, as memory
    that torch knows and that numpy knows."""

    source: torch.Tensor
    destination: torch.Tensor
    source_array: NDArray[np.integer]
    destination_array: NDArray[np.integer]


class Way(Protocol):
    """The pages of a batch, in the form that one way of copying them needs."""

    @property
    def num_ops(self) -> int:
        """How many copies one component of one layer takes."""

    def copy(self, sides: Sides) -> None:
        """Copy one component of one layer."""


@attrs.define(eq=False)
class ByRuns:
    """One assignment per run."""

    spans: Spans
    """(first source page, first destination page, pages)."""

    @classmethod
    def of(cls, runs: Runs) -> ByRuns:
        """Return the way of these runs."""
        return cls(_rows(runs.source, runs.destination, runs.count))

    @property
    def num_ops(self) -> int:
        """One per run."""
        return len(self.spans)

    def copy(self, sides: Sides) -> None:
        """Copy run by run."""
        source, destination = sides.source_array, sides.destination_array
        for start, end, count in self.spans:
            destination[end : end + count] = source[start : start + count]


@attrs.define(eq=False)
class Gather:
    """One `index_select` per stretch of destination pages."""

    spans: Spans
    """(first destination page, position of its partner in `index`, pages)."""

    index: torch.Tensor
    """Source pages."""

    @property
    def num_ops(self) -> int:
        """One per stretch."""
        return len(self.spans)

    def copy(self, sides: Sides) -> None:
        """Copy stretch by stretch."""
        for end, first, count in self.spans:
            index = self.index[first : first + count]
            torch.index_select(sides.source, 0, index, out=sides.destination[end : end + count])


@attrs.define(eq=False)
class Scatter:
    """One `index_copy_` per stretch of source pages."""

    spans: Spans
    """(first source page, position of its partner in `index`, pages)."""

    index: torch.Tensor
    """Destination pages."""

    @property
    def num_ops(self) -> int:
        """One per stretch."""
        return len(self.spans)

    def copy(self, sides: Sides) -> None:
        """Copy stretch by stretch."""
        for start, first, count in self.spans:
            index = self.index[first : first + count]
            sides.destination.index_copy_(0, index, sides.source[start : start + count])


@attrs.define(eq=False)
class Relay:
    """Through a buffer, as much at a time as it holds."""

    index: torch.Tensor
    """Source pages."""

    into: torch.Tensor
    """Destination pages."""

    num_ops: int = 1

    def copy(self, sides: Sides) -> None:
        """Copy piece by piece."""
        source, index = sides.source, self.index
        one = source[:1]
        step = max(1, _RELAY_BUFFER // (one.numel() * one.element_size()))
        buffer = torch.empty((min(step, len(index)), *one.shape[1:]), dtype=one.dtype)
        for start in range(0, len(index), step):
            pages = index[start : start + step]
            held = buffer[: len(pages)]
            torch.index_select(source, 0, pages, out=held)
            sides.destination.index_copy_(0, self.into[start : start + step], held)


def choose(runs: Runs, nbytes: int, *, packed: bool) -> Way:
    """Return the way that is estimated to take the least time.

    Args:
        nbytes: Bytes of one layer of one component.
        packed: Whether the source's pages lie together; `index_copy_` is slow where they do not.
    """
    if len(runs) == 1:  # nothing is cheaper
        return ByRuns([(runs.source.item(), runs.destination.item(), runs.num_pages)])
    few = len(runs) * _RUN_CALL + nbytes * _RUN_BYTE
    if few <= min(
        _GATHER_CALL + nbytes * _GATHER_BYTE,
        _SCATTER_CALL + nbytes * _SCATTER_BYTE,
        _RELAY_CALL + nbytes * _RELAY_BYTE,
    ):
        return ByRuns.of(runs)
    source, destination = runs.pages
    taken, ordered = runs.by_destination
    gathered, scattered = _stretches(ordered), _stretches(source)
    gather = len(gathered) * _GATHER_CALL + nbytes * _GATHER_BYTE
    scatter = len(scattered) * _SCATTER_CALL + nbytes * _SCATTER_BYTE if packed else inf
    relay = _RELAY_CALL * (1 + nbytes / _RELAY_BUFFER) + nbytes * _RELAY_BYTE
    least = min(few, gather, scatter, relay)
    if least == few:
        return ByRuns.of(runs)
    if least == gather:
        return Gather(_spans(ordered, gathered), torch.from_numpy(taken))
    if least == scatter:
        return Scatter(_spans(source, scattered), torch.from_numpy(destination))
    return Relay(torch.from_numpy(source), torch.from_numpy(destination))


def _stretches(pages: Pages) -> Pages:
    """Return the positions where pages do not follow their predecessor; the first one is 0."""
    return np.flatnonzero(np.diff(pages, prepend=-2) != 1)


def _spans(pages: Pages, first: Pages) -> Spans:
    return _rows(pages[first], first, np.diff(first, append=len(pages)))


def _rows(*columns: Pages) -> Spans:
    one, two, three = (column.tolist() for column in columns)
    return list(zip(one, two, three, strict=True))
