"""The second half of a submit: a request takes its place in the order. On the loop's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np

from offload.actions import expire, watch
from offload.core.batch import State
from offload.core.events import Hasten
from offload.core.kinds import Direction
from offload.entry import Entry
from offload.transfer import Transfer

if TYPE_CHECKING:
    from offload.shell import Shell


def submit_nowait(shell: Shell, entry: Entry) -> Transfer:
    """Admit a request, or raise `anyio.WouldBlock` where it would have to wait for room."""
    shell.refuse_closed()
    if not shell.parking.open_for(entry.priority, entry.request.nbytes):
        raise anyio.WouldBlock
    return admit(shell, entry)


def admit(shell: Shell, entry: Entry) -> Transfer:
    """Give a request its place in the order.

    Raises:
        RequestError: It could only wait for ever. Nothing was queued.
    """
    shell.catch_up()
    if shell.closing:
        shell.refuse_closed()
    deadline = entry.request.deadline  # its own: who shares another has that one's request
    if not (entry.join and _join(shell, entry)):
        _enter(shell, entry)
    if deadline is not None and not entry.settled:
        entry.alarm = shell.timer.call_at(deadline, lambda: expire(entry))
    return Transfer(entry)


def _enter(shell: Shell, entry: Entry) -> None:
    request = entry.request
    request.id = shell.machine.new_id()
    if request.streaming:
        entry.stream()
    if request.num_pages:
        _start(shell, entry)
        shell.ask_here()
    else:
        _complete(shell, entry)


def _start(shell: Shell, entry: Entry) -> None:
    """Queue a request, and let it wait for what it must wait for outside the machine."""
    shell.submit(entry)
    number = entry.request.id
    if entry.hold is not None:
        entry.hold.pieces.append(number)
    watch(entry, number, entry.marks)


def _complete(shell: Shell, entry: Entry) -> None:
    """Let a request of no pages be done."""
    entry.counters.admit()
    entry.counters.withdraw()
    entry.settle(State.DONE, None)
    entry.counters.settle()
    entry.release()


def _join(shell: Shell, entry: Entry) -> bool:
    """Let it share a running load of the same pairs that nothing has come between; return whether it does."""
    member, _, device_pages = entry.request.parts[0]
    if not len(device_pages):
        return False
    table = shell.group.members[member].device.pages.table
    lead = shell.entries.get(table.last_writer(int(device_pages[0])))
    if lead is None or not _same_copy(lead, entry):
        return False
    if not shell.machine.undisturbed(lead.request) or not lead.copying():
        return False
    due = entry.request.due  # its own, as from here on it has the lead's request
    lead.take(entry)
    if due < lead.request.due:
        shell.handle(Hasten(lead.request.id, due))
        shell.ask_here()
    entry.counters.admit()
    entry.counters.withdraw()
    return True


def _same_copy(lead: Entry, entry: Entry) -> bool:
    """Return whether a load moves just these pages, in the same order with compute."""
    ahead, request = lead.request, entry.request
    if ahead.direction is not Direction.LOAD or lead.after != entry.after:
        return False
    if any(mark not in lead.marks for mark in entry.marks):
        return False  # compute was queued between the two
    if ahead.route is not request.route or len(ahead.parts) != len(request.parts):
        return False
    return all(
        np.array_equal(mine[1], theirs[1]) and np.array_equal(mine[2], theirs[2])
        for mine, theirs in zip(ahead.parts, request.parts, strict=True)
    )
