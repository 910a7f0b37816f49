"""Who reads what a load brings. If it breaks, what they computed behind it is garbage under good hashes.

vLLM names a block by its hash as soon as it schedules the step that fills it, so requests share blocks that are
still being loaded. When a load breaks, vLLM cuts only one request back to the first block that is missing, trusts
it to compute the block for all others, and leaves the hashes in its prefix cache: right only if that request
computes all of it in the next step. It may be aborted or preempted first, or get a part of the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Protocol

import attrs


class Reading(Protocol):
    """A request, as far as it is cut back."""

    num_computed_tokens: int

    @property
    def request_id(self) -> str:
        """vLLM's id."""


@attrs.define(eq=False)
class Reader:
    """A request whose table has blocks of a load."""

    request: Reading
    first: int
    """Where in its table the first of them is."""
    blocks: set[int]
    """That block and all behind it: right only if the load lands."""


@attrs.define(eq=False)
class _Load:
    pages: set[int] = attrs.field(factory=set)
    readers: list[Reader] = attrs.field(factory=list)


@attrs.define(eq=False)
class Readers:
    """The readers of all loads under way. Pure."""

    _loads: dict[int, _Load] = attrs.field(init=False, factory=dict)
    """By job number."""

    def expect(self, number: int, pages: Iterable[int]) -> None:
        """Note blocks that a load brings, before the request that asked for it is noted."""
        self._loads.setdefault(number, _Load()).pages.update(pages)

    def admitted(self, request: Reading, blocks: Sequence[int]) -> None:
        """Note a request that got its blocks, whether it asked for a load or found its blocks cached."""
        for load in self._loads.values():
            first = next((i for i, block in enumerate(blocks) if block in load.pages), None)
            if first is not None:
                load.readers.append(Reader(request, first, set(blocks[first:])))

    def computing(
        self, names: Container[str], blocks_of: Callable[[str], Sequence[int] | None]
    ) -> None:
        """Note the blocks that readers have got since, in the tables of those that compute now."""
        for load in self._loads.values():
            for reader in load.readers:
                name = reader.request.request_id
                table = blocks_of(name) if name in names else None
                reader.blocks.update((table or ())[reader.first :])

    def landed(self, number: int) -> None:
        """Forget a job that has ended well."""
        self._loads.pop(number, None)

    def broken(self, numbers: Container[int], bad_blocks: Collection[int]) -> list[Reader]:
        """Forget the loads that broke, known by job or by block; return their readers."""
        broken = [
            number
            for number, load in self._loads.items()
            if number in numbers or not load.pages.isdisjoint(bad_blocks)
        ]
        return [reader for number in broken for reader in self._loads.pop(number).readers]
