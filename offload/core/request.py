"""What a caller asked for, checked and frozen: the event that starts everything.

Pages are int64 arrays that nobody changes after submit. A request names pages of every member of the
pool group that it moves; for a single pair of pools that is one `Part`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from offload.core.kinds import Direction

PATIENCE = 10.0
"""Seconds. A request without a deadline counts as due this long after submit, and one step of priority is
worth as much: so priority decides among requests of the same ten seconds, and an old request is never
overtaken by one that was submitted `PATIENCE * (1 + difference in priority)` later. Nothing starves."""

Pages = NDArray[np.int64]


Part: TypeAlias = tuple[int, Pages, Pages]
"""The page pairs of one member of the group, as (member, host pages, device pages); row `i` of one side goes to
row `i` of the other. A bare tuple, since garbage collections pass over those of arrays and numbers."""


@attrs.define(eq=False)
class Request:
    """One load or backup, as it was submitted. Nobody changes it but for `due`; being frozen costs a microsecond more."""

    id: int
    """Unique and increasing in order of submission: the order in which hazards are resolved."""

    direction: Direction
    parts: tuple[Part, ...]

    route: Hashable
    """How its bytes will be copied. Requests of one direction and one route may share a batch."""

    nbytes: int
    """Bytes it moves over all layers and members."""

    num_pages: int
    """Pages it moves, over all members."""

    due: float
    """When it counts as late, in seconds on the scheduler's clock: smaller is more urgent. Who shares its copies
    and is more urgent makes it so."""

    deadline: float | None = None
    streaming: bool = False
    blockers: int = 0
    """Things outside the machine that must happen first: compute marks and an open `hold`."""


def due(submitted: float, priority: float, deadline: float | None) -> float:
    """Return when a request counts as late: the static key that orders all queues."""
    patient = submitted + PATIENCE
    if deadline is not None and deadline < patient:
        patient = deadline
    return patient - priority * PATIENCE
