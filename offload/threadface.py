"""The blocking face: the same scheduler for threads, and for engines that have no event loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import attrs

from offload import actions
from offload.admission_thread import call, submit, submit_nowait
from offload.asked import check_may_block, described, in_use, statistics
from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike
from offload.counters import Counters
from offload.group import PagePair
from offload.statistics import Statistics
from offload.submit import After, checked
from offload.transfer import Transfer
from offload.vacancy import block_until_idle
from offload.waits import check_timeout

if TYPE_CHECKING:
    from offload.shell import Shell


@attrs.define(eq=False, repr=False)
class ThreadFace:
    """Every name of the shell, blocking. Any thread but the loop's own."""

    _shell: Shell

    def load(
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
        timeout: float | None = None,
    ) -> Transfer:
        """Submit a load, as `Scheduler.load`; block while there is no room.

        Raises:
            TimeoutError: No room within `timeout` seconds, or before the deadline: nothing was submitted.
        """
        return submit(
            self._shell,
            checked(
                self._shell, Direction.LOAD, host_pages, device_pages,
                priority=priority, deadline=deadline, after=after, join=join,
                io_backend=io_backend, members=members,
            ),
            timeout,
        )  # fmt: skip

    def backup(
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
        timeout: float | None = None,
    ) -> Transfer:
        """Submit a backup, as `Scheduler.backup`; block while there is no room. Raises as `load`."""
        return submit(
            self._shell,
            checked(
                self._shell, Direction.BACKUP, host_pages, device_pages,
                priority=priority, deadline=deadline, after=after, streaming=streaming,
                io_backend=io_backend, members=members,
            ),
            timeout,
        )  # fmt: skip

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
        """Submit a load; raise `anyio.WouldBlock` where `load` would wait for room."""
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
        """Submit a backup; raise `anyio.WouldBlock` where `backup` would wait for room."""
        entry = checked(
            self._shell, Direction.BACKUP, host_pages, device_pages,
            priority=priority, deadline=deadline, after=after, streaming=streaming,
            io_backend=io_backend, members=members,
        )  # fmt: skip
        return submit_nowait(self._shell, entry)

    def hold(self) -> AbstractContextManager[None]:
        """Keep back what this thread submits until the block ends; then it is one batch.

        Requests that follow others on the same pages are no part of it: they go when those have landed.
        """
        return actions.hold(self._shell)

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
        """Return whether any of these pages may still be read or written. Arguments as `Scheduler.busy`."""
        places = self._shell.group.places(device_pages, host_pages, members)
        return call(self._shell, lambda: in_use(places))

    def wait_idle(
        self,
        *,
        device_pages: PagesLike = (),
        host_pages: PagesLike = (),
        members: Mapping[str, PagePair] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Block until these pages are free of traffic, whatever became of the transfers. Arguments as `busy`.

        Raises:
            TimeoutError: Not within `timeout` seconds.
            SchedulerClosedError: The loop or the device is gone, and they never will be.
            RequestError: A request uses them that is kept back by the `hold` this wait is in.
        """
        shell = self._shell
        check_may_block(shell, "wait for idle pages", "Call `await scheduler.idle(...)`.")
        check_timeout(timeout)
        places = shell.group.places(device_pages, host_pages, members)
        block_until_idle(shell, places, timeout)

    @property
    def counters(self) -> Counters:
        """The live counts that `statistics` and metrics are read from. Read only."""
        return self._shell.counters

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        return statistics(self._shell)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {described(self._shell)}>"
