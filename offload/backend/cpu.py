"""io backend `cpu`: indexed copies between host tensors, every layout and kind.

The interpreter lock decides how well a copy hides behind a forward: a torch call lets go of it while bytes
move, the Python around the call holds it. So a layer is as few torch calls as possible, in one of three ways,
chosen once per batch by what the calls and the bytes cost:

1. *runs*: one list copy of all runs, as views. Few long runs.
2. *gather*: one `index_select` straight into each run of destination pages, whatever the order of the sources.
   Loads into fresh pages and backups into fresh pages.
3. *scatter*: one `index_copy_` straight from each run of source pages. The same into scattered pages.
4. *relay*: gather into a small buffer that stays in the cache, then scatter from it. Many short pages,
   scattered on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import gcd, inf

import attrs
import numpy as np
import torch

from offload.backend.base import Access, PoolCopy
from offload.core.geometry import ComponentGeometry, pair_alignment, pair_runs
from offload.core.hazards import Pages
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.pool import DevicePool, HostPool, Pool

# Measured on one core of a server CPU, torch 2.13; the choice needs the ratios alone. Seconds.
_RUN_CALL = 4e-6  # two views in Python, with the interpreter lock, and their part of the list copy
_GATHER_CALL = 4e-6
_SCATTER_CALL = 5e-6
_RELAY_CALL = 10e-6
_RUN_BYTE = 1 / 16e9
_GATHER_BYTE = 1 / 14e9
_SCATTER_BYTE = 1 / 10e9
_RELAY_BYTE = 1 / 6e9
_RELAY_BUFFER = 1 << 20  # bytes; second-level caches are this large

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Way(Enum):
    """How the pages of a batch are copied."""

    RUNS = auto()
    GATHER = auto()
    SCATTER = auto()
    RELAY = auto()


_NONE = torch.empty(0, dtype=torch.int64)

Sides = tuple[torch.Tensor, torch.Tensor]
"""Source and destination of one component and layer: [P, *loops, words], equal apart from `P`."""


class CpuBackend:
    """Copies between pools in host memory."""

    name = "cpu"

    def __init__(self) -> None:
        self._between: dict[tuple[Pool, Pool], _Between] = {}

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> CpuCopy:
        """Choose the way, and make the indices; views of the pools are kept for the next batch."""
        both = PoolCopy.of(device, host, direction, runs)
        between = self._between.get((both.source, both.destination))
        if between is None:
            between = self._between[both.source, both.destination] = _Between(_packed(both))
        nbytes = both.layer_bytes // len(both.pairs)
        return CpuCopy(both, between.views, _Pages.of(runs, nbytes, packed=between.packed))


@attrs.define(eq=False)
class _Between:
    """What copies from one pool to another share."""

    packed: bool
    """Whether pages of the source lie together."""

    views: dict[tuple[str, int], Sides] = attrs.field(factory=dict)
    """By component and layer."""


@attrs.define(eq=False)
class _Pages:
    """The pages of a batch, in the form that its way needs."""

    way: Way

    spans: list[tuple[int, int, int]]
    """RUNS: (first source page, first destination page, pages). GATHER, SCATTER: (first page on the side
    that lies together, position of its partner in `index`, pages)."""

    index: torch.Tensor
    """GATHER, RELAY: source pages. SCATTER: destination pages."""

    into: torch.Tensor
    """RELAY: destination pages."""

    @classmethod
    def of(cls, runs: Runs, nbytes: int, *, packed: bool) -> _Pages:
        """Choose by the estimated seconds.

        Args:
            nbytes: Bytes of one layer of one component.
            packed: Whether the source's pages lie together; `index_copy_` is slow where they do not.
        """
        few = len(runs) * _RUN_CALL + nbytes * _RUN_BYTE
        if few <= min(
            _GATHER_CALL + nbytes * _GATHER_BYTE,
            _SCATTER_CALL + nbytes * _SCATTER_BYTE,
            _RELAY_CALL + nbytes * _RELAY_BYTE,
        ):
            return cls._runs(runs)
        source, destination = runs.pages
        taken, ordered = runs.by_destination
        gathered, scattered = _stretches(ordered), _stretches(source)
        calls = {
            Way.RUNS: few,
            Way.GATHER: len(gathered) * _GATHER_CALL + nbytes * _GATHER_BYTE,
            Way.SCATTER: len(scattered) * _SCATTER_CALL + nbytes * _SCATTER_BYTE if packed else inf,
            Way.RELAY: _RELAY_CALL * (1 + nbytes / _RELAY_BUFFER) + nbytes * _RELAY_BYTE,
        }
        match min(calls, key=lambda way: calls[way]):
            case Way.RUNS:
                return cls._runs(runs)
            case Way.GATHER:
                spans = _spans(ordered, gathered)
                return cls(Way.GATHER, spans, torch.from_numpy(taken), _NONE)
            case Way.SCATTER:
                spans = _spans(source, scattered)
                return cls(Way.SCATTER, spans, torch.from_numpy(destination), _NONE)
            case _:
                both = torch.from_numpy(source), torch.from_numpy(destination)
                return cls(Way.RELAY, [], *both)

    @classmethod
    def _runs(cls, runs: Runs) -> _Pages:
        if len(runs) == 1:
            spans = [(runs.source.item(), runs.destination.item(), runs.count.item())]
        else:
            spans = _rows(runs.source, runs.destination, runs.count)
        return cls(Way.RUNS, spans, _NONE, _NONE)


@attrs.define(eq=False)
class CpuCopy:
    """Prepared copies of `cpu`."""

    _both: PoolCopy
    _views: dict[tuple[str, int], Sides]
    _pages: _Pages

    def copy(self, layer: int) -> None:
        """Copy one pool layer."""
        copy = _COPY[self._pages.way]
        for pair in self._both.pairs:
            source, destination = self._sides(pair, layer)
            copy(self._pages, source, destination)

    def nbytes(self, layer: int) -> int:
        """Return the bytes of one pool layer."""
        return self._both.layer_bytes

    def num_ops(self, layer: int) -> int:
        """Return how many copies torch is asked for."""
        return len(self._both.pairs) * max(1, len(self._pages.spans))

    def poison(self, layer: int) -> None:
        """Fill the destination bytes of one pool layer."""
        self._both.poison(layer)

    def accesses(self, layer: int) -> Sequence[Access]:
        """Return what the copy of one pool layer reads and writes."""
        return self._both.accesses(layer)

    def _sides(self, pair: tuple[ComponentGeometry, ComponentGeometry], layer: int) -> Sides:
        ours, theirs = pair
        sides = self._views.get((ours.name, layer))
        if sides is None:
            sides = _views_of(self._both, ours, theirs, layer)
            self._views[ours.name, layer] = sides
        return sides


def _packed(both: PoolCopy) -> bool:
    return all(ours.adjacent for ours, _ in both.pairs)


def _copy_runs(pages: _Pages, source: torch.Tensor, destination: torch.Tensor) -> None:
    if len(pages.spans) == 1:
        start, end, count = pages.spans[0]
        destination[end : end + count].copy_(source[start : start + count])
        return
    if not pages.spans:
        return  # the list copy refuses empty lists
    torch._foreach_copy_(
        [destination[end : end + count] for _, end, count in pages.spans],
        [source[start : start + count] for start, _, count in pages.spans],
    )


def _gather(pages: _Pages, source: torch.Tensor, destination: torch.Tensor) -> None:
    for end, first, count in pages.spans:
        index = pages.index[first : first + count]
        torch.index_select(source, 0, index, out=destination[end : end + count])


def _scatter(pages: _Pages, source: torch.Tensor, destination: torch.Tensor) -> None:
    for start, first, count in pages.spans:
        index = pages.index[first : first + count]
        destination.index_copy_(0, index, source[start : start + count])


def _relay(pages: _Pages, source: torch.Tensor, destination: torch.Tensor) -> None:
    one = source[:1]
    step = max(1, _RELAY_BUFFER // (one.numel() * one.element_size()))
    buffer = torch.empty((min(step, len(pages.index)), *one.shape[1:]), dtype=one.dtype)
    for start in range(0, len(pages.index), step):
        index = pages.index[start : start + step]
        held = buffer[: len(index)]
        torch.index_select(source, 0, index, out=held)
        destination.index_copy_(0, pages.into[start : start + step], held)


_COPY = {Way.RUNS: _copy_runs, Way.GATHER: _gather, Way.SCATTER: _scatter, Way.RELAY: _relay}


def _views_of(
    both: PoolCopy, ours: ComponentGeometry, theirs: ComponentGeometry, layer: int
) -> Sides:
    """Return one layer of a component on both sides, as the widest words and fewest axes they share."""
    source, _ = both.source.flat(ours.name, layer)
    destination, _ = both.destination.flat(theirs.name, layer)
    starts = (
        source.storage_offset() + ours.at(layer, 0),
        destination.storage_offset() + theirs.at(layer, 0),
    )
    word = gcd(8, pair_alignment(ours, theirs), *starts)
    runs = pair_runs(ours, theirs)
    sizes = (*(count for count, _ in runs.loops), runs.nbytes // word)
    views = []
    for side, (flat, part, pool) in enumerate(
        ((source, ours, both.source), (destination, theirs, both.destination))
    ):
        steps = (part.page_stride, *(pair[side] for _, pair in runs.loops))
        view = torch.empty(0, dtype=_WORDS[word]).set_(
            flat.untyped_storage(),
            starts[side] // word,
            (pool.num_pages, *sizes),
            (*(step // word for step in steps), 1),
        )
        views.append(view)
    return views[0], views[1]


def _stretches(pages: Pages) -> Pages:
    """Return the positions where pages do not follow their predecessor; the first one is 0."""
    return np.flatnonzero(np.diff(pages, prepend=-2) != 1)


def _spans(pages: Pages, first: Pages) -> list[tuple[int, int, int]]:
    return _rows(pages[first], first, np.diff(first, append=len(pages)))


def _rows(*columns: Pages) -> list[tuple[int, int, int]]:
    one, two, three = (column.tolist() for column in columns)
    return list(zip(one, two, three, strict=True))
