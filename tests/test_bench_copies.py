"""The slowdown figure of `bench/copies.py`: of compute alone, by its own clock, beside copies that go on all along."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import pytest

from bench.copies import IN_FLIGHT, PARTS, Running, in_parts, shuffled, slowdown

LOOKS = 6
"""How often compute is asked before it is over."""


@attrs.define(eq=False)
class Copy:
    """A copy that is under way until somebody waits for it."""

    world: World
    pages: frozenset[tuple[int, int]]

    def wait_issued(self) -> None:
        """Return at once."""

    def result(self) -> None:
        """End."""
        self.world.moving.remove(self)


@attrs.define(eq=False)
class World:
    """Compute of so many milliseconds alone, and of more for each copy that moves while it is enqueued."""

    moving: list[Copy] = attrs.field(factory=list)
    seen: list[int] = attrs.field(factory=list)
    """How many copies moved, at each look beside copies."""

    def submit(self, *, host_pages: list[int], device_pages: list[int]) -> Copy:
        """Begin a copy, which may share no page with one that moves."""
        pages = frozenset(zip(host_pages, device_pages, strict=True))
        assert not any(pages & copy.pages for copy in self.moving), "copies take turns"
        self.moving.append(Copy(self, pages))
        return self.moving[-1]

    def start(self) -> Running:
        """Enqueue compute."""
        beside, looks = len(self.moving), iter(range(LOOKS))

        def over() -> bool:
            if beside:
                self.seen.append(len(self.moving))
            return next(looks, None) is None

        return Running(over, lambda: 10.0 + 0.5 * beside)


@pytest.fixture
def world() -> World:
    return World()


def parts(world: World) -> list[Callable[[], Copy]]:
    submit = partial(world.submit)
    return in_parts(submit, shuffled(64, 0), shuffled(64, 1))  # type: ignore[arg-type, return-value]


def test_slowdown_is_of_computes_own_time(world: World) -> None:
    """10 ms alone and 12 ms beside four copies are 1.2, however long the copies take."""
    assert slowdown(world.start, parts(world)) == pytest.approx((10 + 0.5 * IN_FLIGHT) / 10)  # type: ignore[arg-type]


def test_copies_are_under_way_until_compute_is_over(world: World) -> None:
    """At every look as many move, none sharing pages with another, and none is left at the end."""
    slowdown(world.start, parts(world))  # type: ignore[arg-type]
    assert world.seen == [IN_FLIGHT] * len(world.seen)
    assert len(world.seen) == 3 * (LOOKS + 1)
    assert world.moving == []


def test_parts_are_all_pages_once() -> None:
    """Every pair of pages is in one part, and parts are of a size."""
    there, here = shuffled(64, 0), shuffled(64, 1)
    made = in_parts(lambda **pages: pages, there, here)  # type: ignore[arg-type]
    pages = [(p["host_pages"], p["device_pages"]) for p in (part() for part in made)]  # type: ignore[index]
    assert len(pages) == PARTS
    assert {len(hosts) for hosts, _ in pages} == {len(there) // PARTS}
    pairs = [pair for hosts, devices in pages for pair in zip(hosts, devices, strict=True)]
    assert sorted(pairs) == sorted(zip(there, here, strict=True))
