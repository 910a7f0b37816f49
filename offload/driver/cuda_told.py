"""What the flights of a CUDA stream have been told.

Two threads tell a flight: the issuing one and the waiting one. Each flight hears its landings in order, one
failure at most, and one ending, which is the last; then it is forgotten. On a lost device it has failed
before it ends, unless all of it had landed and only the ending was to come.
"""

from __future__ import annotations

import threading

from offload.driver.base import Flight
from offload.driver.cuda_event import Hub


class Told:
    """The flights that one stream carries, and how far each has got."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._carried: dict[int, Flight] = {}
        self._failed: set[int] = set()
        self._begun: dict[int, int] = {}  # last layer handed out, by flight
        self._landed: dict[int, int] = {}  # last layer landed, by flight
        # Held while a flight is told something; no callback needs it, and none blocks.
        self._telling = threading.Lock()

    def __repr__(self) -> str:
        return f"<Told of {len(self._carried)} flights>"

    def take(self, flight: Flight) -> None:
        """Carry a flight from now on."""
        self._carried[id(flight)] = flight

    def flights(self) -> list[Flight]:
        """Return those that have not ended."""
        return list(self._carried.values())

    def begin(self, flight: Flight, layer: int) -> None:
        """Note that a layer is about to be enqueued."""
        self._begun[id(flight)] = layer

    def land(self, flight: Flight, layer: int, stamps: tuple[int, int]) -> None:
        """Tell a flight that a layer has passed."""
        with self._telling:
            if id(flight) in self._carried:
                self._landed[id(flight)] = layer
                flight.landed(layer, *stamps)

    def fail(self, flight: Flight, layer: int, error: BaseException) -> None:
        """Tell a flight, once, that it failed."""
        with self._telling:
            if id(flight) in self._carried and id(flight) not in self._failed:
                self._failed.add(id(flight))
                flight.failed(layer, error)

    def end(self, flight: Flight) -> None:
        """Tell a flight, once, that it is over, and forget it; on a lost device it has failed first."""
        key, lost = id(flight), self._hub.lost
        with self._telling:
            if self._carried.pop(key, None) is None:
                return
            begun, landed = self._begun.pop(key, None), self._landed.pop(key, None)
            # One that has landed whole was only waiting for its ending.
            whole = flight.exhausted and begun == landed
            if lost is not None and not whole and key not in self._failed:
                flight.failed(0 if landed is None else landed + 1, lost)
            self._failed.discard(key)
            flight.ended()
