"""A driver and an io backend on paper: no threads, no copies, so that what is left is the library itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

import offload
from offload.backend.base import Access
from offload.core.kinds import Direction
from offload.core.plan import Runs
from offload.driver.base import Event, Flight
from offload.pool import DevicePool, HostPool

NAME = "nothing"
"""The io backend's name."""


class Passed:
    """An event that has landed."""

    def query(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def watch(self, callback: Callable[[], object]) -> None:
        callback()


PASSED = Passed()


class Nothing:
    """Prepared copies that copy nothing."""

    def __init__(self, ops: int) -> None:
        self.ops = ops

    def copy(self, layer: int) -> None:
        """Do nothing."""

    def nbytes(self, layer: int) -> int:
        return self.ops

    def num_ops(self, layer: int) -> int:
        return self.ops

    def poison(self, layer: int) -> None:
        """Do nothing."""

    def accesses(self, layer: int) -> Sequence[Access]:
        return ()


class NoCopies:
    """An io backend that copies nothing."""

    name = NAME

    def prepare(
        self, device: DevicePool, host: HostPool, direction: Direction, runs: Runs
    ) -> Nothing:
        return Nothing(len(runs.source))


offload.register_backend(NAME, NoCopies, column=lambda *pair: NAME)


@attrs.define(eq=False)
class PaperStream:
    """Issues every layer of a flight when it is carried, and lands them when told."""

    name: str
    flights: list[Flight] = attrs.field(factory=list)
    issued_at: float = 0.0
    """When the last layer was issued, on the clock of this thread's CPU time."""

    def carry(self, flight: Flight) -> None:
        flight.prepare()
        self.issue(flight)

    def issue(self, flight: Flight) -> int:
        """Issue all layers of a flight; return how many there are."""
        layers = 0
        while (step := flight.next_layer()) is not None:
            layer, work = step
            work()
            flight.issued(layer, PASSED)
            layers += 1
        self.issued_at = time.thread_time()
        self.flights.append(flight)
        return layers

    def kick(self) -> None:
        """Nothing waits here."""

    def wait(self, event: Event) -> None:
        """Nothing waits here."""

    def record(self) -> Event:
        return PASSED

    def land(self, layers: int) -> None:
        """Land every flight."""
        flights, self.flights = self.flights, []
        for flight in flights:
            for layer in range(layers):
                flight.landed(layer, 0, 0)
            flight.ended()


class PaperDriver:
    """A driver whose streams issue in the frame of whoever carries."""

    name = "paper"
    fences = False
    lost = None
    closed = False
    alarm = None

    def __init__(self, stream: Callable[[str], PaperStream] = PaperStream) -> None:
        self.load = stream("load")
        self.backup = stream("backup")

    def stream(self, name: str) -> PaperStream:
        return self.load if name == "load" else self.backup

    def compute_stream(self) -> PaperStream:
        return self.load

    def marks(self) -> tuple[Event, ...]:
        return ()

    def events(self, after: object) -> tuple[Event, ...]:
        return ()

    def capturing(self) -> bool:
        return False

    def now(self) -> float:
        return time.perf_counter()

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    async def quiesce(self) -> None:
        """Land what is in the air."""

    def close(self) -> None:
        """There are no threads."""
