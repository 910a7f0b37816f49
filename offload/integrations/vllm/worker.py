"""One rank's side: submits a step's load and store, waits layer by layer, and says what has ended.

vLLM calls it in this order, from the thread that runs the model: `begin(plan)`, `load()` before the forward
if some request needs it, `before(name)` and `after(name)` around each attention layer, `end()`, then
`bad_blocks()` and `ended()`.

* A load that breaks breaks no forward: the layer goes on over what is there, and the blocks are reported, so
  that vLLM computes them again and throws this step's tokens of those requests away.
* A load stays under watch until it is over, also when the forward skipped layers: whatever a later forward
  asks for, it waits for all loads that are still moving.
* Nothing waits for a store, ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import attrs

from offload import (
    BlockingScheduler,
    OffloadError,
    State,
    Tracer,
    Transfer,
    TransferFailed,
    layerwise,
    start_scheduler,
)
from offload.integrations.vllm.adopt import Adopted
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.settings import Settings

_LOG = logging.getLogger("offload")

_SLACK_S = 5.0
"""Seconds a thread waits beyond a transfer's own deadline, which should have ended the wait: a scheduler
whose loop is starved still gets its turn within this."""


@attrs.define(eq=False)
class _Moving:
    """A job and its transfer; None where it could not even be submitted."""

    job: Job
    transfer: Transfer | None
    broken: bool = False
    reported: bool = False
    """Whether its blocks were reported as not loaded."""

    unwritten: set[int] = attrs.field(factory=set)
    """Of a store, the layers that the forward has not written."""

    @property
    def over(self) -> bool:
        """Whether nothing of it touches memory any more."""
        return self.transfer is None or (
            self.transfer.done and self.transfer.state is not State.DRAINING
        )

    @property
    def landed(self) -> bool:
        return self.transfer is not None and not self.broken and self.transfer.state is State.DONE


@attrs.define
class Moved:
    """What this rank has moved since it was last asked."""

    loads: int = 0
    load_blocks: int = 0
    load_bytes: int = 0
    stores: int = 0
    store_blocks: int = 0
    store_bytes: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    waits: int = 0
    """Layers whose forward had to wait for a load."""
    wait_s: float = 0.0


@attrs.define(eq=False)
class WorkerSide:
    """Copies for one rank. One thread, the model's."""

    settings: Settings
    tracer: Tracer | None = None
    moved: Moved = attrs.field(init=False, factory=Moved)
    scheduler: BlockingScheduler = attrs.field(init=False)
    num_host_blocks: int = attrs.field(init=False, default=0)

    _layer_of: Mapping[str, int] = attrs.field(init=False, factory=dict)
    _num_layers: int = attrs.field(init=False, default=0)
    _block_bytes: int = attrs.field(init=False, default=0)
    _forward: layerwise.ForwardTrace | None = attrs.field(init=False, default=None)
    _plan: StepPlan = attrs.field(init=False, factory=StepPlan)
    _loads: list[_Moving] = attrs.field(init=False, factory=list)
    _stores: list[_Moving] = attrs.field(init=False, factory=list)
    _store: _Moving | None = attrs.field(init=False, default=None)
    """This step's."""
    _labels: threading.local = attrs.field(init=False, factory=threading.local)

    @classmethod
    def start(
        cls, settings: Settings, adopted: Adopted, num_host_blocks: int, rank: int = 0
    ) -> WorkerSide:
        """Allocate the host pools and start the scheduler. Takes about 0.1 s per GB on a GPU.

        Raises:
            UnsupportedPairError: The io backend cannot copy these pools.
            UnknownNameError: No such io backend or driver.
        """
        side = cls(settings)
        if settings.trace is not None:
            side.tracer = Tracer(settings.trace_capacity, rank, labels=side._tags)
        side.num_host_blocks = num_host_blocks
        side._layer_of = adopted.layer_of
        side._num_layers = adopted.num_layers
        side._block_bytes = adopted.block_bytes
        side.scheduler = start_scheduler(
            adopted.backed(num_host_blocks),
            io_backend=settings.io_backend,
            driver=settings.driver,
            tracer=side.tracer,
        )
        return side

    # A step ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Take a step's plan. Its store is submitted now: nothing of it moves before a layer is written."""
        self._abandon()
        self._plan = plan
        if self.tracer is not None and self.tracer.active:
            self._forward = layerwise.ForwardTrace(self.tracer)
        if plan.store is not None:
            self._store = self._submit(plan.store, store=True)
            self._store.unwritten.update(range(self._num_layers))
            self._stores.append(self._store)

    def load(self) -> None:
        """Submit the step's load, once, over all its requests."""
        job, self._plan = self._plan.load, attrs.evolve(self._plan, load=None)
        if job is not None:
            self._loads.append(self._submit(job, store=False))

    def before(self, name: str) -> None:
        """Wait until a layer of every load has landed; on a GPU, have the stream wait."""
        layer = self._layer_of.get(name)
        if layer is None:
            return
        if self._forward is not None:
            self._forward.arrive(layer)
        for load in self._loads:
            if not load.broken and load.transfer is not None:
                self._wait(load, load.transfer, layer)

    def after(self, name: str) -> None:
        """Start a layer's store: the forward has written it. The first time counts."""
        layer = self._layer_of.get(name)
        if layer is None:
            return
        if self._forward is not None:
            self._forward.leave(
                layer, tuple(load.transfer.id for load in self._loads if load.transfer)
            )
        store = self._store
        if store is not None and layer in store.unwritten:
            self._written(store, layer)

    def end(self) -> None:
        """Start the store of layers that the forward passed without a hook. Waits for nothing."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None
        store, self._store = self._store, None
        if store is not None:
            for layer in sorted(store.unwritten):
                self._written(store, layer)

    # What it says ----------------------------------------------------------------------------------------

    def bad_blocks(self) -> set[int]:
        """Return the blocks whose load broke, once no late byte can reach them any more.

        Raises:
            TimeoutError: Copies are still under way after `timeout_s`: nothing here is safe any more.
        """
        bad: set[int] = set()
        for load in self._loads:
            if load.transfer is not None and not load.broken and load.transfer.done:
                load.broken = not load.landed
            if load.broken and not load.reported:
                if load.transfer is not None:
                    load.transfer.cancel()
                    load.transfer.wait_source_reusable(self.settings.timeout_s)
                load.reported = True
                bad.update(load.job.device_pages)
        return bad

    def ended(self) -> Outcomes:
        """Return the jobs that have ended since the last call."""
        landed: dict[int, int] = {}
        failed: dict[int, int] = {}
        for moving in (*self._loads, *self._stores):
            if moving.over and moving is not self._store:
                (landed if moving.landed else failed)[moving.job.number] = 1
        self._count(landed, failed)
        self._loads = [each for each in self._loads if not _in(each, landed, failed)]
        self._stores = [each for each in self._stores if not _in(each, landed, failed)]
        return Outcomes(landed, failed)

    def take(self) -> Moved:
        """Return what was moved since the last call."""
        moved, self.moved = self.moved, Moved()
        return moved

    def close(self) -> None:
        """Stop; wait until nothing moves."""
        self._abandon()
        self.scheduler.close(timeout=self.settings.timeout_s)

    # Inside ----------------------------------------------------------------------------------------------

    def _submit(self, job: Job, *, store: bool) -> _Moving:
        scheduler, timeout = self.scheduler, self.settings.timeout_s
        self._labels.tags = {"requests": job.tag, "job": job.number}
        deadline = scheduler.now() + timeout
        try:
            if store:
                transfer = scheduler.backup(
                    device_pages=job.device_pages, host_pages=job.host_pages,
                    streaming=True, deadline=deadline, timeout=timeout,
                )  # fmt: skip
            else:
                transfer = scheduler.load(
                    host_pages=job.host_pages, device_pages=job.device_pages,
                    deadline=deadline, timeout=timeout,
                )  # fmt: skip
        except (OffloadError, TimeoutError):
            _LOG.exception("%s %d was not submitted", "store" if store else "load", job.number)
            return _Moving(job, None, broken=True)
        finally:
            self._labels.tags = None
        return _Moving(job, transfer)

    def _wait(self, load: _Moving, transfer: Transfer, layer: int) -> None:
        start = time.perf_counter()
        try:
            timeout = self.settings.timeout_s + _SLACK_S
            self.moved.waits += layerwise.fence(transfer, layer, self._forward, timeout)
        except (TransferFailed, TimeoutError):
            _LOG.exception("load %d broke; its blocks are computed again", load.job.number)
            load.broken = True
        self.moved.wait_s += time.perf_counter() - start

    def _written(self, store: _Moving, layer: int) -> None:
        store.unwritten.discard(layer)
        if store.transfer is not None and not store.broken:
            store.transfer.layer_written(layer)

    def _abandon(self) -> None:
        """Cancel a store whose forward ended without `end`."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None
        store, self._store = self._store, None
        if store is not None and store.transfer is not None:
            store.broken = True
            store.transfer.cancel()

    def _count(self, landed: Mapping[int, int], failed: Mapping[int, int]) -> None:
        moved = self.moved
        for moving in self._loads:
            moved.failed_loads += moving.job.number in failed
            if moving.job.number in landed:
                moved.loads += 1
                moved.load_blocks += len(moving.job.device_pages)
                moved.load_bytes += len(moving.job.device_pages) * self._block_bytes
        for moving in self._stores:
            moved.failed_stores += moving.job.number in failed
            if moving.job.number in landed:
                moved.stores += 1
                moved.store_blocks += len(moving.job.device_pages)
                moved.store_bytes += len(moving.job.device_pages) * self._block_bytes

    def _tags(self) -> Mapping[str, str | int | float | bool | None] | None:
        return getattr(self._labels, "tags", None)


def _in(moving: _Moving, landed: Mapping[int, int], failed: Mapping[int, int]) -> bool:
    return moving.job.number in landed or moving.job.number in failed
