"""Who watches a stream: nobody is missed, whatever comes first."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from offload.driver import tickets
from offload.driver.tickets import Ticket, Watchers

PATIENCE = 20.0


class Counting:
    """A stream that only counts."""

    name = "counting"

    def __init__(self) -> None:
        self.landed = 0
        self.watchers = Watchers(self)

    def watch(self, position: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Store a watcher."""
        return self.watchers.add(position, callback)


def test_where_threads_are_free_a_stream_looks_after_those_who_are_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One who is in the middle of being stored, and has looked at the count already, is called all the same."""
    monkeypatch.setattr(tickets, "_FREE_THREADED", True)
    stream, called = Counting(), threading.Event()
    lands = threading.Thread(target=stream.watchers.notify)
    with stream.watchers._lock:
        stream.landed = 1
        lands.start()
        lands.join(0.05)
        stream.watchers._heap.append(tickets._Watcher((1, 1), called.set))
    lands.join(PATIENCE)
    assert called.is_set()


def test_the_look_without_a_lock_is_for_a_global_lock() -> None:
    """This interpreter is asked, and not its version."""
    enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert tickets._FREE_THREADED is not enabled


@pytest.mark.parametrize("free", [False, True])
def test_each_is_called_once_in_the_order_of_positions(
    free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its position has passed and not before, unless it was taken back."""
    monkeypatch.setattr(tickets, "_FREE_THREADED", free)
    stream, called = Counting(), list[int]()
    stream.watchers.notify()
    for position in (3, 1, 2, 2):
        forget = stream.watchers.add(position, lambda n=position: called.append(n))  # type: ignore[misc]
    forget()
    for stream.landed, expected in ((1, [1]), (2, [1, 2]), (5, [1, 2, 3])):
        stream.watchers.notify()
        assert called == expected
    assert Ticket(stream, 5).wait(0.0)
    assert not Ticket(stream, 6).wait(0.0)


@pytest.mark.parametrize("free", [False, True])
def test_no_thread_that_waits_is_missed(free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream lands while threads come to wait for its next position, again and again."""
    monkeypatch.setattr(tickets, "_FREE_THREADED", free)
    stream, steps = Counting(), 300
    late: list[int] = []

    def wait() -> None:
        late.extend(n for n in range(1, steps) if not Ticket(stream, n).wait(PATIENCE))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for stream.landed in range(1, steps):
        stream.watchers.notify()
    for thread in threads:
        thread.join(PATIENCE)
    assert late == []
