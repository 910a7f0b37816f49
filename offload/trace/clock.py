"""One instant on two clocks: what lays a trace beside others'."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs


@attrs.frozen
class Anchor:
    """One instant on the monotonic clock and on the wall clock."""

    perf_ns: int
    unix_ns: int

    @classmethod
    def take(
        cls,
        perf: Callable[[], int] = time.perf_counter_ns,
        wall: Callable[[], int] = time.time_ns,
        samples: int = 16,
    ) -> Anchor:
        """Return the tightest of `samples` readings: wall between two readings of perf."""
        readings = [(perf(), wall(), perf()) for _ in range(samples)]
        before, unix, after = min(readings, key=lambda one: one[2] - one[0])
        return cls((before + after) // 2, unix)
