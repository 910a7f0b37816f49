"""Faults that the soak must find: each takes away one rule, as a mistake in the code would.

`PLANTS` is the table; `planted(name)` plants one for the length of a block; `first_find(name)` says
which program notices. `python -m tests.soak --plants` prints that for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from offload import waits
from offload.core.batch import Piece
from offload.core.chains import Chains
from offload.core.events import Stop, Written
from offload.core.hazards import HazardTable, Pages
from offload.core.machine import Machine
from offload.core.page_ids import PagesLike
from offload.core.pages import PageAllocator
from offload.driver.base import Event
from offload.driver.sim import SimDriver
from offload.driver.sim_engine import Engine, SimOp, SimTicket
from offload.flight import Flight
from offload.parking import ParkingLot
from offload.shell import Shell
from offload.testing import RaceError
from tests.soak.player import SoakError
from tests.soak.run import Outcome, play

MOST_SEEDS = 200
"""Each planted fault shows within so many programs."""

Patch = pytest.MonkeyPatch


def _readers_forget_writers(patch: Patch) -> None:
    """A load may read host pages that a backup still writes."""
    before = HazardTable._before_read

    def after(self: HazardTable, holder: int, pages: Pages, counts: Pages) -> Sequence[int]:
        before(self, holder, pages, counts)
        return ()

    patch.setattr(HazardTable, "_before_read", after)


def _writers_forget_readers(patch: Patch) -> None:
    """A load may overwrite device pages that a backup still reads."""
    patch.setattr(HazardTable, "_readers_of", lambda self, pages: set())


def _writers_forget_writers(patch: Patch) -> None:
    """Two loads may write one page in any order."""
    before = HazardTable._before_write

    def after(self: HazardTable, holder: int, pages: Pages, counts: Pages) -> Sequence[int]:
        writers = set(self._writer[pages].tolist())
        return tuple(other for other in before(self, holder, pages, counts) if other not in writers)

    patch.setattr(HazardTable, "_before_write", after)


def _hazards_do_not_hold_back(patch: Patch) -> None:
    """A request is issued at once, although it follows another."""
    patch.setattr(Machine, "_limit", lambda self, piece: cast("Piece", piece).last)


def _ghosts_leave_early(patch: Patch) -> None:
    """A request that is cancelled while it follows another lets those behind it run ahead."""
    before = Chains.retire

    def after(self: Chains, piece: Piece) -> None:
        if piece.batch is None and not piece.finished:
            for ahead in piece.follows:
                ahead.followers = [each for each in ahead.followers or () if each is not piece]
            piece.follows = set()
        before(self, piece)

    patch.setattr(Chains, "retire", after)


def _released_before_drained(patch: Patch) -> None:
    """A cancelled request gives its pages back while its copies are still on the stream."""

    def after(self: Machine, piece: Piece) -> None:
        batch = piece.batch
        if batch is not None and len(batch.pieces) == 1 and not batch.closed:
            self._commands.append(Stop(batch))
        self._chains.retire(piece)

    patch.setattr(Machine, "_drop", after)


def _layers_forget_whom_the_backup_follows(patch: Patch) -> None:
    """A written layer of a streaming backup goes ahead of those who use its host pages."""
    before = Machine._written

    def after(self: Machine, event: Written) -> None:
        owner = self._pieces.get(event.request)
        if owner is None:
            return
        kept, owner.follows = owner.follows, set()
        before(self, event)
        owner.follows = kept

    patch.setattr(Machine, "_written", after)


def _no_fence(patch: Patch) -> None:
    """Compute does not wait for a layer."""
    patch.setattr(waits, "fence", lambda entry, layer, timeout=None: 0)


def _no_marks(patch: Patch) -> None:
    """Requests do not wait for compute."""
    patch.setattr(SimDriver, "marks", lambda self: ())


def _marks_on_the_wrong_stream(patch: Patch) -> None:
    """What a request must follow is recorded on the load stream, not on the compute stream."""
    patch.setattr(SimDriver, "marks", lambda self: (self.stream("load").record(),))


def _events_on_the_wrong_stream(patch: Patch) -> None:
    """The event of a layer is recorded on the other copy stream."""
    engines: dict[int, dict[str, Engine]] = {}
    before = Engine.enqueue

    def after(self: Engine, op: SimOp) -> Event:
        event = before(self, op)
        here = engines.setdefault(id(self.clock), {})
        here[self.name] = self
        other = here.get({"load": "backup", "backup": "load"}.get(self.name, ""))
        return event if other is None else SimTicket(other, other.issued)

    patch.setattr(Engine, "enqueue", after)


def _freed_early(patch: Patch) -> None:
    """A freed page is handed out again although bytes still move."""

    def after(self: PageAllocator, pages: PagesLike) -> None:
        self._put(self.check_owned(pages))

    patch.setattr(PageAllocator, "free", after)


def _repeated_behind_compute(patch: Patch) -> None:
    """A copy that broke is made again, although compute that was fenced on it has gone on."""
    patch.setattr(Flight, "spoiled", lambda self: frozenset())


def _joins_what_was_overtaken(patch: Patch) -> None:
    """A load shares a running one although others have written its pages since."""

    def after(self: Machine, request: object) -> bool:
        return request.id in self._pieces  # type: ignore[attr-defined]

    patch.setattr(Machine, "undisturbed", after)


def _admits_beyond_the_bound(patch: Patch) -> None:
    """Threads that come at once are all admitted, as if each had come alone."""
    patch.setattr(ParkingLot, "open_for", lambda self, priority, nbytes: True)


def _admits_inside_an_admission(patch: Patch) -> None:
    """Whoever is admitted lets the next one in before it has its own place: backwards, and ever deeper."""
    before = Shell.catch_up

    def after(self: Shell) -> None:
        before(self)
        self.take_inbox(1)

    patch.setattr(Shell, "catch_up", after)


PLANTS: dict[str, Callable[[Patch], None]] = {
    "readers forget writers": _readers_forget_writers,
    "writers forget readers": _writers_forget_readers,
    "writers forget writers": _writers_forget_writers,
    "hazards do not hold back": _hazards_do_not_hold_back,
    "ghosts leave early": _ghosts_leave_early,
    "released before drained": _released_before_drained,
    "layers forget whom the backup follows": _layers_forget_whom_the_backup_follows,
    "no fence": _no_fence,
    "no marks": _no_marks,
    "marks on the wrong stream": _marks_on_the_wrong_stream,
    "events on the wrong stream": _events_on_the_wrong_stream,
    "freed early": _freed_early,
    "repeated behind compute": _repeated_behind_compute,
    "joins what was overtaken": _joins_what_was_overtaken,
    "admits beyond the bound": _admits_beyond_the_bound,
    "admits inside an admission": _admits_inside_an_admission,
}
"""By name: a function that plants the fault; its docstring says what goes wrong."""


OF_CROWDS = {"admits beyond the bound", "admits inside an admission"}
"""Those that show on threads: the simulator has none that come by while its loop is busy."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one fault for the length of the block."""
    with pytest.MonkeyPatch.context() as patch:
        PLANTS[name](patch)
        yield


def first_find(name: str) -> Outcome | None:
    """Plant a fault and return the first program that shows it as a race or a wrong byte, else None."""
    with planted(name):
        threads = name in OF_CROWDS
        outcomes = (play(seed, threads=threads) for seed in range(MOST_SEEDS))
        return next((o for o in outcomes if isinstance(o.error, (RaceError, SoakError))), None)
