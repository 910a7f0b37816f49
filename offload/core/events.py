"""What the machine is told and what it answers: events in, commands out.

Nobody changes one; they are not frozen because that would cost more than what is done about them.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from offload.core.batch import Batch, Piece, State
from offload.core.request import Request

# Events ---------------------------------------------------------------------------------------


@attrs.define
class Unblock:
    """One thing that held a piece back from outside has happened."""

    piece: int


@attrs.define
class Written:
    """The forward has written one layer of a streaming backup."""

    request: int
    layer: int
    piece: int
    """A fresh id for the piece that this layer becomes."""

    blockers: int = 0


@attrs.define
class Cancel:
    """Nobody wants the request any more; with an `error`, it failed instead (its deadline passed)."""

    request: int
    error: BaseException | None = None


@attrs.define
class Hasten:
    """Somebody more urgent shares the copies of a request."""

    request: int
    due: float
    """When that one counts as late."""


@attrs.define
class Flush:
    """Issue what may be issued, at most one batch per direction."""


@attrs.define
class Landed:
    """Layers below `layers` of a batch have landed. Cumulative."""

    batch: int
    layers: int


@attrs.define
class Failed:
    """The copy of a batch raised at `layer`; its stream issues no more of it."""

    batch: int
    error: BaseException

    spoiled: frozenset[int] = frozenset()
    """Requests that cannot be mended by copying again: compute was ordered after a copy that has not landed,
    and goes on without it."""


@attrs.define
class Ended:
    """Nothing of the batch will touch memory again."""

    batch: int
    layers: int = 0
    """As in `Landed`, where that was not told yet."""

    untouched: bool = False
    """Nothing of it ever did: it ended before its first layer began."""


Event: TypeAlias = Request | Unblock | Written | Cancel | Hasten | Flush | Landed | Failed | Ended

# Commands -------------------------------------------------------------------------------------


@attrs.define
class Issue:
    """Put a batch on the stream of its direction."""

    batch: Batch


@attrs.define
class Extend:
    """The batch may go on: its `limit` has grown."""

    batch: Batch


@attrs.define
class Reorder:
    """The batch has become more urgent: its `due` is earlier."""

    batch: Batch


@attrs.define
class Stop:
    """Nobody wants the rest of the batch."""

    batch: Batch


@attrs.define
class Watch:
    """Somebody follows the batch: from now on the machine wants to hear of each of its layers."""

    batch: Batch


@attrs.define
class SettleLayer:
    """Layers below `batch.landed` have landed for every piece of the batch."""

    batch: Batch


@attrs.define
class Settle:
    """The request is over for its callers: done, failed or cancelled, as `state` says."""

    piece: Piece
    state: State


@attrs.define
class Unlock:
    """The pages of the request are free of traffic."""

    piece: Piece


Command: TypeAlias = Issue | Extend | Reorder | Stop | Watch | SettleLayer | Settle | Unlock
