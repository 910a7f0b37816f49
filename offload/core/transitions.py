"""The states of a request, and what may follow what: a table. Anything else is a defect of offload."""

from __future__ import annotations

from offload.core.batch import Piece, State
from offload.errors import InvalidTransitionError

TRANSITIONS: dict[tuple[State, str], State] = {
    (State.QUEUED, "issue"): State.ISSUED,
    (State.QUEUED, "cancel"): State.CANCELLED,
    (State.QUEUED, "fail"): State.FAILED,
    (State.ISSUED, "issue"): State.ISSUED,  # the next layer of a streaming backup
    (State.ISSUED, "split"): State.QUEUED,  # its batch failed; it goes on alone
    (State.ISSUED, "land"): State.DONE,
    (State.ISSUED, "cancel"): State.DRAINING,
    (State.ISSUED, "fail"): State.DRAINING,
    (State.DRAINING, "drain cancelled"): State.CANCELLED,
    (State.DRAINING, "drain failed"): State.FAILED,
}


def move(owner: Piece, word: str) -> None:
    """Move a request to its next state.

    Raises:
        InvalidTransitionError: There is none.
    """
    state = TRANSITIONS.get((owner.state, word))
    if state is None:
        raise InvalidTransitionError(event=word, state=owner.state, story=(repr(owner),))
    owner.state = state
