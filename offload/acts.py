"""What happens to requests under way from outside: cancelled, written, held, let go, too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from offload.core.batch import Piece, State
from offload.core.events import Cancel, Unblock, Written
from offload.driver.base import Event
from offload.driver.foreign import ForeignEvent
from offload.hands import settle
from offload.holding import HoldBlock, refuse_held, refuse_held_pages
from offload.ride import Ride
from offload.submit import compute_marks

if TYPE_CHECKING:
    from offload.shell import Places, Shell

_LET_GO = 1024
"""Held requests let go in one turn: about 5 ms of the loop."""


def cancel(ride: Ride) -> None:
    """Cancel a request; see `Transfer.cancel`. Any thread."""
    shell = ride.shell
    shell.home.check_process("cancel")
    here = shell.home.here and not shell.deciding
    if not ride.decide(State.CANCELLED):
        return
    if here:
        _abandon(ride, None)
    else:
        shell.bell.ring()
        shell.post(lambda: _abandon(ride, None))


def expire(ride: Ride) -> None:
    """Fail a request whose deadline has passed. On the loop's thread."""
    fail(ride, TimeoutError("its deadline passed before it had settled"))


def fail(ride: Ride, error: BaseException) -> None:
    """End a request that cannot go on, unless it has ended."""
    if ride.decide(State.FAILED, error):
        _abandon(ride, error)


def _abandon(ride: Ride, error: BaseException | None) -> None:
    """End a request for its caller; the copies go on where others ride on them."""
    shell = ride.shell
    if ride.settled:
        return
    if ride.wanted_by_others():
        settle(shell, ride, State.CANCELLED if error is None else State.FAILED, error)
    else:
        shell.handle(Cancel(ride.request.id, error))
    shell.ask_for_turn()


def watch(ride: Ride, piece: int, marks: Sequence[Event]) -> None:
    """Let a queued piece of a request go when its marks have landed; fail the request when one raises."""
    try:
        for mark in marks:
            mark.watch(_Watch(ride, piece, mark))
    except BaseException as error:
        _fail_all(ride, error)  # nothing would let it go
        if not isinstance(error, Exception):  # a signal's
            raise


@attrs.define(eq=False)
class _Watch:
    """What a mark calls when it has landed, on any thread. More than once counts once."""

    _ride: Ride
    _piece: int
    _mark: Event
    _told: bool = False

    def __call__(self) -> None:
        self._ride.shell.post(self._landed)

    def _landed(self) -> None:
        if self._told:
            return
        self._told = True
        error = self._mark.error if isinstance(self._mark, ForeignEvent) else None
        if error is None:
            self._ride.shell.handle(Unblock(self._piece))
        else:
            _fail_all(self._ride, error)


def _fail_all(ride: Ride, error: BaseException) -> None:
    """Fail a request and those that ride on it: they wait for the same marks."""
    for each in (ride, *(ride.joined or ())):
        fail(each, error)


def layer_written(ride: Ride, layer: int) -> None:
    """Let the backup of a layer start; see `Transfer.layer_written`. Any thread."""
    shell = ride.shell
    shell.home.check_process("say that a layer is written")
    marks = compute_marks(shell.driver)
    ride.write(layer)

    def written() -> None:
        piece = shell.machine.new_id()
        shell.handle(Written(ride.request.id, layer, piece, len(marks)))
        watch(ride, piece, marks)

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
            shell.home.post(lambda: shell.post(go))

    if held:
        shell.post(go)


def let_go_of_all(shell: Shell) -> None:
    """Unblock everything that is held: nobody's block may keep a scheduler from closing."""
    for ride in list(shell.rides.values()):
        if ride.hold is not None and ride.hold.pieces:
            let_go(shell, ride.hold.pieces)


def refuse_waiting(ride: Ride) -> None:
    """Raise if the caller waits for what he keeps back himself. Any thread."""
    hold = ride.shell.holds.current()
    if hold is not None:
        refuse_held(hold, ride.shell.machine, ride)


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
