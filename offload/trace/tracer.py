"""The tracer: a recorder (`recorder.py`) with what a user calls: windows, reports, exports, pictures.

`export`, `report` and `svg` work on a snapshot and may run in any thread while recording goes on:
`await asyncio.to_thread(tracer.export, path)`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from offload.arguments import expect, positive
from offload.trace.clock import Anchor
from offload.trace.recorder import Recorder
from offload.trace.records import Scalar

if TYPE_CHECKING:
    from offload.trace.report import Report
    from offload.trace.timeline import Timeline


@attrs.define(eq=False)
class Tracer(Recorder):
    """A bounded recording of what a scheduler did. Pass it as `open_scheduler(..., tracer=tracer)`.

    It keeps the newest `capacity` records (a record is one layer copy, one request, one wait, one layer
    of a forward ...) and counts the ones that it lost in `dropped`. It records from its creation;
    `Tracer(active=False)` waits for `start()` or a `window()`. What it inherits is for the sites that record.

    Args:
        rank: Of this process among several: each is a group of lanes when traces are merged.
        labels: Called in the frame of each submit; what it returns is shown with the request and its copies.
        anchor: The time origin of an export.
    """

    _anchors: deque[Anchor] = attrs.field(factory=lambda: deque(maxlen=8), init=False, repr=False)
    _windows: int = attrs.field(default=0, init=False, repr=False)

    # ---- control ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Record from now on. Takes an anchor: an overlay is laid by the nearest one."""
        self._anchors.append(Anchor.take())
        self.period += 1
        self.active = True

    def stop(self) -> None:
        """Record nothing from now on; what is recorded stays."""
        self.active = False

    @contextmanager
    def window(self) -> Iterator[Tracer]:
        """Record inside the block, and not after it. Windows add up; the outermost of nested ones counts."""
        with self._lock:
            self._windows += 1
        self.start()
        try:
            yield self
        finally:
            with self._lock:
                self._windows -= 1
                if not self._windows:
                    self.stop()

    def mark(self, name: str, **args: Scalar) -> None:
        """Record something of the caller's own that happens now, such as `mark("evict", pages=12)`."""
        if self.active:
            self.instant(name, self.clock(), args)

    def clear(self) -> None:
        """Forget all records and all counts. The time origin stays."""
        self._forget()

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many records the ring has lost, oldest first."""
        return max(0, self._seen.read() - len(self._ring))

    def timeline(self) -> Timeline:
        """Return a snapshot of everything recorded, sorted by kind: what reports and exports are made from."""
        from offload.trace.timeline import Timeline

        seen, ready = self._seen.read(), self._ready.read()
        snapshot = list(self._ring)
        now = Anchor.take()
        open_requests = () if self._in_flight is None else self._in_flight()
        return Timeline.of(
            snapshot,
            unsettled=[one.until(now.perf_ns) for one in open_requests],
            anchors=(self.anchor, *self._anchors, now),
            rank=self.rank,
            device=self.device,
            dropped=max(0, seen - len(snapshot)),
            ready=ready,
            unmeasured=self._unmeasured.read(),
        )

    def report(self) -> Report:
        """Return how much of the forward was spent waiting, and why. Print it, or take `.to_json()`.

        On a GPU a forward is in it once the device has passed it: synchronize first, or close the scheduler.

        `hidden` is the share of copying time in which a layer was computed. The printed table says below
        itself what its columns are.
        """
        from offload.trace.report import Report

        return Report.of(self.timeline())

    def export(self, path: str | Path, overlay: str | Path | None = None) -> Path:
        """Write a Chrome trace that Perfetto opens. `.json` or `.json.gz` by suffix; atomic.

        Args:
            path: The file. It is replaced as a whole or not at all.
            overlay: A `torch.profiler` trace of the same time. The result holds both, on one clock.

        Returns:
            The path written.
        """
        from offload.trace.overlay import merge
        from offload.trace.write import export

        _check_path("Tracer.export", "path", path)
        if overlay is not None:
            _check_path("Tracer.export", "overlay", overlay)
        if overlay is not None:
            return merge(self.timeline(), Path(overlay), Path(path))
        return export(self.timeline(), Path(path))

    def svg(self, path: str | Path, steps: int | None = None) -> Path:
        """Draw the last `steps` forward passes, up to one that met a load (default: all), as a picture."""
        from offload.trace.picture import write

        _check_path("Tracer.svg", "path", path)
        if steps is not None:
            positive("Tracer.svg", steps=steps)
        return write(self.timeline(), Path(path), steps=steps)


def _check_path(call: str, name: str, path: object) -> None:
    expect(call, name, path, (str, os.PathLike), "a path")
