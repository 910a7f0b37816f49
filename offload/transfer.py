"""What a caller holds of a request: awaited from the loop, waited for by threads, fenced by streams.

A transfer reads the counts that its flight publishes, so it never asks the loop whether something has
landed. What the loop adds is the outcome: once settled as failed or cancelled, a transfer stays as it
was at that moment, although copies may still drain unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import anyio
import attrs
from anyio.lowlevel import checkpoint

from offload.core.batch import Piece, State
from offload.core.kinds import Direction
from offload.core.request import Request
from offload.driver.base import Event
from offload.errors import RequestError, TransferCancelled, TransferFailed
from offload.flight import Flight

if TYPE_CHECKING:
    from offload.shell import Shell
    from offload.timer import Alarm
    from offload.trace import Tracer
    from offload.trace.forward import ForwardTrace

_SETTLED = -1
_RELEASED = -2


@attrs.define(eq=False, repr=False)
class Transfer:
    """A load or a backup under way. Waiting consumes nothing: wait late, often, from many places."""

    _shell: Shell
    request: Request
    submitted_ns: int
    tags: Mapping[str, str | int | float | bool | None] | None = None
    after: object = "compute"
    """As it was submitted."""

    marks: tuple[Event, ...] = ()
    """What compute had queued at submit, and had not done."""

    issued_ns: int = 0
    alarm: Alarm | None = None
    """Set for its deadline, until it settles."""

    _flight: Flight | None = None
    """The flight that carries it; of a streaming backup, the latest."""

    _layers: dict[int, Flight] | None = None
    """Of a streaming backup, the flight of each layer."""

    _outcome: State | None = None
    _error: BaseException | None = None
    _error_layer: int | None = None
    _kept: frozenset[int] | int = 0
    """Layers that had landed when it failed or was cancelled."""

    _written: dict[int, object] | None = None
    """Of a streaming backup, the layers that were written."""

    _by_layer: bool = False
    """Whether somebody has waited for a single layer of it."""

    _released: bool = False
    _waiters: list[tuple[int, anyio.Event]] = attrs.field(factory=list)
    _joined: list[Transfer] | None = None
    """Transfers that ride on this one's copies."""

    _lead: Transfer | None = None
    """The transfer whose copies this one rides on."""

    # What it is ----------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """Load or backup."""
        return self.request.direction

    @property
    def id(self) -> int:
        """Its number, as in traces. Transfers that ride on one copy share it."""
        return self.request.id

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._shell.group.num_layers

    @property
    def tracer(self) -> Tracer | None:
        """Where its scheduler records."""
        return self._shell.tracer

    def now_ns(self) -> int:
        """Return the time on the clock of its stamps."""
        return self._shell.driver.now_ns()

    @property
    def nbytes(self) -> int:
        """Bytes that it moves, over all layers and pools."""
        return self.request.nbytes

    @property
    def state(self) -> State:
        """Queued, issued or draining; or done, failed or cancelled."""
        if self._outcome in (State.FAILED, State.CANCELLED):
            return self._outcome if self._released else State.DRAINING
        if self._outcome is State.DONE or self._all_landed():
            return State.DONE
        if self._failure() is not None:
            return State.DRAINING
        return State.QUEUED if self._flight is None else State.ISSUED

    @property
    def done(self) -> bool:
        """Whether it has settled: landed, failed or cancelled. True as soon as any thread saw it."""
        return self._outcome is not None or self._all_landed() or self._failure() is not None

    @property
    def landed_layers(self) -> int:
        """How many layers have landed."""
        return sum(map(self._landed, range(self.num_layers)))

    def __repr__(self) -> str:
        count = f"{self.landed_layers}/{self.num_layers} layers"
        return f"<Transfer {self.request.id} {self.direction} {count}, {self.state}>"

    # Waiting in a task -----------------------------------------------------------------------------

    def __await__(self) -> Generator[object, object, None]:
        """Wait until it has settled. Cancelling the wait does not cancel the transfer.

        Raises:
            TransferCancelled: Somebody cancelled it.
            TransferFailed: It broke; the cause is `__cause__`.
        """
        return self._settled().__await__()

    async def _settled(self) -> None:
        await self._until(_SETTLED, lambda: self._closed)
        self._raise_if_over()

    async def issued(self, layer: int | str | None = None) -> None:
        """Wait until a layer (default: the first) is on its stream, so that a fence can order it.

        Raises:
            TransferFailed: It failed or was cancelled before.
        """
        index = 0 if layer is None else self._shell.group.layer(layer)
        await self._until(index, lambda: self._issued(index))
        self._raise_unless(self._issued(index))

    async def layer(self, layer: int | str) -> None:
        """Wait until a layer has landed. Cancelling the wait does not cancel the transfer.

        Raises:
            TransferFailed: It failed or was cancelled before that layer landed.
        """
        index = self._shell.group.layer(layer)
        start = self._shell.driver.now_ns()
        suspended = await self._until(index, lambda: self._landed(index))
        self._raise_unless(self._landed(index))
        self.note(index, start if suspended else 0)

    async def source_reusable(self) -> None:
        """Wait until no copy of it can read its source pages any more, however it ended.

        Raises:
            TransferFailed: The device is lost: that can never be known.
        """
        await self._until(_RELEASED, lambda: self._released or self._shell.stuck is not None)
        if not self._released:
            raise TransferFailed(f"{self.direction} {self.id}", cause=self._shell.stuck)

    async def _until(self, what: int, reached: Callable[[], bool]) -> bool:
        """Suspend until `reached()`, or until it is known to be over; return whether it suspended."""
        self._shell.home.check("await", "wait_layer, wait_issued, wait_source_reusable or result")
        await checkpoint()
        suspended = False
        while not reached() and (what == _RELEASED or not self._is_over()):
            suspended = True
            waiter = (what, anyio.Event())
            self._waiters.append(waiter)
            if what >= 0:
                self._watch()
                if reached():
                    self._waiters.remove(waiter)
                    break
            try:
                await waiter[1].wait()
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return suspended

    # Waiting in a thread ---------------------------------------------------------------------------

    def wait_layer(self, layer: int | str, timeout: float | None = None) -> None:
        """Block this thread until a layer has landed. Works while the loop is busy, or stopped.

        Raises:
            TransferFailed: It failed or was cancelled before that layer landed.
            TimeoutError: Not within `timeout` seconds; the transfer goes on.
            RequestError: This is the loop's own thread, and the layer has not landed.
        """
        index = self._shell.group.layer(layer)
        start = self.wait_quietly(index, timeout)
        self.note(index, start)

    def wait_quietly(self, index: int, timeout: float | None = None) -> int:
        """Wait as `wait_layer` does; return when a wait that blocked began, in ns, else 0."""
        if self._landed(index):
            return 0
        self._follow_layers()
        start = self._shell.driver.now_ns()
        self._block(lambda: self._landed(index), f"layer {index} to land", timeout)
        return start

    def wait_issued(self, layer: int | str | None = None, timeout: float | None = None) -> None:
        """Block this thread until a layer (default: the first) is on its stream. Raises as `wait_layer`."""
        index = 0 if layer is None else self._shell.group.layer(layer)
        self._block(lambda: self._issued(index), f"layer {index} to be issued", timeout)

    def wait_source_reusable(self, timeout: float | None = None) -> None:
        """Block this thread until no copy of it can read its source pages any more."""
        self._block(lambda: self._released, "its pages", timeout, whatever=True)

    def result(self, timeout: float | None = None) -> None:
        """Block this thread until it has settled. Raises as `wait_layer`, and what `await` raises.

        With `start_scheduler` its pages are free of traffic then, as after an `await`. On a loop of
        yours, which may be busy, they are when the loop next runs: see `wait_source_reusable`.
        """
        shell = self._shell

        def reached() -> bool:
            return self._closed or (self.done and (not shell.private or shell.over))

        self._block(reached, "it to settle", timeout, whatever=True)
        self._raise_if_over()

    def fence(self, layer: int | str) -> None:
        """Order this thread's compute stream after a layer; where compute is the thread, wait for it.

        Raises:
            RequestError: The stream is capturing a graph (fence just before the replay), or this is the
                loop's own thread and the layer is not issued yet (await `issued` first).
            TransferFailed: It is known to have failed or to have been cancelled.
        """
        start = self.fence_quietly(self._shell.group.layer(layer))
        self.note(self._shell.group.layer(layer), start)

    def fence_quietly(self, index: int, timeout: float | None = None) -> int:
        """Fence as `fence` does; return when a wait that blocked began, in ns, else 0."""
        driver = self._shell.driver
        if not driver.fences:
            return self.wait_quietly(index, timeout)
        if driver.capturing():
            raise RequestError(
                "fence was called on a stream that captures a graph, and a wait made now would be "
                "lost or would break the capture. Fence just before the replay."
            )
        self._follow_layers()
        while not self._landed(index):
            self._block(lambda: self._issued(index), f"layer {index} to be issued", timeout)
            flight = self._flight_of(index)
            event = None if flight is None else flight.fence(self.request.id, index)
            if event is not None:
                driver.compute_stream().wait(event)
                break
        return 0

    # Acting ------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Settle it as cancelled: at once on the loop's thread, else when the loop next runs.

        Copies already issued drain unseen; its pages stay locked so long. Any thread, any time; nothing
        happens when it has settled.
        """
        self._shell.cancel(self)

    def layer_written(self, layer: int | str) -> None:
        """Say that the forward has written a layer, so that its backup may start. Any thread, once a layer.

        What this thread's compute stream has queued so far counts as the writing.

        Raises:
            RequestError: It is no streaming backup, the layer was written before, or the stream is
                capturing a graph.
        """
        self._shell.layer_written(self, self._shell.group.layer(layer))

    # Progress ------------------------------------------------------------------------------------------

    def _flight_of(self, layer: int) -> Flight | None:
        lead = self._lead or self
        return lead._flight if lead._layers is None else lead._layers.get(layer)

    def _landed(self, layer: int) -> bool:
        if layer in self._shell.group.holes:
            return True
        if self._outcome is not None:
            if self._outcome is State.DONE:
                return True
            kept = self._kept
            return layer in kept if isinstance(kept, frozenset) else layer < kept
        flight = self._flight_of(layer)
        return flight is not None and flight.landed_layers > layer

    def _issued(self, layer: int) -> bool:
        flight = self._flight_of(layer)
        if flight is not None and flight.issued_layers > layer and flight.error is None:
            return True
        return self._landed(layer)

    def _all_landed(self) -> bool:
        if self._outcome is not None:
            return self._outcome is State.DONE
        lead = self._lead or self
        if lead._layers is not None:
            return len(lead._layers) == self.num_layers and all(
                map(self._landed, range(self.num_layers))
            )
        return self._landed(self.num_layers - 1)

    @property
    def _closed(self) -> bool:
        """Whether it failed or was cancelled; or it is done and its pages are free of traffic.

        Threads see the last layer land before the loop gives the pages back. Who is told `done` may
        free them and must find them free.
        """
        if self._outcome is State.DONE:
            return self._released
        return self._is_over()

    def _failure(self) -> Flight | None:
        """Return the flight that broke, if it carries this transfer alone: then nothing can mend it."""
        lead = self._lead or self
        flights = [lead._flight] if lead._layers is None else list(lead._layers.values())
        for flight in flights:
            if flight is not None and flight.error is not None and len(flight.batch.pieces) == 1:
                return flight
        return None

    def _is_over(self) -> bool:
        return self._outcome is not None or self._failure() is not None

    def _raise_unless(self, reached: bool) -> None:
        if not reached:
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        name = f"{self.direction} {self.request.id}"
        if self._outcome is State.CANCELLED:
            raise TransferCancelled(name)
        if self._outcome is State.FAILED:
            raise TransferFailed(name, layer=self._error_layer, cause=self._error)
        flight = self._failure() if self._outcome is None else None
        if flight is not None:
            raise TransferFailed(name, layer=flight.error_layer, cause=flight.error)

    def _block(
        self,
        reached: Callable[[], bool],
        what: str,
        timeout: float | None,
        *,
        whatever: bool = False,
    ) -> None:
        """Block this thread until `reached()`; raise when it is over before, unless `whatever`."""
        if reached():
            return
        if not whatever:
            self._raise_if_over()
        shell = self._shell
        shell.check_may_block(f"wait for {what}")

        def arrived() -> bool:
            return reached() or (not whatever and self._is_over()) or shell.over

        if not shell.bell.wait(arrived, timeout):
            raise TimeoutError(f"{self!r}: {timeout} s passed while waiting for {what}")
        if not reached():
            self._raise_if_over()
            raise TransferFailed(
                f"{self.direction} {self.request.id}",
                cause=shell.stuck or RuntimeError("the event loop of its scheduler has ended"),
            )

    def note(self, layer: int, start_ns: int, forward: ForwardTrace | None = None) -> None:
        """Count a wait for a layer; `start_ns` is 0 when it did not have to wait."""
        self._shell.note_wait(self, layer, start_ns, forward)

    def note_forward(self, ns: int) -> None:
        """Count a forward pass that ran over this transfer's layers. Any thread."""
        self._shell.counters.forwarded(ns)

    # Called by the scheduler, on the loop's thread --------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the loop has fixed the outcome."""
        return self._outcome is not None

    @property
    def watched(self) -> bool:
        """Whether a task waits for it, or for one that rides on it."""
        return bool(self._waiters) or self._joined is not None

    def stream(self) -> None:
        """Make it a streaming backup."""
        self._layers, self._written = {}, {}

    def write(self, layer: int) -> None:
        """Note that a layer was written. Any thread.

        Raises:
            RequestError: It was written before, or this is no streaming backup.
        """
        if self._written is None:
            raise RequestError(
                f"{self!r} is not a streaming backup: layer_written belongs to "
                "backup(..., streaming=True)"
            )
        mine = object()
        if self._written.setdefault(layer, mine) is not mine:
            raise RequestError(
                f"layer {layer} of {self!r} was written before; once a layer", value=layer
            )

    def riders(self) -> list[Transfer]:
        """Return the transfers that ride on this one's copies."""
        return self._joined or []

    def take(self, rider: Transfer) -> None:
        """Let another transfer ride on this one's copies."""
        if self._joined is None:
            self._joined = []
        self._joined.append(rider)
        rider._lead = self

    def leave(self) -> bool:
        """Return whether others still want the copies when this one no longer does."""
        lead = self._lead or self
        return any(
            other is not self and not other.settled for other in (lead, *(lead._joined or ()))
        )

    def fly(self, flight: Flight, piece: Piece) -> None:
        """Take the flight that carries it, or one layer of it."""
        if self._layers is not None:
            self._layers[piece.first] = flight
        self._flight = flight
        if self.watched:
            flight.watched = flight.issue_watched = True
        if self._by_layer:
            flight.by_layer = True
        flight.transfers.append(self)

    def _follow_layers(self) -> None:
        """Have its layers enqueued one by one, as far as they are not yet. Any thread."""
        lead = self._lead or self
        lead._by_layer = True
        if lead._flight is not None:
            lead._flight.by_layer = True

    def _watch(self) -> None:
        """Have its flights report each layer; what they published before is seen by whoever looks next."""
        lead = self._lead or self
        self._follow_layers()
        for flight in (lead._flight, *(lead._layers or {}).values()):
            if flight is not None:
                flight.watched = flight.issue_watched = True

    def wake(self, layers: int | None = None) -> None:
        """Let tasks look again that wait for a layer below `layers`; None: for anything."""
        for waiter in self._waiters[:]:
            if layers is None or 0 <= waiter[0] < layers:
                waiter[1].set()
                self._waiters.remove(waiter)
        for rider in self._joined or ():
            rider.wake(layers)

    def layer_of(self, error: BaseException | None) -> int | None:
        """Return the layer whose copy raised `error`; None when it came from elsewhere."""
        flight = self._failure()
        return flight.error_layer if flight is not None and flight.error is error else None

    def settle(self, state: State, error: BaseException | None, layer: int | None) -> State:
        """Fix the outcome, and return it: done after all when everything has landed meanwhile.

        What has landed by now stays usable.
        """
        if self._outcome is not None:
            return self._outcome
        if self._all_landed():
            state = State.DONE  # somebody may have seen it already
        if state is not State.DONE:
            if (self._lead or self)._layers is None:
                flight = self._flight_of(0)
                self._kept = 0 if flight is None else flight.landed_layers
            else:
                self._kept = frozenset(filter(self._landed, range(self.num_layers)))
        self._error, self._error_layer = error, layer
        self._outcome = state
        self.wake()
        return state

    def release(self) -> None:
        """Note that its pages are free of traffic."""
        self._released = True
        self.wake()
        for rider in self._joined or ():
            rider.release()
