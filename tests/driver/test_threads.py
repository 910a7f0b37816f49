"""The threads driver: workers that survive, end, and never hold up an exit or a fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from offload.driver.loops import poster
from offload.errors import RequestError
from offload.testing import Gate, Hooks, ThreadsDriver
from tests.driver.fakes import FakeFlight, story

PATIENCE = 10.0
ROOT = Path(__file__).parents[2]


def workers() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("offload-"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_worker_per_stream_named_after_it() -> None:
    """Threads start on first use, carry the stream's name, and are gone after close."""
    driver = ThreadsDriver()
    assert workers() == []
    assert driver.stream("load") is driver.stream("load")
    driver.stream("backup")
    assert workers() == ["offload-backup", "offload-load"]
    driver.close()
    assert workers() == []
    with pytest.raises(RequestError, match="the driver is closed"):
        driver.stream("other")


def test_a_flight_hears_everything_on_the_worker_in_order() -> None:
    """Each layer is issued just before its copy, and all callbacks come from the stream's thread."""
    driver = ThreadsDriver()
    flight = FakeFlight(4)
    driver.stream("load").carry(flight)
    assert flight.over.wait(PATIENCE)
    assert flight.log == story("f", 4)
    assert len(flight.threads - {threading.get_ident()}) == 1
    driver.close()


def test_the_worker_lives_through_a_hundred_failures() -> None:
    """The same thread serves every flight, whatever those before it raised."""
    hooks = Hooks()
    hooks.fail(OSError("store"), layer=1)
    driver = ThreadsDriver(hooks=hooks)
    seen: set[int] = set()
    for number in range(100):
        flight = FakeFlight(1 + number % 3)
        driver.stream("backup").carry(flight)
        assert flight.over.wait(PATIENCE)
        seen |= flight.threads
    assert len(seen) == 1
    assert workers() == ["offload-backup"]
    driver.close()


def test_twenty_restarts_leak_nothing() -> None:
    """Threads and descriptors after twenty drivers are those after one."""
    counts = []
    for _ in range(20):
        driver = ThreadsDriver(link_bytes_per_second=1e9)
        flight = FakeFlight(2)
        driver.stream("load").carry(flight)
        assert flight.over.wait(PATIENCE)
        driver.close()
        counts.append((len(threading.enumerate()), descriptors()))
    assert len(set(counts)) == 1


def test_a_forgotten_driver_ends_its_threads() -> None:
    """A driver that nobody closed, and nobody knows, takes its workers along."""
    driver = ThreadsDriver()
    driver.stream("load")
    known = weakref.ref(driver)
    del driver
    gc.collect()
    assert known() is None
    assert workers() == []


def test_a_sleeping_worker_keeps_no_flight_alive() -> None:
    """Once a flight has ended, the driver has forgotten it."""
    driver = ThreadsDriver()
    flight = FakeFlight(2)
    known = weakref.ref(flight)
    over = flight.over
    driver.stream("load").carry(flight)
    assert over.wait(PATIENCE)
    # A second flight on its way proves that the turn of the first is over.
    second = FakeFlight(1)
    driver.stream("load").carry(second)
    assert second.over.wait(PATIENCE)
    del flight
    gc.collect()
    assert known() is None
    driver.close()


def test_the_link_is_as_slow_as_asked() -> None:
    """Layers land no earlier than a link of that rate would let them, sleeps included in the stamps."""
    rate = 10e6
    driver = ThreadsDriver(link_bytes_per_second=rate)
    flight = FakeFlight(4, traced=True, nbytes=20_000)
    begun = time.perf_counter_ns()
    driver.stream("load").carry(flight)
    assert flight.over.wait(PATIENCE)
    ends = [end - begun for _, end in flight.stamps]
    assert all(end >= (layer + 1) * 20_000 / rate * 1e9 - 1e6 for layer, end in enumerate(ends))
    driver.close()


def test_close_interrupts_a_link_that_would_take_an_hour() -> None:
    """A worker asleep on a slow link wakes for close, and its flight ends."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(link_bytes_per_second=0.01, hooks=hooks)
    flight = FakeFlight(3)
    driver.stream("load").carry(flight)
    assert gate.wait_arrived(timeout=PATIENCE)
    gate.open()
    driver.close()
    assert flight.log[-1] == ("f", "ended")
    assert workers() == []


def test_a_stopped_flight_ends_behind_a_fence_that_never_opens() -> None:
    """A fence holds copies, not endings."""
    driver = ThreadsDriver()
    stream = driver.stream("load")
    never = threading.Event()
    stream.wait(driver.events(never)[0])
    flight = FakeFlight(2)
    stream.carry(flight)
    flight.stopped = True
    stream.kick()
    assert flight.over.wait(PATIENCE)
    assert [words[1] for words in flight.log if words[1] != "prepare"] == ["ended"]
    never.set()
    driver.close()


def test_an_event_waits_while_another_thread_holds_the_interpreter() -> None:
    """A waiter wakes although a third thread computes in pure Python all the time."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    flight = FakeFlight(1)
    driver.stream("load").carry(flight)
    assert gate.wait_arrived(timeout=PATIENCE)
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(1000))

    busy = threading.Thread(target=spin)
    busy.start()
    threading.Timer(0.0, gate.open).start()
    assert flight.events[0].wait(PATIENCE)
    done.set()
    busy.join()
    driver.close()


def test_a_wait_that_timed_out_leaves_nothing_behind() -> None:
    """A timed-out wait says no; the event passes later all the same."""
    hooks = Hooks()
    gate = hooks.gate()
    driver = ThreadsDriver(hooks=hooks)
    flight = FakeFlight(1)
    driver.stream("load").carry(flight)
    assert gate.wait_arrived(timeout=PATIENCE)
    assert [flight.events[0].wait(0.001) for _ in range(3)] == [False] * 3
    gate.open()
    assert flight.events[0].wait(PATIENCE)
    driver.close()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_without_a_rate_is_refused(rate: float) -> None:
    """A rate that moves nothing raises and names the way out."""
    with pytest.raises(RequestError, match="must be above 0, or None"):
        ThreadsDriver(link_bytes_per_second=rate)


def test_workers_keep_to_their_cores_and_leave_ours_alone() -> None:
    """`cpus` binds the workers, not their maker; cores that are not ours are refused."""
    ours = os.sched_getaffinity(0)
    core = max(ours)
    driver = ThreadsDriver(cpus={core})
    flight, seen = FakeFlight(1), []
    flight.prepared = lambda: seen.append(os.sched_getaffinity(0))
    driver.stream("load").carry(flight)
    assert flight.over.wait(PATIENCE)
    driver.close()
    assert (seen, os.sched_getaffinity(0)) == ([{core}], ours)
    for wrong in ([], [10_000]):
        with pytest.raises(RequestError, match="none of them"):
            ThreadsDriver(cpus=wrong)


def run(body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has a gated copy in the air."""
    head = """
        import os, sys, threading
        from offload.testing import Hooks, ThreadsDriver
        from tests.driver.fakes import FakeFlight
        hooks = Hooks()
        gate = hooks.gate(layer=1)
        driver = ThreadsDriver(hooks=hooks)
        flight = FakeFlight(3)
        driver.stream("load").carry(flight)
        assert gate.wait_arrived(timeout=10)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("body", ["", "threading.Timer(0.05, gate.open).start()", "del driver"])
def test_exit_with_a_gated_copy_is_quiet(body: str) -> None:
    """The interpreter leaves with code 0 and says nothing, whether the gate opens or never does."""
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_hangs_nowhere() -> None:
    """In a child `carry` raises and `close` returns; the parent's copy goes on."""
    done = run(
        """
        from offload.errors import RequestError
        child = os.fork()
        if child == 0:
            try:
                driver.stream("load").carry(FakeFlight(1))
            except RequestError as error:
                driver.stream("load").kick()
                assert not flight.events[1].query()
                driver.close()
                os._exit(7 if "is a fork of" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.open()
        assert flight.over.wait(10)
        assert (flight.destination == flight.source).all()
        driver.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_gate_can_be_watched_from_the_thread_that_opens_it() -> None:
    """A gate calls back once, on opening or at once when open."""
    gate, called = Gate(), []
    gate.watch(lambda: called.append("waited"))
    assert (gate.wait(0.0), called) == (False, [])
    gate.open()
    gate.watch(lambda: called.append("open"))
    assert (gate.wait(), called, gate.is_open) == (True, ["waited", "open"], True)
    gate.close()
    assert not gate.is_open


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_posting_to_a_closed_loop_is_a_quiet_no(backend: str) -> None:
    """A poster works from any thread while the loop lives, and returns False afterwards."""
    import anyio

    async def body() -> object:
        post, heard = poster(), anyio.Event()
        thread = threading.Thread(target=post, args=(heard.set,))
        thread.start()
        await heard.wait()
        thread.join()
        return post

    post = anyio.run(body, backend=backend)
    assert callable(post)
    assert post(lambda: None) is False
