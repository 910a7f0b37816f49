"""Whose pools these are: a table of pages keeps one order, and so serves one scheduler at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import attrs

from offload.core.machine import Machine
from offload.driver.base import Driver
from offload.errors import RequestError
from offload.flight import Flight
from offload.group import PoolGroup
from offload.loop import LoopHandle, NoLoop


@attrs.define(eq=False)
class PoolOwnership:
    """The claim of one scheduler on the pools of its group, from when it opens until it has closed.

    A scheduler whose loop ended under it never closes. Its claim goes when nothing of it moves any more: the end
    of the loop sees to that, where it is heard of, or the last flight to end after it, or the next scheduler to open.
    Each asks the loop first whether it is closed.
    """

    group: PoolGroup
    machine: Machine
    driver: Driver
    flights: Mapping[int, Flight]
    loop: LoopHandle = attrs.field(factory=NoLoop)
    """The loop that it lives on, once it is open. No more of the scheduler is known here: pools know us, and
    would keep all that we know."""

    _releasing: AbstractContextManager[object] = attrs.field(factory=threading.RLock)
    _unwatch: Callable[[], None] | None = None

    def take(self, loop: LoopHandle) -> None:
        """Make the pools' tables ours, on a loop.

        Raises:
            RequestError: One belongs to a scheduler that is open.
        """
        pools = [pool for member in self.group.members for pool in (member.device, member.host)]
        for pool in pools:
            before = pool.pages.table.owner
            if isinstance(before, PoolOwnership) and before.loop.closed:
                before.release_after_loop()
            if pool.pages.table.owner is not None:
                raise RequestError(
                    f"{pool!r} belongs to a scheduler that is open. Close that one first, or give "
                    "each scheduler pools of its own."
                )
        self.loop = loop
        for pair in self.machine.tables:
            for table in pair:
                table.owner = self
        self._unwatch = loop.at_end(partial(_release_after_loop, weakref.ref(self)))

    def give_back(self) -> None:
        """Make the pools' tables nobody's, as far as they are ours."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        for pair in self.machine.tables:
            for table in pair:
                if table.owner is self:
                    table.owner = None

    def release_after_loop(self) -> None:
        """After the loop's end, let go of the pools as soon as nothing moves any more. Any thread."""
        still = [flight for flight in self.flights.values() if not flight.over]
        for flight in still:
            if flight.limit < flight.batch.last:  # nobody will let it go on
                flight.stopped = True
                self.driver.stream(flight.batch.direction).kick()
        if not still:
            with self._releasing:
                self.machine.forget(self)
                self.give_back()


def _release_after_loop(owner: weakref.ref[PoolOwnership]) -> None:
    """Do so, if anybody still has it, and this is the process whose loop it was."""
    found = owner()
    if found is not None and not found.loop.forked and found.loop.closed:
        found.release_after_loop()
