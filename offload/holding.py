"""`with scheduler.hold():` what one thread submits inside becomes one batch."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import attrs

from offload.core.batch import Piece
from offload.core.machine import Machine
from offload.driver.loops import running_on_asyncio
from offload.errors import RequestError

if TYPE_CHECKING:
    from offload.entry import Entry


@attrs.define(eq=False)
class Hold:
    """Requests of one thread that are kept back until its `hold` block ends."""

    depth: int = 0
    pieces: list[int] = attrs.field(factory=list)
    inside: list[object] = attrs.field(factory=list)
    """The tasks, or threads, that are in the block."""

    def end(self) -> list[int]:
        """End one level, on whatever thread; return the pieces to let go when it was the last."""
        self.depth -= 1
        if self.depth:
            return []
        pieces, self.pieces = self.pieces, []
        return pieces


class Holds(threading.local):
    """The hold of each thread; it goes when the thread does."""

    _hold: Hold | None = None

    def current(self) -> Hold | None:
        """Return what keeps back the requests of the calling thread, if anything does."""
        hold = self._hold
        return hold if hold is not None and hold.depth else None

    def begin(self) -> Hold:
        """Keep back what the calling thread submits from now on, until `Hold.end`."""
        hold = self.current()
        if hold is None:
            hold = self._hold = Hold()
        hold.depth += 1
        return hold


@attrs.define(eq=False)
class HoldBlock:
    """The block. It may be nested; the outermost one counts."""

    _holds: Holds
    _let_go: Callable[[list[int]], None]
    _entered: list[tuple[Hold, object]] = attrs.field(factory=list)

    def __enter__(self) -> None:
        hold, who = self._holds.begin(), caller()
        hold.inside.append(who)
        self._entered.append((hold, who))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hold, who = self._entered.pop()
        hold.inside.remove(who)
        pieces = hold.end()
        if pieces:
            self._let_go(pieces)


def caller() -> object:
    """Return what runs now: a task of an event loop, or else a thread."""
    task: object = None
    if running_on_asyncio():
        task = asyncio.current_task()
    elif "trio" in sys.modules:
        import trio

        if trio.lowlevel.in_trio_task():
            task = trio.lowlevel.current_task()
    return threading.get_ident() if task is None else task


def refuse_held(hold: Hold, machine: Machine, entry: Entry) -> None:
    """Raise if the caller is inside a hold, and waits for what cannot begin before that ends.

    Raises:
        RequestError: He does.
    """
    if caller() in hold.inside and (entry.hold is hold or _behind(machine, entry, hold)):
        raise RequestError(
            f"{entry!r} begins when this `hold()` block ends, so a wait for it inside the block would "
            "never end. Leave the block, then wait."
        )


def refuse_held_pages(hold: Hold, machine: Machine, busy: Callable[[Piece], bool]) -> None:
    """Raise if the caller is inside a hold, and waits for pages that a request uses which it keeps back.

    Raises:
        RequestError: He does.
    """
    if caller() in hold.inside:
        for number in list(hold.pieces):
            piece = machine.find(number)
            if piece is not None and busy(piece):
                raise RequestError(
                    f"{piece.name} uses these pages and begins when this `hold()` block ends, so a wait "
                    "for them inside the block would never end. Leave the block, then wait."
                )


def _behind(machine: Machine, entry: Entry, hold: Hold) -> bool:
    """Return whether a request follows one that is kept back, over others or directly."""
    piece = machine.find(entry.request.id)
    stack: list[Piece] = [] if piece is None else [piece]
    seen = set(stack)
    while stack:
        piece = stack.pop()
        if piece.id in hold.pieces:
            return True
        ahead = set(piece.follows) | (
            set(piece.stream.pieces) if piece.stream is not None else set()
        )
        stack += ahead - seen
        seen |= ahead
    return False
