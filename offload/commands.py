"""What the machine commands, done. On the loop's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.core.batch import Batch, Piece, State
from offload.core.events import (
    Command,
    Extend,
    Issue,
    Reorder,
    Settle,
    SettleLayer,
    Stop,
    Unlock,
    Watch,
)
from offload.entry import Entry
from offload.flight import Flight
from offload.route import Route

if TYPE_CHECKING:
    from offload.shell import Shell


def carry_out(shell: Shell, command: Command) -> None:
    """Do one thing that the machine wants done."""
    match command:
        case SettleLayer(batch):
            flight = shell.flights[batch.id]
            for entry in flight.entries:
                if entry.watched:
                    entry.wake(batch.landed)
        case Issue(batch):
            _issue(shell, batch)
        case Settle(piece, state):
            _settle(shell, piece, state)
        case Unlock(piece):
            _unlock(shell, piece)
        case Extend(batch):
            shell.flights[batch.id].limit = batch.limit
            _kick(shell, batch)
        case Reorder(batch):
            shell.flights[batch.id].hasten()
        case Watch(batch):
            flight = shell.flights[batch.id]
            flight.watched = flight.by_layer = True
            shell.report(flight)
        case Stop(batch):
            shell.flights[batch.id].stopped = True
            _kick(shell, batch)


def _issue(shell: Shell, batch: Batch) -> None:
    route = batch.route
    assert isinstance(route, Route)
    flight = Flight(
        batch,
        route,
        shell.waiting_threads,
        shell.report,
        shell.counters.of(batch.direction),
        shell.tracer,
        batch.direction,
        shell.driver.now_ns,
    )
    shell.batches += 1
    shell.flights[batch.id] = flight
    now = shell.driver.now_ns()
    for piece in batch.pieces:
        if piece.followers:
            flight.watched = flight.by_layer = True
        entry = shell.entries.get(piece.request.id)
        if entry is not None:
            entry.fly(flight, piece)
    try:
        shell.driver.stream(batch.direction).carry(flight)
    except BaseException as error:  # the driver's, and so that of these requests
        flight.failed(batch.first, error)
        flight.ended()
        if not isinstance(error, Exception):  # a signal's
            raise
    shell.ledger.issued(flight.entries, now)  # while the stream plans already


def _kick(shell: Shell, batch: Batch) -> None:
    if not shell.flights[batch.id].over:
        shell.driver.stream(batch.direction).kick()


def _settle(shell: Shell, piece: Piece, state: State) -> None:
    entry = shell.entries[piece.id]
    if not entry.issued_ns:
        entry.counters.withdraw()
    settle(shell, entry, state, piece.error)
    for each in entry.joined or ():
        settle(shell, each, state, piece.error)


def settle(shell: Shell, entry: Entry, state: State, error: BaseException | None) -> None:
    """Let a request be over, unless it is already, and write down how it ended."""
    if entry.settled:
        return
    shell.ledger.settled(entry, entry.settle(state, error))
    if entry.alarm is not None:
        shell.timer.cancel(entry.alarm)
        entry.alarm = None
    if shell.waiting_threads.waiters:
        shell.waiting_threads.wake()


def _unlock(shell: Shell, piece: Piece) -> None:
    entry = shell.entries.pop(piece.id)
    if entry.issued_ns:
        entry.counters.drain(entry.request.nbytes)
    entry.release()
    if shell.waiting_threads.waiters:
        shell.waiting_threads.wake()
    if shell.vacancies:
        shell.vacancies.vacate(piece.id)
        shell.ask_here()
    if shell.changed:
        shell.notify()
