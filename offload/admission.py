"""The second half of a submit: a request takes its place in the order. On the loop's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np

from offload.acts import expire, watch
from offload.core.batch import State
from offload.core.kinds import Direction
from offload.ride import Ride
from offload.transfer import Transfer

if TYPE_CHECKING:
    from offload.shell import Shell


def submit_nowait(shell: Shell, ride: Ride) -> Transfer:
    """Admit a request, or raise `anyio.WouldBlock` where it would have to wait for room."""
    shell.refuse_closed()
    if not shell.line.open_for(ride.priority, ride.request.nbytes):
        raise anyio.WouldBlock
    return admit(shell, ride)


def admit(shell: Shell, ride: Ride) -> Transfer:
    """Give a request its place in the order.

    Raises:
        RequestError: It could only wait for ever. Nothing was queued.
    """
    shell.catch_up()
    if shell.closing:
        shell.refuse_closed()
    deadline = ride.request.deadline  # its own: who rides on another has that one's request
    if not (ride.join and _join(shell, ride)):
        _enter(shell, ride)
    if deadline is not None and not ride.settled:
        ride.alarm = shell.timer.call_at(deadline, lambda: expire(ride))
    return Transfer(ride)


def _enter(shell: Shell, ride: Ride) -> None:
    request = ride.request
    request.id = shell.machine.new_id()
    if request.streaming:
        ride.stream()
    if request.num_pages:
        _start(shell, ride)
        shell.ask_here()
    else:
        _complete(shell, ride)


def _start(shell: Shell, ride: Ride) -> None:
    """Queue a request, and let it wait for what it must wait for outside the machine."""
    shell.submit(ride)
    number = ride.request.id
    if ride.hold is not None:
        ride.hold.pieces.append(number)
    watch(ride, number, ride.marks)


def _complete(shell: Shell, ride: Ride) -> None:
    """Let a request of no pages be done."""
    ride.counters.admit()
    ride.counters.withdraw()
    ride.settle(State.DONE, None)
    ride.counters.settle()
    ride.release()


def _join(shell: Shell, ride: Ride) -> bool:
    """Let it ride on a running load of the same pairs that nothing has come between; return whether it does."""
    member, _, device_pages = ride.request.parts[0]
    if not len(device_pages):
        return False
    table = shell.group.members[member].device.pages.table
    lead = shell.rides.get(table.last_writer(int(device_pages[0])))
    if lead is None or not _same_copy(lead, ride):
        return False
    if not shell.machine.undisturbed(lead.request) or not lead.copying():
        return False
    lead.take(ride)
    ride.counters.admit()
    ride.counters.withdraw()
    return True


def _same_copy(lead: Ride, ride: Ride) -> bool:
    """Return whether a load moves just these pages, in the same order with compute."""
    ahead, request = lead.request, ride.request
    if ahead.direction is not Direction.LOAD or lead.after != ride.after:
        return False
    if any(mark not in lead.marks for mark in ride.marks):
        return False  # compute was queued between the two
    if ahead.route is not request.route or len(ahead.parts) != len(request.parts):
        return False
    return all(
        np.array_equal(mine[1], theirs[1]) and np.array_equal(mine[2], theirs[2])
        for mine, theirs in zip(ahead.parts, request.parts, strict=True)
    )
