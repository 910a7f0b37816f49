"""Flights and works on paper, for driver tests: bytes in numpy arrays, callbacks written down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from offload.driver.base import Access, Event
from offload.driver.sim_races import Span

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5


@attrs.define(eq=False)
class FakeWork:
    """Copies one row of bytes."""

    source: Bytes
    destination: Bytes
    touches: Sequence[Access] = ()
    error: BaseException | None = None
    before: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def __call__(self) -> None:
        self.before()
        if self.error is not None:
            raise self.error
        self.destination[:] = self.source

    def poison(self) -> None:
        self.destination[:] = POISON

    def accesses(self) -> Sequence[Access]:
        return self.touches


class FakeFlight:
    """A flight that copies `source[layer]` to `destination[layer]` and writes down what it hears."""

    def __init__(
        self,
        layers: int = 3,
        *,
        name: str = "f",
        urgency: tuple[float, ...] = (0.0,),
        traced: bool = False,
        log: list[tuple[object, ...]] | None = None,
        reads: object = None,
        writes: object = None,
        pages: Sequence[int] = (0,),
        nbytes: int = 64,
    ) -> None:
        self.name = name
        self.urgency = urgency
        self.stopped = False
        self.traced = traced
        self.layers = layers
        self.allowed = layers
        self.handed = 0
        self.log: list[tuple[object, ...]] = log if log is not None else []
        self.events: list[Event] = []
        self.stamps: list[tuple[int, int]] = []
        self.errors: dict[int, BaseException] = {}
        self.over = threading.Event()
        self.prepared: Callable[[], object] = lambda: None
        self.before: dict[int, Callable[[], object]] = {}
        self.threads: set[int] = set()
        self.reads, self.writes, self.pages = reads, writes, pages
        self.source: Bytes = np.arange(layers * nbytes, dtype=np.int64).astype(np.uint8)
        self.source = self.source.reshape(layers, nbytes) | np.uint8(1)
        self.destination = np.zeros_like(self.source)

    def __repr__(self) -> str:
        return f"<flight {self.name}>"

    @property
    def exhausted(self) -> bool:
        return self.handed == self.layers

    def heard(self, *words: object) -> None:
        self.threads.add(threading.get_ident())
        self.log.append((self.name, *words))

    def prepare(self) -> None:
        self.heard("prepare")
        self.prepared()

    def next_layer(self) -> tuple[int, FakeWork] | None:
        if self.handed >= min(self.allowed, self.layers):
            return None
        layer, self.handed = self.handed, self.handed + 1
        spans = [
            Span(pool, layer, self.pages, write)
            for pool, write in ((self.reads, False), (self.writes, True))
            if pool is not None
        ]
        work = FakeWork(self.source[layer], self.destination[layer], spans, self.errors.get(layer))
        work.before = self.before.get(layer, work.before)
        return layer, work

    def issued(self, layer: int, event: Event, began_ns: int = 0) -> None:
        self.events.append(event)
        self.heard("issued", layer)

    def landed(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.stamps.append((start_ns, end_ns))
        self.heard("landed", layer)

    def failed(self, layer: int, error: BaseException) -> None:
        self.heard("failed", layer, error)

    def ended(self) -> None:
        self.heard("ended")
        self.over.set()


def story(name: str, layers: int) -> list[tuple[object, ...]]:
    """Return what a flight hears when all goes well, a layer at a time."""
    middle = [(name, what, layer) for layer in range(layers) for what in ("issued", "landed")]
    return [(name, "prepare"), *middle, (name, "ended")]
