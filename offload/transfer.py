"""What a caller holds of a request: awaited from the loop, waited for by threads, fenced by streams."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from offload import actions, waits
from offload.core.batch import State
from offload.core.kinds import Direction
from offload.entry import RELEASED, SETTLED, Entry


class Transfer:
    """A load or a backup under way. Waiting consumes nothing: wait late, often, from many places.

    Made by a scheduler's `load` and `backup`. `await` it, or one layer of it, in a task; `wait_layer`,
    `fence` and `result` are for threads.
    """

    __slots__ = ("__weakref__", "_entry")

    def __init__(self, entry: Entry, /) -> None:
        self._entry = entry

    # What it is ----------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """Load or backup."""
        return self._entry.request.direction

    @property
    def id(self) -> int:
        """Its number, as in traces. Transfers that share one copy share it."""
        return self._entry.request.id

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._entry.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes that it moves, over all layers and pools."""
        return self._entry.request.nbytes

    @property
    def tags(self) -> Mapping[str, str | int | float | bool | None]:
        """Its labels in traces, as the tracer's `labels` gave them at submit; empty without a tracer."""
        return self._entry.tags or {}

    @property
    def state(self) -> State:
        """Queued, issued or draining; or done, failed or cancelled."""
        return self._entry.state

    @property
    def done(self) -> bool:
        """Whether it has settled: landed, failed or cancelled. True as soon as any thread saw it."""
        return self._entry.verdict() is not None

    @property
    def landed_layers(self) -> int:
        """How many layers have landed."""
        return sum(map(self._entry.landed, range(self.num_layers)))

    def __repr__(self) -> str:
        return repr(self._entry)

    # Waiting in a task -----------------------------------------------------------------------------

    def __await__(self) -> Generator[object, object, None]:
        """Wait until it has settled. Cancelling the wait does not cancel the transfer.

        Raises:
            TransferCancelled: Somebody cancelled it.
            TransferFailed: It broke; the cause is `__cause__`.
        """
        return self._settled().__await__()

    async def _settled(self) -> None:
        await waits.until(self._entry, SETTLED, self._entry.quiet)
        self._entry.raise_if_over()

    async def issued(self, layer: int | str | None = None) -> None:
        """Wait until a layer (default: the first) is on its stream, so that a fence can order it.

        Raises:
            TransferFailed: It failed or was cancelled before.
        """
        entry, index = self._entry, 0 if layer is None else self._index(layer)
        await waits.until(entry, index, lambda: entry.issued(index) or entry.over())
        if not entry.issued(index):
            entry.raise_if_over()

    async def layer(self, layer: int | str) -> None:
        """Wait until a layer has landed. Cancelling the wait does not cancel the transfer.

        Raises:
            TransferFailed: It failed or was cancelled before that layer landed.
        """
        entry, index = self._entry, self._index(layer)
        start = entry.shell.driver.now_ns()
        suspended = await waits.until(entry, index, lambda: entry.landed(index) or entry.over())
        if not entry.landed(index):
            entry.raise_if_over()
        entry.shell.ledger.waited(entry, index, start if suspended else 0)

    async def source_reusable(self) -> None:
        """Wait until no copy of it can read its source pages any more, however it ended.

        Raises:
            TransferFailed: The device is lost: that can never be known.
        """
        entry = self._entry
        await waits.until(entry, RELEASED, lambda: entry.released or entry.shell.stuck is not None)
        if not entry.released:
            raise entry.failure(entry.shell.stuck)

    # Waiting in a thread ---------------------------------------------------------------------------

    def wait_layer(self, layer: int | str, timeout: float | None = None) -> None:
        """Block this thread until a layer has landed. Works while the loop is busy, or stopped.

        Raises:
            TransferFailed: It failed or was cancelled before that layer landed.
            TimeoutError: Not within `timeout` seconds; the transfer goes on.
            RequestError: This is the loop's own thread, or inside the `hold` that keeps it back, and the
                layer has not landed.
        """
        index = self._index(layer)
        self._note(index, waits.for_layer(self._entry, index, timeout))

    def wait_issued(self, layer: int | str | None = None, timeout: float | None = None) -> None:
        """Block this thread until a layer (default: the first) is on its stream. Raises as `wait_layer`."""
        entry, index = self._entry, 0 if layer is None else self._index(layer)
        if layer is not None:
            entry.follow_layers()
        waits.for_issue(entry, index, timeout)

    def wait_source_reusable(self, timeout: float | None = None) -> None:
        """Block this thread until no copy of it can read its source pages any more."""
        entry = self._entry
        waits.block(entry, lambda: entry.released, "its pages", timeout, whatever=True)

    def result(self, timeout: float | None = None) -> None:
        """Block this thread until it has settled. Raises as `wait_layer`, and what `await` raises.

        With `start_scheduler` its pages are free of traffic then, as after an `await`. On a loop of
        yours, which may be busy, they are when the loop next runs: see `wait_source_reusable`.
        """
        entry, shell = self._entry, self._entry.shell

        def reached() -> bool:
            return entry.quiet() or (self.done and (not shell.private or shell.over))

        waits.block(entry, reached, "it to settle", timeout, whatever=True)
        entry.raise_if_over()

    def fence(self, layer: int | str, timeout: float | None = None) -> None:
        """Order this thread's compute stream after a layer; where compute is the thread, wait for it.

        On a stream the host waits, for `timeout` seconds at most, until the layer is issued, and goes on while
        it is copied. A load that follows compute (the default) is not issued before that compute has passed,
        and a stream issues little ahead: two layers, or more of them up to 64 MiB. So a host that fences layer
        by layer is not far ahead of its loads. Await `issued` where it must not be held.

        Raises:
            RequestError: The stream is capturing a graph (fence just before the replay), or this is the
                loop's own thread and the layer is not issued yet (await `issued` first).
            TransferFailed: It is known to have failed or to have been cancelled.
            TimeoutError: Not within `timeout` seconds.
        """
        index = self._index(layer)
        waits.noted_fence(self._entry, index, timeout)

    # Acting ------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Settle it as cancelled, at once. Any thread, any time; nothing happens when it has settled.

        Copies already issued drain unseen, and its pages stay locked so long. From another thread than the
        loop's it is settled when the call returns, and what is queued is withdrawn when the loop next runs.
        """
        actions.cancel(self._entry)

    def layer_written(self, layer: int | str) -> None:
        """Say that the forward has written a layer, so that its backup may start. Any thread, once a layer.

        What this thread's compute stream has queued so far counts as the writing.

        Raises:
            RequestError: It is no streaming backup, the layer was written before, or the stream is
                capturing a graph.
        """
        actions.layer_written(self._entry, self._index(layer))

    def _note(self, layer: int, start_ns: int) -> None:
        self._entry.shell.ledger.waited(self._entry, layer, start_ns)

    def _index(self, layer: int | str) -> int:
        return self._entry.shell.group.layer(layer)
