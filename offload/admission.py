"""The second half of a submit: a request takes its place in the order. On the loop's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np

from offload.acts import expire, watch
from offload.core.batch import State
from offload.core.kinds import Direction
from offload.ride import Ride
from offload.submit import Submission
from offload.transfer import Transfer

if TYPE_CHECKING:
    from offload.shell import Shell


def submit_nowait(shell: Shell, submission: Submission) -> Transfer:
    """Admit a submission, or raise `anyio.WouldBlock` where it would have to wait for room."""
    shell.refuse_closed()
    if not shell.line.open_for(submission.priority, submission.nbytes):
        raise anyio.WouldBlock
    return admit(shell, submission)


def admit(shell: Shell, submission: Submission) -> Transfer:
    """Give a submission its place in the order.

    Raises:
        RequestError: It could only wait for ever. Nothing was queued.
    """
    shell.take_inbox()
    if shell.closing:
        shell.refuse_closed()
    ride = (_join(shell, submission) if submission.join else None) or _enter(shell, submission)
    if submission.deadline is not None and not ride.settled:
        ride.alarm = shell.timer.call_at(submission.deadline, lambda: expire(ride))
    return Transfer(ride)


def _enter(shell: Shell, submission: Submission) -> Ride:
    request = submission.request(shell.machine.new_id())
    held = submission.hold is not None and not submission.streaming
    ride = Ride(
        shell,
        request,
        shell.counters.of(request.direction),
        submission.submitted_ns,
        submission.tags,
        submission.after,
        submission.marks,
        submission.hold if held else None,
    )
    if request.streaming:
        ride.stream()
    if request.num_pages:
        _start(shell, ride)
        shell.ask_here()
    else:
        _complete(shell, ride)
    return ride


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


def _join(shell: Shell, submission: Submission) -> Ride | None:
    """Ride on a running load of the same pairs that nothing has come between."""
    member, _, device_pages = submission.parts[0]
    if not len(device_pages):
        return None
    table = shell.group.members[member].device.pages.table
    lead = shell.rides.get(table.last_writer(int(device_pages[0])))
    if lead is None or not _same_copy(lead, submission):
        return None
    if not shell.machine.undisturbed(lead.request) or not lead.copying():
        return None
    rider = Ride(
        shell,
        lead.request,
        lead.counters,
        submission.submitted_ns,
        submission.tags,
        submission.after,
        submission.marks,
    )
    lead.take(rider)
    rider.counters.admit()
    rider.counters.withdraw()
    return rider


def _same_copy(lead: Ride, submission: Submission) -> bool:
    """Return whether a load moves just these pages, in the same order with compute."""
    request = lead.request
    if request.direction is not Direction.LOAD or lead.after != submission.after:
        return False
    if any(mark not in lead.marks for mark in submission.marks):
        return False  # compute was queued between the two
    if request.route is not submission.route or len(request.parts) != len(submission.parts):
        return False
    return all(
        np.array_equal(mine[1], theirs[1]) and np.array_equal(mine[2], theirs[2])
        for mine, theirs in zip(request.parts, submission.parts, strict=True)
    )
