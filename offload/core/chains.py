"""Who leaves because another does, and who hears of it: chains as long as a queue, some links per event.

A request that goes may let a hundred thousand others go on, or leave in their turn. All that in one event would
keep the loop for a second. So both stand in line here; what is too much for one event is left to the next flushes,
and whoever hears late only waits longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import attrs

from offload.core.batch import Piece

LEAVE_AT_ONCE = 1024
"""Pieces that leave in one event: about 10 ms."""

TELL_AT_ONCE = 4096
"""Followers that hear in one event that they may go on: about 5 ms."""


@attrs.define(eq=False)
class Chains:
    """The pieces that leave, and the followers that have yet to hear that somebody came further, or left.

    Args:
        leave: Lets a piece leave, if nobody is ahead of it.
        hear: Lets a follower hear of a piece; the last argument says whether that has left.
    """

    leave: Callable[[Piece], None]
    hear: Callable[[Piece, Piece, bool], None]

    leaving: deque[Piece] = attrs.field(factory=deque)
    telling: deque[tuple[Piece, bool, Iterator[Piece]]] = attrs.field(factory=deque)
    """Who came further, whether it has left, and those of its followers who have not heard of that yet."""

    tellable: int = 0
    """How many may still be told in this event. Whoever begins an event sets it to `TELL_AT_ONCE`."""

    _busy: bool = False
    """Whether those who leave are let go already, further up the stack."""

    def go_on(self) -> None:
        """Do some more of what earlier events have left."""
        if self.telling:
            self._busy = True  # of those who leave because of it, no more than one event may
            self._tell_some()
            self._busy = False
        if self.leaving:
            self._let_go()

    def retire(self, piece: Piece) -> None:
        """Let a piece that moves no more bytes leave, once nobody is ahead of it."""
        self.leaving.append(piece)
        if len(self.leaving) == 1 and not self._busy:
            self._let_go()

    def tell(self, piece: Piece) -> None:
        """Let those who follow a piece hear of it: the first now, too many later, in order."""
        followers = piece.followers
        if followers:
            self.telling.append((piece, piece.finished, iter(followers)))
            if len(self.telling) == 1:
                self._tell_some()

    def _let_go(self) -> None:
        self._busy = True
        for _ in range(LEAVE_AT_ONCE):
            if not self.leaving:
                break
            self.leave(self.leaving.popleft())
        self._busy = False

    def _tell_some(self) -> None:
        while self.telling and self.tellable:
            piece, gone, followers = self.telling[0]
            for follower in islice(followers, self.tellable):
                self.tellable -= 1
                self.hear(follower, piece, gone)
            if self.tellable:
                self.telling.popleft()
