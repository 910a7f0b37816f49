"""The simulator: virtual time, tasks between happenings, simulated compute."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

from offload.errors import RequestError
from offload.testing import Hooks, SimDriver
from tests.driver.fakes import POISON, FakeFlight

BACKENDS = ["asyncio", "trio"]


def run(backend: str, body: Callable[[], Awaitable[object]]) -> None:
    anyio.run(body, backend=backend)


def drain(sim: SimDriver) -> None:
    while sim.step():
        pass


def test_a_copy_takes_latency_and_bytes() -> None:
    """Three layers of 64 bytes at 1 GB/s and 1 us end at 3 x 1.064 us, and nothing else takes time."""
    sim = SimDriver(bandwidth=1e9, latency=1e-6)
    flight = FakeFlight(3, traced=True)
    sim.stream("load").carry(flight)
    drain(sim)
    assert flight.stamps == [(0, 1064), (1064, 2128), (2128, 3192)]
    assert sim.now() == pytest.approx(3.192e-6)


def test_streams_have_figures_of_their_own() -> None:
    """Bandwidth and latency by stream; a stream without a figure is refused by name."""
    sim = SimDriver(bandwidth={"load": 64e6, "backup": 32e6}, latency={"load": 0.0, "backup": 0.0})
    load, backup = FakeFlight(1, traced=True), FakeFlight(1, traced=True)
    sim.stream("load").carry(load)
    sim.stream("backup").carry(backup)
    drain(sim)
    assert (load.stamps, backup.stamps) == ([(0, 1000)], [(0, 2000)])
    with pytest.raises(RequestError, match="no figure for stream 'other'"):
        sim.stream("other")


@pytest.mark.parametrize("seed", range(5))
def test_jitter_repeats_and_only_lengthens(seed: int) -> None:
    """The same seed gives the same times, at most `jitter` above the exact ones."""

    def times() -> list[tuple[int, int]]:
        sim = SimDriver(seed, bandwidth=1e9, latency=1e-6, jitter=0.5)
        flight = FakeFlight(8, traced=True)
        sim.stream("load").carry(flight)
        drain(sim)
        return flight.stamps

    assert times() == times()
    assert all(1063 <= end - start <= 1598 for start, end in times())


def test_bytes_are_poison_until_they_land() -> None:
    """From its beginning to its end a copy's destination holds poison."""
    sim = SimDriver()
    flight = FakeFlight(2)
    sim.stream("load").carry(flight)
    while len(flight.stamps) < 1:
        sim.step()
    sim.step()
    np.testing.assert_array_equal(flight.destination[0], flight.source[0])
    while (flight.destination[1] == 0).all():
        sim.step()
    assert (flight.destination[1] == POISON).all()
    drain(sim)
    np.testing.assert_array_equal(flight.destination, flight.source)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tasks_run_between_happenings(backend: str) -> None:
    """A task that hears of a landing acts before the next copy ends; sleepers wake as time passes."""

    async def body() -> None:
        sim = SimDriver(bandwidth=64e3, latency=0.0)
        flight = FakeFlight(3)
        order: list[object] = []
        landed = anyio.Event()
        flight.before[1] = landed.set

        async def follower() -> None:
            await landed.wait()
            order.append(("heard", round(sim.now() * 1e6)))

        async def sleeper(microseconds: int) -> None:
            await sim.sleep_until(microseconds * 1e-6)
            order.append(("slept", round(sim.now() * 1e6)))

        async with anyio.create_task_group() as group:
            group.start_soon(follower)
            group.start_soon(sleeper, 1500)
            group.start_soon(sleeper, 2500)
            group.start_soon(sleeper, 9000)
            sim.stream("load").carry(flight)
            await sim.run_until_idle()
            assert round(sim.now() * 1e6) == 3000
            assert order == [("slept", 1500), ("heard", 2000), ("slept", 2500)]
            await sim.advance(0.006)
            assert order[-1] == ("slept", 9000)

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_advance_ends_exactly_then_and_by_layers(backend: str) -> None:
    """`advance` stops at its time; `advance_to_layer` when a flight has landed so many."""

    async def body() -> None:
        sim = SimDriver(bandwidth=64e3, latency=0.0)
        flight = FakeFlight(5)
        sim.stream("load").carry(flight)
        await sim.advance(0.0015)
        assert (sim.now(), len(flight.stamps)) == (0.0015, 1)
        await sim.advance_to_layer(3)
        assert len(flight.stamps) == 3
        await sim.advance_to_layer(2)
        assert len(flight.stamps) == 3
        await sim.advance_to_layer(5)
        assert len(flight.stamps) == 5
        await sim.run_until_idle()
        with pytest.raises(RuntimeError, match="no flight has landed 1 layers"):
            await sim.advance_to_layer(1)

    run(backend, body)


def test_a_closed_gate_is_idle_and_opening_goes_on() -> None:
    """A gated copy neither begins nor blocks; a delay is virtual."""
    hooks = Hooks()
    gate = hooks.gate(layer=0)
    hooks.delay(3600.0, layer=1)
    sim = SimDriver(hooks=hooks)
    flight = FakeFlight(2)
    sim.stream("load").carry(flight)
    drain(sim)
    assert (gate.arrived, sim.now(), len(flight.events)) == (1, 0.0, 1)
    assert (flight.destination == 0).all()
    gate.open()
    drain(sim)
    assert flight.over.is_set()
    assert 3600.0 < sim.now() < 3600.1


def test_compute_takes_time_in_order_and_fences_hold_it() -> None:
    """Compute runs when its time is over, after the events its stream was told to wait for."""
    sim = SimDriver(bandwidth=64e3, latency=0.0)
    flight = FakeFlight(1)
    log: list[tuple[str, float]] = []
    assert sim.marks() == ()
    sim.compute(0.002, lambda: log.append(("before", sim.now())))
    mark = sim.marks()
    assert mark == sim.marks()
    sim.stream("load").wait(mark[0])
    sim.stream("load").carry(flight)
    while not flight.events:
        sim.step()
    sim.compute_stream().wait(flight.events[0])
    assert sim.marks() == mark
    event = sim.compute(0.001, lambda: log.append(("after", sim.now())))
    assert event.wait(1.0)
    assert log == [("before", 0.002), ("after", pytest.approx(0.004))]
    assert sim.marks() == ()


def test_the_compute_stream_belongs_to_the_thread() -> None:
    """Each thread has a compute stream of its own."""
    sim = SimDriver()
    sim.compute(1.0)
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(sim.marks()))
    thread.start()
    thread.join()
    assert others == [()]
    assert len(sim.marks()) == 1


def test_a_wait_makes_time_pass_up_to_its_timeout() -> None:
    """An event's timeout is virtual: it says no exactly then, and yes as soon as it passed."""
    sim = SimDriver()
    event = sim.compute(2.0)
    assert not event.wait(1.5)
    assert sim.now() == 1.5
    assert event.wait(1.0)
    assert sim.now() == 2.0
    assert event.wait()


def test_a_wait_with_nothing_to_happen_blocks_for_another_thread() -> None:
    """A thread that waits behind a closed gate goes on when another opens it."""
    hooks = Hooks()
    gate = hooks.gate()
    sim = SimDriver(hooks=hooks)
    flight = FakeFlight(1)
    sim.stream("load").carry(flight)
    drain(sim)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(flight.events[0].wait()))
    thread.start()
    gate.open()
    thread.join(10.0)
    assert done == [True]


def test_with_ahead_layers_are_enqueued_before_they_land() -> None:
    """`ahead` bounds what is enqueued and has not landed."""
    hooks = Hooks()
    hooks.gate(layer=0)
    sim = SimDriver(ahead=3, hooks=hooks)
    flight = FakeFlight(9)
    sim.stream("load").carry(flight)
    drain(sim)
    assert len(flight.events) == 3


def test_a_flight_that_failed_hears_nothing_of_what_was_enqueued() -> None:
    """Layers enqueued before the failure pass unheard, and the flight ends after them."""
    sim = SimDriver(ahead=3)
    flight = FakeFlight(9)
    flight.errors[1] = OSError("late")
    sim.stream("load").carry(flight)
    drain(sim)
    assert [words[1] for words in flight.log if words[1] != "issued"] == [
        "prepare", "landed", "failed", "ended",
    ]  # fmt: skip
    assert all(event.query() for event in flight.events)
