"""Getting ready: what a backend's first copy would have to do first is done when a scheduler opens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import attrs

from offload.driver.base import Driver, Event, Work
from offload.route import Route


@attrs.define(eq=False)
class WarmUp:
    """A flight without layers. Its `prepare` runs where those of real ones will: on the stream's thread."""

    route: Route
    urgency: tuple[float, ...] = (0.0,)
    stopped: bool = False
    traced: bool = False
    exhausted: bool = True
    error: BaseException | None = None
    over: threading.Event = attrs.field(factory=threading.Event)

    def prepare(self) -> None:
        """Let the backends get ready."""
        self.route.warm_up()

    def next_layer(self) -> tuple[int, Work] | None:
        """Return None: there is no layer."""
        return None

    def issued(self, layer: int, event: Event, began_ns: int = 0) -> None:
        """Never called."""

    def landed(self, layer: int, start_ns: int, end_ns: int) -> None:
        """Never called."""

    def failed(self, layer: int, error: BaseException) -> None:
        """Note what a backend raised."""
        self.error = error

    def ended(self) -> None:
        """Let the opener go on."""
        self.over.set()


async def warm_up(driver: Driver, routes: Sequence[Route]) -> None:
    """Let the backends of these routes get ready, and wait for it: one route after the other.

    Raises:
        Exception: Whatever a backend raised: its first copy would have.
    """
    for route in routes:
        flight = WarmUp(route)
        driver.stream(route.direction).carry(flight)
        await driver.quiesce()
        await anyio.to_thread.run_sync(flight.over.wait, abandon_on_cancel=True)
        if flight.error is not None:
            raise flight.error
