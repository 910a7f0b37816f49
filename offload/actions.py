"""What happens to requests under way from outside: cancelled, written, held, let go, too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import attrs
import numpy as np

from offload.commands import settle
from offload.core.batch import Piece, State
from offload.core.events import Cancel, Unblock, Written
from offload.driver.base import Event
from offload.driver.foreign import ForeignEvent
from offload.entry import Entry
from offload.errors import TransferFailed
from offload.holding import HoldBlock, refuse_held, refuse_held_pages
from offload.submit import compute_marks

if TYPE_CHECKING:
    from offload.shell import Places, Shell

_LET_GO = 1024
"""Held requests let go in one turn: about 5 ms of the loop."""


def cancel(entry: Entry, why: TransferFailed | None = None) -> None:
    """Cancel a request; see `Transfer.cancel`. Any thread.

    Args:
        why: What its error says, where it was not the caller's wish.
    """
    shell = entry.shell
    shell.loop.check_process("cancel")
    here = shell.loop.here and not shell.deciding
    if not entry.decide(State.CANCELLED, why):
        return
    if here:
        _abandon(entry, None)
    else:
        shell.waiting_threads.wake()
        shell.post(lambda: _abandon(entry, None))


def expire(entry: Entry) -> None:
    """Fail a request whose deadline has passed. On the loop's thread."""
    fail(entry, TimeoutError("its deadline passed before it had settled"))


def fail(entry: Entry, error: BaseException) -> None:
    """End a request that cannot go on, unless it has ended."""
    if entry.decide(State.FAILED, error):
        _abandon(entry, error)


def _abandon(entry: Entry, error: BaseException | None) -> None:
    """End a request for its caller; the copies go on where others share them."""
    shell = entry.shell
    if entry.settled:
        return
    if entry.wanted_by_others():
        settle(shell, entry, State.CANCELLED if error is None else State.FAILED, error)
    else:
        shell.handle(Cancel(entry.request.id, error))
    shell.ask_for_turn()


def watch(entry: Entry, piece: int, marks: Sequence[Event]) -> None:
    """Let a queued piece of a request go when its marks have landed; fail the request when one raises."""
    try:
        for mark in marks:
            mark.watch(_Watch(ref(entry), piece))
    except BaseException as error:
        _fail_all(entry, error)  # nothing would let it go
        if not isinstance(error, Exception):  # a signal's
            raise


@attrs.define(eq=False)
class _Watch:
    """What a mark calls when it has landed, on any thread. More than once counts once.

    A mark may land late, or never: it keeps no request that has gone, nor its scheduler.
    """

    _entry: ref[Entry]
    _piece: int
    _told: bool = False

    def __call__(self) -> None:
        entry = self._entry()
        if entry is not None:
            entry.shell.post(self._landed)

    def _landed(self) -> None:
        entry = self._entry()
        if entry is None or self._told:
            return
        self._told = True
        broken = (mark.error for mark in entry.marks if isinstance(mark, ForeignEvent))
        error = next((error for error in broken if error is not None), None)
        if error is None:
            entry.shell.handle(Unblock(self._piece))
        else:
            _fail_all(entry, error)


def _fail_all(entry: Entry, error: BaseException) -> None:
    """Fail a request and those that share it: they wait for the same marks."""
    for each in (entry, *(entry.joined or ())):
        fail(each, error)


def layer_written(entry: Entry, layer: int) -> None:
    """Let the backup of a layer start; see `Transfer.layer_written`. Any thread."""
    shell = entry.shell
    shell.loop.check_process("say that a layer is written")
    marks = compute_marks(shell.driver)
    entry.write(layer)

    def written() -> None:
        piece = shell.machine.new_id()
        shell.handle(Written(entry.request.id, layer, piece, len(marks)))
        watch(entry, piece, marks)

    shell.post_order(written)


# Holding ------------------------------------------------------------------------------------------


def hold(shell: Shell) -> HoldBlock:
    """Keep back what the calling thread submits until the block ends; then it is one batch."""
    return HoldBlock(shell.holds, lambda pieces: let_go(shell, pieces))


def let_go(shell: Shell, pieces: list[int]) -> None:
    """Unblock held pieces. Any thread; in order after what that thread has posted."""
    held, pieces[:] = pieces[:], []

    def go() -> None:
        for piece in held[:_LET_GO]:
            shell.handle(Unblock(piece))
        del held[:_LET_GO]
        if held:
            shell.loop.post(lambda: shell.post(go))

    if held:
        shell.post(go)


def let_go_of_all(shell: Shell) -> None:
    """Unblock everything that is held: nobody's block may keep a scheduler from closing."""
    for entry in list(shell.entries.values()):
        if entry.hold is not None and entry.hold.pieces:
            let_go(shell, entry.hold.pieces)


def refuse_waiting(entry: Entry) -> None:
    """Raise if the caller waits for what he keeps back himself. Any thread."""
    hold = entry.shell.holds.current()
    if hold is not None:
        refuse_held(hold, entry.shell.machine, entry)


def refuse_waiting_for(shell: Shell, places: Places) -> None:
    """Raise if the caller waits for pages that are used by what he keeps back himself. Any thread."""
    hold = shell.holds.current()
    if hold is not None:
        refuse_held_pages(hold, shell.machine, _users_of(shell, places))


def _users_of(shell: Shell, places: Places) -> Callable[[Piece], bool]:
    """Return whether a request has claimed any of some pages, as a function of it."""

    def uses(piece: Piece) -> bool:
        for member, *sides in piece.request.parts:
            for table, pages in zip(shell.machine.tables[member], sides, strict=True):
                if any(other is table and np.isin(wanted, pages).any() for other, wanted in places):
                    return True
        return False

    return uses
