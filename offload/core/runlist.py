"""Which flight goes next on a stream.

A stream asks at each layer boundary. A handful of flights share a stream at a time, so the answer is
a look at all of them: no heap, and an urgency may change while its flight is under way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Generic, Protocol, TypeVar

_Work_co = TypeVar("_Work_co", covariant=True)

_urgency = attrgetter("urgency")


class Layered(Protocol[_Work_co]):
    """What a runlist asks of a flight."""

    @property
    def urgency(self) -> tuple[float, ...]:
        """Smaller goes first."""

    @property
    def stopped(self) -> bool:
        """Whether nobody wants the rest."""

    @property
    def exhausted(self) -> bool:
        """Whether every layer has been handed out."""

    def next_layer(self) -> tuple[int, _Work_co] | None:
        """Hand out the next layer, or None when it may not go on yet or nothing is left."""


Flight = TypeVar("Flight", bound=Layered[object])


class Runlist(Generic[Flight]):
    """The flights that one stream carries, in the order in which they came.

    One thread at a time: the stream's own. A flight leaves when it is stopped, or exhausted: it is
    then in `left`, until `reap` takes it from there, once.
    """

    __slots__ = ("asked", "flights", "left")

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        """Those that may still hand out a layer."""
        self.left: list[Flight] = []
        """Those that never will again and are not reaped yet."""
        self.asked: Flight | None = None
        """The one that was asked last: it is to blame when `pick` raises."""

    def __repr__(self) -> str:
        return f"<Runlist {len(self.flights)} flights, {len(self.left)} to reap>"

    @property
    def busy(self) -> bool:
        """Whether there is anything to pick or to reap."""
        return bool(self.flights or self.left)

    def add(self, flight: Flight) -> None:
        """Take a flight."""
        self.flights.append(flight)

    def drop(self, flight: Flight) -> None:
        """Take no further layer of this flight: it failed. Nothing happens when it has left already."""
        if flight in self.flights:
            self.flights.remove(flight)
            self.left.append(flight)
            self.asked = None

    def sweep(self) -> None:
        """Drop what is stopped, without handing out a layer."""
        for flight in self.flights[:]:
            if flight.stopped:
                self.drop(flight)

    def pick(self) -> tuple[Flight, int, object] | None:
        """Hand out the next layer of the most urgent flight that has one: `(flight, layer, work)`.

        Of two equally urgent flights the one added earlier goes first. A flight that may not go on
        yet is passed over and stays.
        """
        flights = self.flights
        # One flight is the common case, and this runs once per layer.
        if len(flights) > 1:
            self.sweep()
            flights = sorted(self.flights, key=_urgency)
        for flight in flights:
            if flight.stopped:
                self.drop(flight)
                continue
            self.asked = flight
            handed = flight.next_layer()
            if flight.exhausted:
                self.drop(flight)
            if handed is not None:
                return flight, handed[0], handed[1]
        return None

    def reap(self) -> list[Flight]:
        """Return the flights that left since the last call, in the order in which they left."""
        left, self.left = self.left, []
        return left
