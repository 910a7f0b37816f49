"""What goes to the logger `offload`: one line at the start, few warnings, and a periodic line on request.

The library installs no handlers, levels or formats: those are the application's. Everything finer than this is
the trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import attrs

from offload.counters import Counters
from offload.errors import counted, sized

logger: Final = logging.getLogger("offload")

SLOW_NS: Final = 5_000_000_000
"""A request in flight for longer is worth a line: 5 s at a slow link's 1 GB/s is more than any one prompt."""

WARN_EVERY_NS: Final = 10_000_000_000
"""One warning of a kind in ten seconds: a dead link fails thousands of requests in that time."""


@attrs.define(eq=False)
class RateLimited:
    """Warnings of one kind, one in ten seconds; the next one says how many were left out."""

    now: Callable[[], int] = time.monotonic_ns
    _next_ns: int | None = attrs.field(default=None, init=False)
    _left_out: int = attrs.field(default=0, init=False)

    def warning(self, message: str, *values: object) -> None:
        """Log a warning, or count it."""
        now = self.now()
        if self._next_ns is not None and now < self._next_ns:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next_ns, self._left_out = now + WARN_EVERY_NS, 0
        logger.warning("%s%s", message % values, more)


@attrs.define(eq=False)
class Periodic:
    """The optional line: what was moved and how long the forward stalled since the line before.

    Call it from whatever the application does now and then:

        line = Periodic(scheduler.counters)
        while True:
            await anyio.sleep(10)
            line.log()
    """

    _counters: Counters
    _last: tuple[int, ...] = attrs.field(default=(0,) * 7, init=False)

    def log(self) -> None:
        """Log the line at INFO, unless nothing moved."""
        if logger.isEnabledFor(logging.INFO):
            text = self.text()
            if text:
                logger.info("%s", text)

    def text(self) -> str:
        """Return the line, `load 151.0 MB 38.3 GB/s, ... stalled 15.5 %`; empty when nothing moved."""
        counts = self._counters
        current = (
            counts.load.transfer_bytes,
            counts.load.busy_ns,
            counts.backup.transfer_bytes,
            counts.backup.busy_ns,
            counts.load.waits.total,
            counts.forward_ns,
            counts.load.waits_fenced,
        )
        loaded, load_ns, saved, backup_ns, stall_ns, forward_ns, fenced = (
            now - then for now, then in zip(current, self._last, strict=True)
        )
        self._last = current
        parts = []
        if loaded:
            parts.append(f"load {sized(loaded)} {sized(1e9 * loaded / max(1, load_ns))}/s")
        if saved:
            parts.append(f"backup {sized(saved)} {sized(1e9 * saved / max(1, backup_ns))}/s")
        if fenced:  # the host's clock tells neither what streams waited nor how long forwards took
            parts.append(f"{counted(fenced, 'wait')} left to compute streams")
        elif forward_ns:
            parts.append(f"stalled {100 * stall_ns / forward_ns:.1f} %")
        return ", ".join(parts)
