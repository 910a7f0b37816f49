"""A race detector: two accesses to one page, one of them a write, that nothing orders.

Every stream and every host thread is an *actor* with a vector clock: for each actor, the number of the
last of its accesses that is known to have ended. An access is ordered after another when its actor's
clock, at its beginning, already knew the other. What makes a clock learn:

* the order of a stream: each thing on it knows all before it;
* `Stream.wait(event)`: what comes after knows all that the event knew;
* a host thread that enqueues compute, or `carry`: the stream learns what the thread knows;
* a landing that was delivered: every host thread knows it from then on, and so does every layer that is
  issued later. The scheduler relies on exactly that;
* a host thread that asks an event and hears that it has passed, waits for one, or watches one.

Time teaches nothing: two copies that happened one after the other by luck are still a race.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from offload.driver.base import Access

Knowledge = dict[str, int]
"""For each actor the number of its last access that is known to have ended."""


@attrs.frozen
class Span:
    """Pages that simulated compute, or a host thread, reads or writes; an `Access`."""

    pool: object
    layer: int
    pages: Sequence[int]
    write: bool


@attrs.frozen
class Story:
    """One access: who did what, when, knowing what."""

    actor: str
    number: int
    what: str
    write: bool
    began: float

    def __str__(self) -> str:
        verb = "wrote" if self.write else "read"
        return f"{self.what} on {self.actor} {verb} it at {self.began * 1e6:.1f} us"


@attrs.frozen
class Race:
    """Two accesses to one page that no event orders."""

    pool: object
    layer: int
    page: int
    first: Story
    second: Story

    def __str__(self) -> str:
        return (
            f"page {self.page} of layer {self.layer} of {self.pool!r}: {self.first}, then "
            f"{self.second}, and nothing orders the two"
        )


class RaceError(AssertionError):
    """The simulator saw races; `races` has them all."""

    def __init__(self, races: Sequence[Race]) -> None:
        self.races = tuple(races)
        lines = "\n  ".join(str(race) for race in self.races[:10])
        super().__init__(f"{len(self.races)} race(s):\n  {lines}")


@attrs.define(eq=False)
class _Page:
    """The last write of a page, and every read since."""

    write: Story | None = None
    reads: dict[str, Story] = attrs.Factory(dict)


def merge(into: Knowledge, other: Knowledge) -> None:
    """Learn what `other` knows."""
    for actor, number in other.items():
        if into.get(actor, 0) < number:
            into[actor] = number


class Races:
    """Who accessed what, and who knew of it."""

    def __init__(self) -> None:
        self.found: list[Race] = []
        self.seen: Knowledge = {}
        """What the host as a whole was told: landings that were delivered, marks that were idle."""
        self._numbers: dict[str, int] = {}
        self._pages: dict[tuple[int, int, int], _Page] = {}
        self._pools: dict[int, object] = {}
        self._reported: set[tuple[str, int, str, int]] = set()

    def access(
        self, actor: str, what: str, knows: Knowledge, accesses: Iterable[Access], now: float
    ) -> None:
        """Let an actor do its next thing; afterwards `knows` includes it."""
        self._numbers[actor] = number = self._numbers.get(actor, 0) + 1
        for access in accesses:
            self._pools[id(access.pool)] = access.pool  # alive, so that ids stay distinct
            story = Story(actor, number, what, access.write, now)
            for page in access.pages:
                self._touch(access, int(page), story, knows)
        knows[actor] = number

    def _touch(self, access: Access, page: int, story: Story, knows: Knowledge) -> None:
        entry = self._pages.setdefault((id(access.pool), access.layer, page), _Page())
        rivals = [entry.write] if entry.write is not None else []
        if access.write:
            rivals += entry.reads.values()
        for rival in rivals:
            # One access may name a page twice, and read what it writes.
            itself = (rival.actor, rival.number) == (story.actor, story.number)
            if not itself and knows.get(rival.actor, 0) < rival.number:
                self._report(Race(access.pool, access.layer, page, rival, story))
        if access.write:
            entry.write, entry.reads = story, {}
        else:
            entry.reads[story.actor] = story

    def _report(self, race: Race) -> None:
        first, second = race.first, race.second
        pair = (first.actor, first.number, second.actor, second.number)
        if pair not in self._reported:
            self._reported.add(pair)
            self.found.append(race)
