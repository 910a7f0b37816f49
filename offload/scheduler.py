"""The scheduler as a caller in an event loop sees it: submit, ask, close.

Submits run in the caller's frame up to the point where the request has its place in the order; what
happens then is `offload.shell`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import anyio
import attrs
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from offload import actions
from offload.admission import admit, submit_nowait
from offload.asked import described, in_use, statistics
from offload.closing import Closing, check_deadline
from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike
from offload.counters import Counters
from offload.entry import Entry
from offload.flight_warm import warm_up
from offload.group import PagePair, PoolGroup
from offload.shell import Shell
from offload.statistics import Statistics
from offload.submit import After, checked
from offload.threadface import ThreadFace
from offload.transfer import Transfer
from offload.vacancy import POSTS, until_idle


@attrs.define(eq=False, repr=False)
class Scheduler:
    """Moves pages between the pools of a group. Made by `open_scheduler`; belongs to one event loop."""

    _shell: Shell
    _closing: Closing = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._closing = Closing(self._shell)

    # Life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._shell.open()
        try:
            await warm_up(self._shell.driver, self._shell.router.cold())
        except BaseException:
            await self._closing.leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._closing.leave()
        if self._shell.fault is not None:
            if error is None:
                raise self._shell.fault
            if error is not self._shell.fault:  # a signal's, that came in the middle of a decision
                error.add_note(f"The scheduler failed too: {self._shell.fault!r}")

    async def aclose(self, drain: bool = False, deadline: float | None = None) -> None:
        """Stop intake, cancel what is queued, and wait until nothing moves any more.

        Cancelled, it cancels what is queued, waits for the copies in the air, as memory must not go away under
        them, and then lets the cancellation through. Any task of the loop, any number of times; a later call
        waits for the first, and finishes what a signal broke off. In a forked child it returns at once.

        Args:
            drain: Finish what is queued instead of cancelling it; until this call is cancelled, or there is
                another that does not drain.
            deadline: On the scheduler's clock; what is still queued then is cancelled after all.
        """
        check_deadline(deadline)
        await self._closing.close(drain, deadline)

    # Submit ------------------------------------------------------------------------------------------

    async def load(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a load, host to device; return it once admitted. Parks only for back-pressure.

        `host_pages[i]` goes to `device_pages[i]`. Cancelled while parked, nothing was
        submitted. Admitted at once, it does not yield: a loop of awaits makes one batch.

        Args:
            priority: Larger goes first. One step outweighs ten seconds of waiting.
            deadline: On the scheduler's clock, `now()`; not settled by then, it fails.
            after: What must have happened before the first byte moves: `"compute"` is what the compute
                streams have queued by now; or an event, a stream, a sequence of them; `()` is nothing.
            join: Share a load of the same page pairs that has not ended instead of copying again. It is then as
                urgent as the most urgent of those who share it.
            io_backend: Overrides the scheduler's default.
            members: Pages of the group's members that have their own.

        Raises:
            RequestError: Pages, deadline or `after` are wrong. Nothing was queued.
            UnsupportedPairError: The io backend cannot copy these pools.
            SchedulerClosedError: It is closed.
            TimeoutError: The deadline passed while it was parked.
        """
        self._shell.loop.check("load")
        entry = checked(
            self._shell, Direction.LOAD, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, join=join,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return await self._submit(entry)

    async def backup(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit a backup, device to host; return it once admitted. As `load`, and:

        Args:
            streaming: Copy each layer when `Transfer.layer_written` says that the forward has written it.
        """
        self._shell.loop.check("backup")
        entry = checked(
            self._shell, Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return await self._submit(entry)

    def load_nowait(
        self,
        *,
        host_pages: PagesLike,
        device_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        join: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit as `load` does; raise `anyio.WouldBlock` where that would park."""
        self._shell.loop.check("load_nowait")
        entry = checked(
            self._shell, Direction.LOAD, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, join=join,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return submit_nowait(self._shell, entry)

    def backup_nowait(
        self,
        *,
        device_pages: PagesLike,
        host_pages: PagesLike,
        priority: float = 0,
        deadline: float | None = None,
        after: After = "compute",
        streaming: bool = False,
        io_backend: str | None = None,
        members: Mapping[str, PagePair] | None = None,
    ) -> Transfer:
        """Submit as `backup` does; raise `anyio.WouldBlock` where that would park."""
        self._shell.loop.check("backup_nowait")
        entry = checked(
            self._shell, Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return submit_nowait(self._shell, entry)

    async def _submit(self, entry: Entry) -> Transfer:
        await checkpoint_if_cancelled()
        if self._shell.parking.open_for(entry.priority, entry.request.nbytes):
            return admit(self._shell, entry)
        if entry.hold is not None:
            actions.let_go(self._shell, entry.hold.pieces)
        woken = anyio.Event()
        place = self._shell.parking.enter(entry.priority, entry.request.nbytes, woken)
        timer, alarm = self._shell.timer, None
        if entry.request.deadline is not None:
            alarm = timer.call_at(entry.request.deadline, place.expire)
        try:
            while True:
                await woken.wait()
                self._shell.refuse_closed()
                if place.expired:
                    raise TimeoutError(
                        f"the deadline of a {entry.direction} passed while it waited for room; "
                        "nothing was submitted"
                    )
                if self._shell.parking.may_go(place):
                    return admit(self._shell, entry)
                place.event = woken = anyio.Event()
        finally:
            if alarm is not None:
                timer.cancel(alarm)
            self._shell.parking.leave(place)

    def hold(self) -> AbstractContextManager[None]:
        """Keep back what this thread submits until the block ends; then it is one batch.

        Requests that follow others on the same pages are no part of it: they go when those have landed. On
        a loop the thread is that of all tasks: what others submit while the block awaits is kept back too.
        """
        if self._shell.loop.alive:
            self._shell.loop.check("hold")
        return actions.hold(self._shell)

    # Questions ---------------------------------------------------------------------------------------

    @property
    def group(self) -> PoolGroup:
        """The pools that it moves pages between."""
        return self._shell.group

    @property
    def from_thread(self) -> ThreadFace:
        """The blocking face, for any thread but the loop's."""
        return ThreadFace(self._shell)

    def now(self) -> float:
        """Return the time in seconds on the clock of deadlines."""
        return self._shell.driver.now()

    def busy(
        self,
        *,
        device_pages: PagesLike = (),
        host_pages: PagesLike = (),
        members: Mapping[str, PagePair] | None = None,
    ) -> bool:
        """Return whether any of these pages may still be read or written.

        Args:
            device_pages, host_pages: Pages of the anchor's pools, and so of all members that follow it.
            members: Pages of the group's members that have their own; either side may be empty.
        """
        if self._shell.loop.alive:  # else nothing is decided any more, or yet
            self._shell.loop.check("busy")
            self._shell.take_inbox(POSTS)
        return in_use(self._shell.group.places(device_pages, host_pages, members))

    async def idle(
        self,
        *,
        device_pages: PagesLike = (),
        host_pages: PagesLike = (),
        members: Mapping[str, PagePair] | None = None,
    ) -> None:
        """Wait until these pages are free of traffic, whatever became of the transfers. Arguments as `busy`.

        Raises:
            SchedulerClosedError: The device is lost, and they never will be.
            RequestError: A request uses them that is kept back by the `hold` this wait is in.
        """
        shell = self._shell
        shell.loop.check("idle", "scheduler.from_thread.wait_idle")
        await checkpoint()
        places = shell.group.places(device_pages, host_pages, members)
        await until_idle(shell, places)

    @property
    def counters(self) -> Counters:
        """The live counts that `statistics` and metrics are read from. Read only."""
        return self._shell.counters

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        return statistics(self._shell)

    def __repr__(self) -> str:
        return f"<Scheduler {described(self._shell)}>"
