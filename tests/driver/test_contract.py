"""What every driver promises, run on each. A new driver adds its factory to `DRIVERS`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest

from offload.driver.base import Driver
from offload.errors import RequestError
from offload.testing import Hooks, SimDriver, ThreadsDriver
from tests.driver.fakes import FakeFlight, story

DRIVERS: dict[str, Callable[[Hooks], Driver]] = {
    "threads": lambda hooks: ThreadsDriver(hooks=hooks),
    "sim": lambda hooks: SimDriver(hooks=hooks),
    "sim-ahead": lambda hooks: SimDriver(hooks=hooks, ahead=4, jitter=0.5),
}
PATIENCE = 10.0
BACKENDS = ["asyncio", "trio"]


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, hooks: Hooks) -> Iterator[Driver]:
    made = DRIVERS[request.param](hooks)
    yield made
    made.close()


def finish(driver: Driver, *flights: FakeFlight) -> None:
    """Let time pass until these flights have ended."""
    if isinstance(driver, SimDriver):
        while driver.step():
            pass
    for flight in flights:
        assert flight.over.wait(PATIENCE if driver.name == "threads" else 0), flight.log


def heard(flight: FakeFlight) -> list[object]:
    """Return the layers landed, and the endings."""
    return [
        words[2] if words[1] == "landed" else words[1]
        for words in flight.log
        if words[0] == flight.name and words[1] in ("landed", "failed", "ended")
    ]


def test_a_flight_lands_layer_by_layer_and_ends_last(driver: Driver) -> None:
    """Bytes arrive; the callbacks come in the order of the protocol, each once."""
    flight = FakeFlight(5)
    driver.stream("load").carry(flight)
    finish(driver, flight)
    assert flight.log[0] == ("f", "prepare")
    assert sorted(map(str, flight.log)) == sorted(map(str, story("f", 5)))
    assert heard(flight) == [0, 1, 2, 3, 4, "ended"]
    for layer in range(5):
        assert flight.log.index(("f", "issued", layer)) < flight.log.index(("f", "landed", layer))
    np.testing.assert_array_equal(flight.destination, flight.source)


def test_callbacks_never_run_in_the_frame_of_carry(driver: Driver) -> None:
    """`carry` returns before the flight hears anything: planning is not the caller's."""
    here: list[bool] = []
    carrying = threading.local()
    flight = FakeFlight(1)
    flight.prepared = lambda: here.append(getattr(carrying, "now", False))
    carrying.now = True
    driver.stream("load").carry(flight)
    carrying.now = False
    finish(driver, flight)
    assert here == [False]


def test_an_event_passes_with_its_layer_and_wakes_each_watcher_once(
    driver: Driver, hooks: Hooks
) -> None:
    """Before the copy an event says no; afterwards yes, to waits, watchers and late watchers."""
    gate = hooks.gate(layer=1)
    flight = FakeFlight(3)
    driver.stream("load").carry(flight)
    if isinstance(driver, SimDriver):
        finish(driver)
    else:
        assert gate.wait_arrived(timeout=PATIENCE)
    first, second = flight.events[:2]
    called: list[str] = []
    second.watch(lambda: called.append("early"))
    assert first.wait(PATIENCE)
    assert first.query()
    assert not second.query()
    assert not second.wait(0.0)
    assert called == []
    gate.open()
    assert second.wait(PATIENCE)
    finish(driver, flight)
    second.watch(lambda: called.append("late"))
    assert called == ["early", "late"]


@pytest.mark.parametrize("where", ["prepare", "copy"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_is_the_flights_own(driver: Driver, where: str, error: BaseException) -> None:
    """Whatever is raised fails that flight alone, which ends; flights before and after it land."""
    before, broken, after = FakeFlight(2), FakeFlight(4), FakeFlight(2)
    if where == "prepare":

        def refuse() -> None:
            raise error

        broken.prepared = refuse
    else:
        broken.errors[2] = error
    for flight in (before, broken, after):
        driver.stream("backup").carry(flight)
    finish(driver, before, broken, after)
    layer = 0 if where == "prepare" else 2
    assert ("f", "failed", layer, error) in broken.log
    assert heard(broken) == [*range(layer), "failed", "ended"]
    assert heard(before) == heard(after) == [0, 1, "ended"]
    assert all(event.query() for event in broken.events)


def test_a_raising_next_layer_fails_its_flight(driver: Driver) -> None:
    """A flight whose `next_layer` raises fails and ends; the stream goes on."""
    error = ValueError("no plan")

    class Broken(FakeFlight):
        def next_layer(self) -> None:
            raise error

    broken, after = Broken(2), FakeFlight(1)
    driver.stream("load").carry(broken)
    driver.stream("load").carry(after)
    finish(driver, broken, after)
    assert broken.log[1:] == [("f", "failed", 0, error), ("f", "ended")]


def test_an_urgent_flight_overtakes_and_nothing_enqueued_is_recalled(
    driver: Driver, hooks: Hooks
) -> None:
    """Held in layer 1 of a big flight, a small urgent one goes before what is not enqueued yet."""
    log: list[tuple[object, ...]] = []
    gate = hooks.gate(nth=2)
    big = FakeFlight(8, name="big", urgency=(5.0,), log=log)
    small = FakeFlight(2, name="small", urgency=(1.0,), log=log)
    driver.stream("load").carry(big)
    if isinstance(driver, SimDriver):
        finish(driver)
    else:
        assert gate.wait_arrived(timeout=PATIENCE)
    enqueued = len(big.events)
    driver.stream("load").carry(small)
    gate.open()
    finish(driver, big, small)
    landed = [words[0] for words in log if words[1] == "landed"]
    assert landed == ["big"] * enqueued + ["small"] * 2 + ["big"] * (8 - enqueued)


def test_a_stopped_flight_enqueues_nothing_more_and_ends(driver: Driver, hooks: Hooks) -> None:
    """After `stopped`, what was enqueued passes, the rest never begins, and the flight ends."""
    gate = hooks.gate(layer=1)
    flight = FakeFlight(9)
    driver.stream("load").carry(flight)
    if isinstance(driver, SimDriver):
        finish(driver)
    else:
        assert gate.wait_arrived(timeout=PATIENCE)
    enqueued = len(flight.events)
    flight.stopped = True
    driver.stream("load").kick()
    gate.open()
    finish(driver, flight)
    assert len(flight.events) == enqueued < 9
    assert heard(flight) == [*range(enqueued), "ended"]


def test_a_flight_stopped_before_it_was_prepared_just_ends(driver: Driver) -> None:
    """A flight that is stopped already hears only its end."""
    flight = FakeFlight(2)
    flight.stopped = True
    driver.stream("load").carry(flight)
    finish(driver, flight)
    assert flight.log == [("f", "ended")]


def test_an_empty_flight_ends(driver: Driver) -> None:
    """A flight without layers is prepared and ends."""
    flight = FakeFlight(0)
    driver.stream("load").carry(flight)
    finish(driver, flight)
    assert flight.log == [("f", "prepare"), ("f", "ended")]


def test_a_kick_lets_a_waiting_flight_go_on(driver: Driver) -> None:
    """A flight without a next layer holds up nobody; a kick after it got one is enough."""
    streamed, other = FakeFlight(2), FakeFlight(2)
    streamed.allowed = 1
    driver.stream("backup").carry(streamed)
    driver.stream("backup").carry(other)
    finish(driver, other)
    assert heard(streamed) == [0]
    streamed.allowed = 2
    driver.stream("backup").kick()
    finish(driver, streamed)
    assert heard(streamed) == [0, 1, "ended"]


def test_a_fence_orders_two_streams_and_holds_up_only_its_own(driver: Driver, hooks: Hooks) -> None:
    """What is enqueued after `wait(event)` begins when the event has passed; other streams go on."""
    gate = hooks.gate(stream="backup")
    log: list[tuple[object, ...]] = []
    first = FakeFlight(1, name="first", log=log)
    fenced = FakeFlight(2, name="fenced", log=log)
    driver.stream("backup").carry(first)
    if isinstance(driver, SimDriver):
        finish(driver)
    else:
        assert gate.wait_arrived(timeout=PATIENCE)
    driver.stream("load").wait(first.events[0])
    driver.stream("load").carry(fenced)
    free = FakeFlight(1, name="free", log=log)
    driver.stream("other").carry(free)
    finish(driver, free)
    assert ("fenced", "landed", 0) not in log
    gate.open()
    finish(driver, first, fenced)
    assert log.index(("first", "landed", 0)) < log.index(("fenced", "landed", 0))


def test_a_foreign_event_is_a_fence(driver: Driver) -> None:
    """A `threading.Event` passed as `after=` holds a stream until it is set."""
    ready = threading.Event()
    (event,) = driver.events(ready)
    driver.stream("load").wait(event)
    flight = FakeFlight(1)
    driver.stream("load").carry(flight)
    finish(driver)
    assert heard(flight) == []
    assert not event.query()
    passed = threading.Event()
    event.watch(passed.set)
    ready.set()
    assert event.wait(PATIENCE)
    assert passed.wait(PATIENCE)
    if isinstance(driver, SimDriver):
        # The engine hears it on the helper thread, which then puts the note on the clock.
        driver.clock.wait_until(lambda: False)
    finish(driver, flight)


def test_after_takes_events_streams_and_sequences(driver: Driver) -> None:
    """`events` flattens sequences, records streams, and refuses the rest with the ways out."""
    flight = FakeFlight(1)
    stream = driver.stream("load")
    stream.carry(flight)
    finish(driver, flight)
    event = flight.events[0]
    assert driver.events(()) == ()
    assert driver.events(event) == (event,)
    assert driver.events([stream, (event, [threading.Event()])])[:2] == (event, event)
    for wrong in (3, "compute", b"x", None, object()):
        with pytest.raises(RequestError, match="neither an event nor a stream"):
            driver.events(wrong)


def test_records_of_one_point_are_equal(driver: Driver) -> None:
    """Two records with nothing enqueued between them are one mark, and pass together."""
    stream = driver.stream("load")
    assert stream.record() == stream.record()
    assert hash(stream.record()) == hash(stream.record())
    assert stream.record().query()
    assert stream.record() != driver.stream("backup").record()
    assert driver.compute_stream().record().query()
    assert driver.marks() == ()
    assert not driver.capturing()


@pytest.mark.parametrize("traced", [False, True])
def test_flights_get_stamps(driver: Driver, traced: bool) -> None:
    """A flight gets growing stamps, whether or not somebody records: busy time is counted always."""
    flight = FakeFlight(3, traced=traced)
    driver.stream("load").carry(flight)
    finish(driver, flight)
    flat = [stamp for pair in flight.stamps for stamp in pair]
    assert flat == sorted(flat)
    assert flat[-1] > 0


def test_the_compute_stream_carries_nothing(driver: Driver) -> None:
    """A flight on the compute stream is refused in the caller's frame."""
    with pytest.raises(RequestError, match="carries no flights"):
        driver.compute_stream().carry(FakeFlight(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_alarms_ring_in_virtual_time_alone(driver: Driver, backend: str) -> None:
    """Where time is virtual an alarm rings when it has passed, unless cancelled; elsewhere there is none."""

    async def body() -> None:
        rung: list[str] = []
        if driver.alarm is not None:
            driver.alarm(0.5, lambda: rung.append("half"))
            driver.alarm(0.75, lambda: rung.append("cancelled"))()
            driver.alarm(2.0, lambda: rung.append("two"))
        await driver.quiesce()
        assert rung == []
        if isinstance(driver, SimDriver):
            await driver.advance(1.0)
        assert rung == (["half"] if driver.alarm is not None else [])

    anyio.run(body, backend=backend)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_keep_the_protocol(driver: Driver, hooks: Hooks, seed: int) -> None:
    """Whatever is carried, stopped, failed and kicked: each flight hears a legal story, ended once."""
    rng = random.Random(seed)
    for _ in range(3):
        hooks.fail(OSError("planted"), nth=rng.randint(1, 40), torn=rng.random() < 0.5)
    flights: list[FakeFlight] = []
    for number in range(25):
        flight = FakeFlight(
            rng.randint(0, 5), name=str(number), urgency=(float(rng.randint(0, 2)),)
        )
        flight.allowed = rng.choice([0, 1, flight.layers])
        flights.append(flight)
        driver.stream(rng.choice(["load", "backup"])).carry(flight)
        rng.choice(flights).stopped |= rng.random() < 0.2
        if isinstance(driver, SimDriver) and rng.random() < 0.5:
            driver.step()
    for flight in flights:
        flight.allowed = flight.layers
    for name in ("load", "backup"):
        driver.stream(name).kick()
    finish(driver, *flights)
    for flight in flights:
        what = [words[1] for words in flight.log]
        layers = [words[2] for words in flight.log if words[1] == "landed"]
        assert layers == list(range(len(layers)))
        assert what.count("ended") == 1
        assert what[-1] == "ended"
        assert what.count("failed") <= 1
        assert flight.stopped or "failed" in what or len(layers) == flight.layers
        whole = slice(0, len(layers))
        np.testing.assert_array_equal(flight.destination[whole], flight.source[whole])


def test_close_may_be_called_again(driver: Driver) -> None:
    """Closing is idempotent, also before any stream was made."""
    driver.close()
    driver.close()
