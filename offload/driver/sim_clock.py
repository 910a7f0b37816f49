"""Virtual time: what happens when, and how a loop is let run in between."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable

from offload.driver.loops import running_on_asyncio


class Clock:
    """Callbacks in order of virtual time; equal times in the order in which they were asked for.

    Alarms are kept apart from happenings: an alarm rings when time passes it, but it does not make
    time pass. So a deadline a minute ahead does not turn "until nothing happens" into a minute.
    Any thread may add; whoever steps runs the callbacks.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulator was made."""
        self._changed = threading.Condition()
        self._stepping = threading.RLock()
        self._happenings: list[tuple[float, int, Callable[[], object]]] = []
        self._alarms: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0

    def after(self, seconds: float, callback: Callable[[], object]) -> None:
        """Let `callback` happen so many seconds from now."""
        with self._changed:
            self._made += 1
            heapq.heappush(self._happenings, (self.now + seconds, self._made, callback))
            self._changed.notify_all()

    def alarm(self, when: float, callback: Callable[[], object]) -> None:
        """Call `callback` when time passes `when`."""
        with self._changed:
            self._made += 1
            heapq.heappush(self._alarms, (when, self._made, callback))

    def step(self, until: float | None = None) -> bool:
        """Let the next thing happen, and time with it; return whether there was one by `until`.

        Without `until` only a happening makes time pass; an alarm before it rings first.
        """
        with self._stepping:
            with self._changed:
                due = self._next(until)
                if due is None:
                    return False
                self.now = max(self.now, due[0])
            due[2]()
            with self._changed:
                self._changed.notify_all()
            return True

    def _next(self, until: float | None) -> tuple[float, int, Callable[[], object]] | None:
        heaps = [heap for heap in (self._happenings, self._alarms) if heap]
        first = min(heaps, key=lambda heap: heap[0][:2], default=None)
        # 1 nothing at all, 2 time may pass so far and it is too early, 3 an alarm alone moves no time.
        if first is None or (until is not None and first[0][0] > until):
            return None
        if until is None and not self._happenings and first[0][0] > self.now:
            return None
        return heapq.heappop(first)

    def wait_until(self, passed: Callable[[], bool]) -> None:
        """Block this thread until `passed()` or until something is there to be stepped."""
        with self._changed:
            self._changed.wait_for(lambda: passed() or bool(self._happenings))

    def pass_to(self, when: float) -> None:
        """Let time pass up to `when`, with nothing left to happen by then."""
        with self._stepping:
            self.now = max(self.now, when)


async def settle() -> None:
    """Let every other task of this loop run until all of them wait for something.

    anyio's own `wait_all_tasks_blocked` sleeps 0.1 s of real time per round on asyncio; this yields.
    """
    if not running_on_asyncio():
        import trio.testing

        await trio.testing.wait_all_tasks_blocked()
        return
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    quiet = 0
    # Two quiet rounds: a callback posted from outside may wake a task in the first.
    while quiet < 2:
        turn = _Turn(loop=loop)
        loop.call_soon(turn.end)
        await turn
        quiet = (
            0 if any(_runs(task) for task in asyncio.all_tasks() if task is not me) else quiet + 1
        )


class _Turn(asyncio.Future[None]):
    """What a task waits for that lets the others run: two such tasks must not wait for each other."""

    def end(self) -> None:
        """Let the task go on, unless it was cancelled meanwhile."""
        if not self.done():
            self.set_result(None)


def _runs(task: asyncio.Task[object]) -> bool:
    """Return whether a task waits for nothing that is still to come."""
    waiter: asyncio.Future[object] | None = getattr(task, "_fut_waiter", None)
    return waiter is None or (waiter.done() and not isinstance(waiter, _Turn))
