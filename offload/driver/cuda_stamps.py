"""When the layers of a CUDA stream ran, on the host's clock.

Theory of operation
-------------------
Where somebody records, a layer gets two timing events of its own, in front of its copies and behind them.
So what the stream waited for before it, compute or another request, is no part of the copy, and neither is
the time until the host saw its end. Where nobody records, events carry no times, because waits cost least
on those: a layer then runs from its enqueueing, or the end before it, until the waiting thread sees it
end. That is late by one wake-up, and what plain counts of busy time need.
"""

from __future__ import annotations

import contextlib

from offload.core.device_clock import DeviceClock
from offload.driver.cuda_calls import RawStream
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_waiter import Waiter

_LOOKS = 50  # about a tenth of a millisecond: several times what an idle stream needs


class Stamps:
    """The clock of one stream."""

    def __init__(self, hub: Hub, raw: RawStream, waiter: Waiter) -> None:
        self._hub = hub
        self._raw = raw
        self._waiter = waiter
        self._clock: DeviceClock[CudaEvent] = DeviceClock(self._beat, self._elapsed_ms, hub.now_ns)

    def begin(self) -> CudaEvent | None:
        """Mark where the next layer starts. On the issuing thread, right before its copies.

        None when that fails: a stamp is not worth a copy, and what is sticky comes back.
        """
        try:
            return self._hub.record(self._raw, self._waiter, timing=True)
        except Exception:  # noqa: BLE001 - told above
            return None

    def of(self, begun: CudaEvent | None, event: CudaEvent, issue_ns: int) -> tuple[int, int]:
        """Return start and end of a layer that has passed. On the waiting thread."""
        if begun is not None and event.timing:
            with contextlib.suppress(Exception):  # as above
                return self._clock.interval(begun, event, issue_ns)
        return self._clock.seen(issue_ns)

    def measured(self, first: CudaEvent, last: CudaEvent, before_ns: int) -> tuple[int, int] | None:
        """Return when a stream passed two points of it; None where that cannot be told. On the waiting thread."""
        with contextlib.suppress(Exception):  # as above
            return self._clock.measured(first, last, before_ns)
        return None

    def _elapsed_ms(self, first: CudaEvent, last: CudaEvent) -> float:
        return self._hub.calls.elapsed_ms(first.raw, last.raw)

    def _beat(self) -> CudaEvent | None:
        """Record a timing event on a stream that is idle; return it when it has passed, soon or not at all.

        Looking is quicker than sleeping in `synchronize`, whose wake-up would be taken for device time. An
        idle stream may share a hardware queue with a busy one, and layers are landing meanwhile: so not for
        long.
        """
        event = self._hub.record(self._hub.idle_stream(), self._waiter, timing=True)
        return event if any(event.query() for _ in range(_LOOKS)) else None
