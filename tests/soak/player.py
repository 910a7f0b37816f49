"""One program at play: who owns which pages, what was submitted, and the verdict at the end."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio
import attrs
import numpy as np
from anyio.abc import TaskGroup

import offload
from offload.core.hazards import Pages
from offload.driver.base import Event
from tests.soak.model import Cell, Copy, Model
from tests.soak.world import World

Pairs = list[tuple[int, int, int]]
"""(member, host page, device page)."""


class SoakError(AssertionError):
    """The program found a fault; the text says which."""


@attrs.define(eq=False)
class Player:
    """The state of a program between its steps."""

    world: World
    scheduler: offload.Scheduler
    tasks: TaskGroup
    model: Model
    owned: dict[tuple[int, bool], list[int]]
    """Pages that the program owns, by (member, device), for members that have pages of their own."""

    born: dict[tuple[int, int], int] = attrs.field(factory=dict)
    """How many copies had been submitted when a device page was allocated."""

    pinned: dict[tuple[int, bool, int], int] = attrs.field(factory=dict)
    """Pages that a task counts on: by (member, device, page), how many tasks."""

    computed: dict[tuple[int, int], Event] = attrs.field(factory=dict)
    """The last compute that touched a device page."""

    pending: int = 0
    """Tasks that have not ended."""

    quiet: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when the last one ends."""

    submitted: int = 0
    story: list[str] = attrs.field(factory=list)

    @classmethod
    def start(cls, world: World, scheduler: offload.Scheduler, tasks: TaskGroup) -> Player:
        """Fill all pools and own about half of the pages."""
        group = world.group
        model = Model([member.pool_layers for member in group.members])
        for (member, device), side in world.sides.items():
            for layer in range(len(side.arrays)):
                for page in range(world.pool(member, device=device).num_pages):
                    cell = Cell(member, device, layer, page)
                    world.write(cell, model.write(cell))
        player = cls(world, scheduler, tasks, model, {})
        for each in group.members:
            if each.index == 0 or each.rule == "own":
                for device in (False, True):
                    player.owned[each.index, device] = []
                    pool = group.anchor.device if device else group.anchor.host
                    player.alloc(each.index, pool.num_pages - (1 if device else 2), device=device)
        return player

    # ---- pages --------------------------------------------------------------------------------------

    def alloc(self, member: int, number: int, *, device: bool) -> list[int]:
        """Allocate pages; check that nothing moves there any more."""
        pool = self.world.pool(member, device=device)
        room = self.usable(member, device=device)
        pages = [int(page) for page in pool.pages.alloc(number)]
        if spare := [page for page in pages if page >= room]:
            pool.pages.free(spare)
        pages = [page for page in pages if page < room]
        table = pool.pages.table
        if len(pages) and table.locked(_array(pages)).any():
            raise SoakError(f"alloc handed out a page under traffic: {pages}")
        self.owned[member, device] += pages
        for page in pages:
            if device:
                self.born[member, page] = len(self.model.copies)
        return pages

    def usable(self, member: int, *, device: bool) -> int:
        """Return how many pages every member that follows this one has."""
        return self.world.pool(member, device=device).num_pages

    def free_pages(self, member: int, *, device: bool) -> list[int]:
        """Return owned pages that no task counts on."""
        return [
            page
            for page in self.owned[member, device]
            if not self.pinned.get((member, device, page))
        ]

    def pin(self, pairs: Iterable[tuple[int, bool, int]], by: int) -> None:
        """Count pages as needed by a task, or no longer."""
        for key in pairs:
            self.pinned[key] = self.pinned.get(key, 0) + by

    def followers(
        self, pages: Sequence[int], own: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """Return every member's device pages for some anchor pages and the other owners' own."""
        found: dict[int, list[int]] = {}
        for member in self.world.group.members:
            if member.index == 0 or member.rule == "same":
                found[member.index] = list(pages)
            elif member.rule == "own":
                found[member.index] = list(own[member.index])
            else:
                found[member.index] = [page + 1 for page in pages]
        return found

    # ---- submits --------------------------------------------------------------------------------------

    def pairs(self, own: Mapping[int, Sequence[tuple[int, int]]]) -> Pairs:
        """Return all page pairs of a request from (host, device) pairs of the owners of pages."""
        found: Pairs = []
        for member in self.world.group.members:
            if member.rule == "own":
                found += [(member.index, host, device) for host, device in own[member.index]]
            else:
                shift = 0 if member.rule == "same" else 1
                found += [(member.index, h + shift, d + shift) for h, d in own[0]]
        return found

    def arguments(self, own: Mapping[int, Sequence[tuple[int, int]]]) -> dict[str, object]:
        """Return the page arguments of a submit."""
        found: dict[str, object] = {
            "host_pages": [host for host, _ in own[0]],
            "device_pages": [device for _, device in own[0]],
        }
        members = {
            self.world.group.members[index].name: offload.PagePair(
                host_pages=[host for host, _ in pairs], device_pages=[device for _, device in pairs]
            )
            for index, pairs in own.items()
            if index
        }
        if members:
            found["members"] = members
        return found

    def note(self, transfer: offload.Transfer, pairs: Pairs, *, streaming: bool = False) -> Copy:
        """Put an admitted transfer into the model."""
        self.submitted += 1
        load = transfer.direction is offload.Direction.LOAD
        copy = Copy(len(self.model.copies), transfer.id, load, pairs, streaming, transfer)
        for other in self.model.copies:
            if other.request == transfer.id:
                copy.rides_on = other
        self.model.submit(copy)
        return copy

    def touching(self, pages: Mapping[int, Iterable[int]]) -> list[Copy]:
        """Return the copies since their allocation that touch some device pages, by member."""
        wanted = {(member, page) for member, some in pages.items() for page in some}
        found = []
        for copy in self.model.copies:
            for member, _, device in copy.pairs:
                key = member, device
                if key in wanted and self._born(member, device) <= copy.number:
                    found.append(copy)
                    break
        return found

    def _born(self, member: int, page: int) -> int:
        rule = self.world.group.members[member].rule
        if rule == "own" or member == 0:
            return self.born.get((member, page), 0)
        return self.born.get((0, page if rule == "same" else page - 1), 0)

    def shared(self, cell: Cell) -> bool:
        """Return whether a forward on another thread may be at work on a cell."""
        pinned = any(
            self.pinned.get((member, cell.device, cell.page - shift))
            for member, shift in ((cell.member, 0), (0, 0), (0, 1))
        )
        return self.world.sim is None and pinned

    # ---- time and tasks ----------------------------------------------------------------------------------

    def spawn(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run a task of the program; a closed scheduler ends it quietly."""
        self.pending += 1

        async def run() -> None:
            try:
                await work()
            except (offload.TransferFailed, offload.SchedulerClosedError):
                pass
            finally:
                self.pending -= 1
                if not self.pending:
                    self.quiet.set()

        self.tasks.start_soon(run)

    async def pause(self, draw: random.Random) -> None:
        """Let some time pass, or none."""
        if draw.random() < 0.5:
            return
        seconds = draw.choice((0.0, 1e-6, 5e-6, 2e-5, 1e-4))
        if self.world.sim is not None:
            await self.world.sim.advance(seconds)
        else:
            await anyio.sleep(seconds)

    def compute(
        self,
        work: Callable[[], None],
        reads: Iterable[Cell],
        writes: Iterable[Cell],
        seconds: float,
    ) -> None:
        """Enqueue work on the compute stream; where compute is the thread, do it now."""
        sim = self.world.sim
        if sim is None:
            work()
            return
        cells = [(cell, False) for cell in reads] + [(cell, True) for cell in writes]
        spans = {
            write: [
                (self.world.pool(c.member, device=c.device), c.layer, [c.page])
                for c, w in cells
                if w is write
            ]
            for write in (False, True)
        }
        event = sim.compute(seconds, work, reads=spans[False], writes=spans[True])
        for cell, _ in cells:
            self.computed[cell.member, cell.page] = event

    def touch(self, reads: Iterable[Cell] = (), writes: Iterable[Cell] = ()) -> None:
        """Say that this thread accesses cells right now."""
        if self.world.sim is not None:
            spans = [
                [(self.world.pool(c.member, device=c.device), c.layer, [c.page]) for c in cells]
                for cells in (reads, writes)
            ]
            self.world.sim.touch(reads=spans[0], writes=spans[1])

    def look(self, what: str, cells: Iterable[Cell]) -> None:
        """Read cells now, and remember what they should have held."""
        for cell in cells:
            self.model.seen.append((what, cell, self.model.cells[cell], self.world.read(cell)))

    def say(self, text: str) -> None:
        """Add a line to the story."""
        now = f"{self.world.sim.now() * 1e6:8.1f} us  " if self.world.sim is not None else ""
        self.story.append(f"{now}{text}")

    # ---- the verdict ---------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Check everything that must hold once all is over.

        Raises:
            SoakError: Something does not.
        """
        if self.pending:
            raise SoakError(f"{self.pending} tasks wait for ever")
        self._judge_transfers()
        self._judge_pages()
        began: dict[int, set[int]] = {}
        for op in self.world.hooks.ops:
            for piece in op.flight.batch.pieces:  # type: ignore[attr-defined]
                began.setdefault(piece.request.id, set()).add(op.layer)
        for copy in self.model.copies:
            copy.began = began.get(copy.request, set())
        for what, cell, version, found in self.model.seen:
            self._compare(what, cell, version.holds(), found)
        for cell, version in self.model.cells.items():
            self._compare("at the end", cell, version.holds(), self.world.read(cell))

    def _compare(self, what: str, cell: Cell, stamp: int | None, found: bytes) -> None:
        if stamp is not None and found != self.world.expected(cell, stamp):
            raise SoakError(f"{what}: {cell} does not hold stamp {stamp}")

    def _judge_transfers(self) -> None:
        outcomes: dict[str, int] = {}
        for copy in self.model.copies:
            if not copy.transfer.done:
                raise SoakError(f"{copy.transfer!r} never settled")
            state = copy.transfer.state.value
            outcomes[state] = outcomes.get(state, 0) + 1
        if strange := set(outcomes) - {"done", "failed", "cancelled"}:
            raise SoakError(f"transfers ended as {strange}")
        now = self.scheduler.statistics()
        sides = (now.load, now.backup)
        got = {
            "submitted": sum(side.submitted for side in sides),
            "settled": sum(side.settled for side in sides),
            "failed": sum(side.failed for side in sides),
            "cancelled": sum(side.cancelled for side in sides),
            "queued": now.queued_requests + now.queued_bytes,
            "inflight": now.inflight_requests + now.inflight_bytes,
            "parked": now.parked,
        }
        want = {
            "submitted": self.submitted,
            "settled": self.submitted,
            "failed": outcomes.get("failed", 0),
            "cancelled": outcomes.get("cancelled", 0),
            "queued": 0,
            "inflight": 0,
            "parked": 0,
        }
        if got != want:
            raise SoakError(f"statistics say {got}, and it was {want}")

    def _judge_pages(self) -> None:
        for member in self.world.group.members:
            for device in (False, True):
                pool = self.world.pool(member.index, device=device)
                table = pool.pages.table
                if table.locked(_array(range(pool.num_pages))).any() or table._reading:
                    raise SoakError(f"{pool!r} is locked after all is over")
                pages = pool.pages.statistics()
                mine = len(self.owned.get((member.index, device), ()))
                if (pages.num_locked, pages.num_allocated) != (0, mine):
                    raise SoakError(f"{pool!r}: {pages}, and {mine} pages are owned")


def _array(pages: Iterable[int]) -> Pages:
    return np.fromiter(pages, np.int64)
