"""Hooks: which ops a rule picks, what is recorded, and the race detector's planted races."""

from __future__ import annotations

import anyio
import pytest

from offload.testing import Hooks, RaceError, SimDriver, ThreadsDriver
from tests.driver.fakes import FakeFlight

DEVICE, HOST = "device pool", "host pool"


def test_rules_pick_by_stream_layer_and_number() -> None:
    """A rule applies to the n-th op that matches its stream and layer, and to no other."""
    hooks = Hooks()
    error = OSError("third")
    hooks.fail(error, stream="load", layer=1, nth=2)
    hooks.delay(0.25, stream="backup")
    hooks.delay(0.5, nth=5)
    asked = [("load", 1), ("backup", 1), ("load", 0), ("load", 1), ("backup", 1)]
    orders = [hooks.begin(stream, None, layer) for stream, layer in asked]
    assert [order.error for order in orders] == [None, None, None, error, None]
    assert [order.delay for order in orders] == [0.0, 0.25, 0.0, 0.0, 0.75]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("make", [SimDriver, ThreadsDriver])
def test_a_planted_fault_is_recorded(make: type[SimDriver | ThreadsDriver], torn: bool) -> None:
    """The n-th op fails, with its bytes unmoved or, torn, moved; the record says how each ended."""
    hooks = Hooks()
    hooks.fail(OSError("planted"), nth=2, torn=torn)
    driver = make(hooks=hooks)
    flight = FakeFlight(3)
    driver.stream("load").carry(flight)
    while isinstance(driver, SimDriver) and driver.step():
        pass
    assert flight.over.wait(10.0)
    driver.close()
    assert [(op.stream, op.flight, op.layer, op.state) for op in hooks.ops] == [
        ("load", flight, 0, "landed"),
        ("load", flight, 1, "failed"),
    ]
    assert bool((flight.destination[1] == flight.source[1]).all()) is torn


def load(layers: int = 2, **names: object) -> FakeFlight:
    return FakeFlight(layers, name="load", reads=HOST, writes=DEVICE, pages=[3], **names)  # type: ignore[arg-type]


def backup(layers: int = 2) -> FakeFlight:
    return FakeFlight(layers, name="backup", reads=DEVICE, writes=HOST, pages=[3])


def races(sim: SimDriver) -> list[tuple[object, int, int, bool, bool]]:
    """Run to the end and return what raced: (pool, layer, page, first wrote, second wrote)."""
    try:
        anyio.run(sim.run_until_idle)
    except RaceError as error:
        return [
            (race.pool, race.layer, race.page, race.first.write, race.second.write)
            for race in error.races
        ]
    return []


def sim(**options: object) -> SimDriver:
    return SimDriver(detect_races=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("fence", [True, False])
def test_compute_that_reads_a_load_needs_its_fence(fence: bool) -> None:
    """Compute enqueued while a load is in the air races with it, unless it is fenced on its event."""
    driver = sim(ahead=2)
    flight = load()
    driver.stream("load").carry(flight)
    while len(flight.events) < 2:
        driver.step()
    for layer in range(2):
        if fence:
            driver.compute_stream().wait(flight.events[layer])
        driver.compute(1e-3, reads=[(DEVICE, layer, [3])])
    found = races(driver)
    assert len(found) == (0 if fence else 2)
    assert all(race[0] == DEVICE for race in found)


def test_a_fence_on_the_wrong_stream_orders_nothing() -> None:
    """An event recorded on another stream leaves the race, and the report tells both stories."""
    driver = sim()
    flight = load(1)
    driver.stream("load").carry(flight)
    while not flight.events:
        driver.step()
    driver.compute_stream().wait(driver.stream("backup").record())
    driver.compute(1.0, reads=[(DEVICE, 0, [2, 3])])
    with pytest.raises(RaceError) as caught:
        anyio.run(driver.run_until_idle)
    text = str(caught.value)
    assert "1 race(s)" in text
    assert "page 3 of layer 0 of 'device pool'" in text
    assert "load layer 0 of <flight load> on load wrote it at" in text
    assert "on compute of MainThread read it at" in text
    assert driver.races == ()


@pytest.mark.parametrize("mark", [True, False])
def test_a_load_must_follow_the_compute_that_was_queued(mark: bool) -> None:
    """A load into pages that queued compute reads races, unless its stream waits for the mark."""
    driver = sim()
    driver.compute(1.0, reads=[(DEVICE, 0, [3])])
    marks = driver.marks()
    if mark:
        driver.stream("load").wait(marks[0])
    driver.stream("load").carry(load(1))
    assert bool(races(driver)) is not mark


def test_a_load_carried_when_a_watched_mark_has_passed_is_ordered() -> None:
    """A host that watched an event knows of it when called, and so does what it carries then."""
    driver = sim()
    driver.compute(1.0, reads=[(DEVICE, 0, [3])])
    driver.marks()[0].watch(lambda: driver.stream("load").carry(load(1)))
    assert races(driver) == []


@pytest.mark.parametrize("rule", ["event", "landed", "none"])
def test_a_load_after_the_backup_of_its_pages_needs_a_hazard_rule(rule: str) -> None:
    """The second direction waits for the first's event, or is carried after its landing was heard."""
    driver = sim()
    first, second = backup(1), load(1)
    driver.stream("backup").carry(first)
    while not first.events or (rule == "landed" and not first.over.is_set()):
        driver.step()
    if rule == "event":
        driver.stream("load").wait(first.events[0])
    driver.stream("load").carry(second)
    assert bool(races(driver)) is (rule == "none")


@pytest.mark.parametrize("early", [True, False])
def test_a_page_freed_early_races_with_its_next_owner(early: bool) -> None:
    """A page handed on before the copy into it landed is written twice without order."""
    driver = sim()
    flight = load(1)
    driver.stream("load").carry(flight)
    while not (flight.events if early else flight.over.is_set()):
        driver.step()
    driver.compute(1e-6, writes=[(DEVICE, 0, [3])])
    assert bool(races(driver)) is early


def test_a_host_that_looks_too_early_races_and_one_that_asked_does_not() -> None:
    """A host thread may touch what it heard has landed, and nothing sooner."""
    for asked in (True, False):
        driver = sim()
        flight = backup(1)
        driver.stream("backup").carry(flight)
        while not flight.events:
            driver.step()
        driver.step()
        if asked:
            assert flight.events[0].wait()
        driver.touch(reads=[(HOST, 0, [3])])
        assert bool(races(driver)) is not asked


def test_readers_do_not_race_and_other_pages_do_not_either() -> None:
    """Two reads of a page, or writes of two pages or layers, need no order."""
    driver = sim()
    driver.stream("backup").carry(backup(1))
    driver.compute(1.0, reads=[(DEVICE, 0, [3])], writes=[(DEVICE, 0, [4]), (DEVICE, 1, [3])])
    assert races(driver) == []
