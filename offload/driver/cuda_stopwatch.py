"""What compute streams do, by timing events on them: how long they stand, and when layers run.

Only a recording asks. A fence takes a timing event on each side of the wait that it gives to the stream: between
the two lies whatever kept the stream from going on, the load it waits for, and a host that was late to launch.
With nothing to wait for they are as far apart as two events are, some microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from offload.core.stopwatch import Interval, Mark
from offload.driver.cuda_calls import RawStream
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_stamps import Stamps
from offload.driver.cuda_waiter import Waiter

CLOCKS = 8
"""Compute streams whose clock is kept; of one that comes back later, times may overlap by microseconds."""


CLOCKS = 16
"""Compute streams whose clocks are kept: streams come and go, and a new clock costs an anchor."""


@attrs.frozen(eq=False)
class _Point:
    """A timing event on a compute stream."""

    event: CudaEvent
    stamps: Stamps
    before_ns: int
    """The host's time, before it was recorded."""


class CudaStopwatch:
    """The stopwatch of one driver: `core/stopwatch.py`.

    Args:
        waiter_of: Who waits for the events of a stream.
    """

    def __init__(self, hub: Hub, waiter_of: Callable[[RawStream], Waiter]) -> None:
        self._hub = hub
        self._waiter_of = waiter_of
        self._lock = threading.Lock()
        self._stamps: dict[Waiter, Stamps] = {}

    def mark(self) -> _Point | None:
        """Record a timing event; None in a capture, and where that fails: what is sticky comes back."""
        hub = self._hub
        before_ns = hub.now_ns()
        try:
            if hub.lost is not None or hub.calls.capturing(hub.device):
                return None
            raw = hub.calls.current_stream(hub.device)
            waiter = self._waiter_of(raw)
            event = hub.record(raw, waiter, timing=True)
        except Exception:  # noqa: BLE001 - told above
            return None
        return _Point(event, self._stamps_of(raw, waiter), before_ns)

    def between(self, first: Mark, last: Mark, told: Callable[[Interval], None]) -> None:
        """Call `told` when the second point has passed, on the thread that waits for its stream."""
        assert isinstance(first, _Point)
        assert isinstance(last, _Point)

        def passed() -> None:
            told(last.stamps.measured(first.event, last.event, first.before_ns))

        last.event.watch(passed)

    def _stamps_of(self, raw: RawStream, waiter: Waiter) -> Stamps:
        with self._lock:
            found = self._stamps.get(waiter)
            if found is None:
                if len(self._stamps) == CLOCKS:
                    del self._stamps[next(iter(self._stamps))]
                found = self._stamps[waiter] = Stamps(self._hub, raw, waiter)
            if len(self._stamps) > CLOCKS:
                self._stamps.pop(next(iter(self._stamps)))
            return found
