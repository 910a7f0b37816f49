"""Waits that could never end: a load that waits for a forward that waits for the load."""

from __future__ import annotations

from collections.abc import Mapping

from offload.core.batch import OPEN, Piece
from offload.core.claims import Claims
from offload.core.request import Pages, Request
from offload.errors import RequestError


def refuse_endless_wait(load: Request, pieces: Mapping[int, Piece], claims: Claims) -> None:
    """Check a load that is about to be submitted while streaming backups wait for their forwards.

    Raises:
        RequestError: It would follow a streaming backup whose unwritten layers would follow it.
    """
    ahead = {pieces[number] for number in claims.ahead_of(load)}
    for stream in _awaited(ahead, pieces, claims):
        for member, _, mine in load.parts:
            for other, _, theirs in stream.request.parts:
                if member == other:
                    _refuse_shared(mine, theirs, stream)


def _awaited(ahead: set[Piece], pieces: Mapping[int, Piece], claims: Claims) -> list[Piece]:
    """Return the streaming backups, not fully written, that some pieces wait for, or are."""
    found, seen, stack = [], set(ahead), list(ahead)
    while stack:
        piece = stack.pop()
        more = set(piece.follows)
        if piece.stream is not None:
            more |= piece.stream.pieces
            if piece.state in OPEN and len(piece.stream.written) < piece.last:
                found.append(piece)
                more |= {pieces[number] for number in claims.ahead_of_layers(piece)}
        stack += more - seen
        seen |= more
    return found


def _refuse_shared(mine: Pages, theirs: Pages, stream: Piece) -> None:
    shared = set(mine.tolist()) & set(theirs.tolist())
    if shared:
        raise RequestError(
            f"load writes device page {min(shared)}, and waits for the streaming backup "
            f"{stream.request.id}, which has yet to read that page: neither could go first. Load into "
            "other pages, or submit it after the forward's last layer_written."
        )
