"""One rank's side: submits a step's load and store, waits layer by layer, and says what has ended.

vLLM calls it in this order, from the thread that runs the model: `begin(plan)`, `load()` before the forward
if some request needs it, else after it, `before(name)` and `after(name)` around each attention layer, `end()`, then
`arrived()`, `bad_blocks()` and `ended()`.

* A load that breaks breaks no forward: the layer goes on over what is there, and the blocks are reported, so
  that vLLM computes them again and throws this step's tokens of those requests away.
  So does one whose wait could not be made, whatever CUDA or the scheduler said: nothing of it is given back
  before the host knows that no late byte can come. Where that cannot be known, after a copy that never ends or on a
  device that is lost, the engine ends by a TimeoutError: its blocks are safe for nobody.
* A load stays under watch until it is over, also when the forward skipped layers: whatever a later forward
  asks for, it waits for all loads that are still moving.
* A load ahead of its request is waited for by no forward: its end is said by `arrived()`, and in the same step
  its blocks are reported, if they are bad.
* Nothing waits for a store, ever. A large one leaves layer by layer while the forward goes on; a small one
  leaves as a whole behind it, because its copies take less time than a start for each layer would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext

import attrs

from offload import Tracer, layerwise, start_scheduler
from offload.integrations.vllm.adopt import Adopted
from offload.integrations.vllm.cores import on_spare_cores
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.moving import FAULTS, Moved, Mover, Moving, Tagger
from offload.integrations.vllm.settings import Settings

_LOG = logging.getLogger("vllm.offload")  # below vLLM's own, which has the handlers

_SLACK_S = 5.0
"""Seconds a thread waits beyond a transfer's own deadline, which should have ended the wait: a scheduler
whose loop is starved still gets its turn within this."""


@attrs.define(eq=False)
class WorkerSide:
    """Copies for one rank. One thread, the model's."""

    settings: Settings
    layer_of: Mapping[str, int]
    """By vLLM's layer name, the layer; names that are not here hold no pages."""
    num_layers: int
    block_bytes: int
    num_host_blocks: int
    mover: Mover
    tracer: Tracer | None
    moved: Moved = attrs.field(init=False, factory=Moved)

    _load: Job | None = attrs.field(init=False, default=None)
    """This step's, until it is submitted."""
    _loads: list[Moving] = attrs.field(init=False, factory=list)
    _later: tuple[Job, ...] = attrs.field(init=False, default=())
    """This step's loads ahead of their requests, until they are submitted."""
    _ahead: list[Moving] = attrs.field(init=False, factory=list)
    _small: Job | None = attrs.field(init=False, default=None)
    """This step's store, where it leaves as a whole."""
    _streaming: Moving | None = attrs.field(init=False, default=None)
    """This step's store, where it leaves layer by layer."""
    _stores: list[Moving] = attrs.field(init=False, factory=list)
    _forward: layerwise.ForwardTrace | None = attrs.field(init=False, default=None)

    @classmethod
    def start(
        cls, settings: Settings, adopted: Adopted, num_host_blocks: int, rank: int = 0
    ) -> WorkerSide:
        """Allocate the host pools and start the scheduler. Takes about 0.1 s per GB on a GPU.

        Raises:
            UnsupportedPairError: The io backend cannot copy these pools.
            UnknownNameError: No such io backend or driver.
        """
        tags = Tagger()
        tracer = None if settings.trace is None else tags.tracer(settings.trace_capacity, rank)
        group = adopted.backed(num_host_blocks)
        with on_spare_cores() if adopted.device.type == "cpu" else nullcontext():
            scheduler = start_scheduler(
                group, io_backend=settings.io_backend, driver=settings.driver, tracer=tracer
            )
        return cls(
            settings,
            adopted.layer_of,
            adopted.num_layers,
            adopted.block_bytes,
            num_host_blocks,
            Mover(scheduler, settings.timeout_s, tags),
            tracer,
        )

    # A step ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Take a step's plan. Of its store nothing moves before a layer is written."""
        self._abandon()
        self._load, self._later = plan.load, plan.ahead
        if self.tracer is not None and self.tracer.active:
            self._forward = layerwise.ForwardTrace(self.tracer)
        job = plan.store
        if job is None:
            return
        if len(job.device_pages) * self.block_bytes < self.settings.stream_bytes:
            self._small = job
            return
        self._streaming = self.mover.store(job, streaming=True)
        self._streaming.unwritten.update(range(self.num_layers))
        self._stores.append(self._streaming)

    def load(self) -> None:
        """Submit the step's load, once, over all its requests, and those ahead of theirs."""
        job, self._load = self._load, None
        if job is not None:
            self._loads.append(self.mover.load(job))
        later, self._later = self._later, ()
        self._ahead += [self.mover.load(job, ahead=True) for job in later]

    def before(self, name: str) -> None:
        """Wait until a layer of every load has landed; on a GPU, have the stream wait."""
        layer = self.layer_of.get(name)
        if layer is None:
            return
        if self._forward is not None:
            self._forward.arrive(layer)
        for load in self._loads:
            if not load.broken:
                self._wait(load, layer)

    def after(self, name: str) -> None:
        """Start a layer's store: the forward has written it. The first time counts."""
        layer = self.layer_of.get(name)
        if layer is None:
            return
        if self._forward is not None:
            read = tuple(load.transfer.id for load in self._loads if load.transfer)
            self._forward.leave(layer, read)
        store = self._streaming
        if store is not None and layer in store.unwritten:
            self._written(store, layer)

    def end(self) -> None:
        """Start a small store, and that of layers that the forward passed without a hook. Waits for nothing."""
        self._end_trace()
        store, self._streaming = self._streaming, None
        if store is not None:
            for layer in sorted(store.unwritten):
                self._written(store, layer)
        job, self._small = self._small, None
        if job is not None:
            self._stores.append(self.mover.store(job, streaming=False))

    # What it says ----------------------------------------------------------------------------------------

    def arrived(self) -> set[str]:
        """Return the requests whose load ahead of them is over, each once. What `bad_blocks` says next is of them too."""
        over = [load for load in self._ahead if load.over]
        self._ahead = [load for load in self._ahead if load not in over]
        self._loads += over
        return {load.job.requests[0] for load in over}

    def bad_blocks(self) -> set[int]:
        """Return the blocks whose load broke, once no late byte can reach them any more.

        Raises:
            TimeoutError: Copies are still under way after `timeout_s`: nothing here is safe any more.
        """
        bad: set[int] = set()
        for load in self._loads:
            if load.over and not load.landed:
                load.broken = True
            if load.broken and not load.reported:
                if load.transfer is not None:
                    load.transfer.cancel()
                    load.transfer.wait_source_reusable(self.settings.timeout_s)
                load.reported = True
                bad.update(load.job.device_pages)
        return bad

    def ended(self) -> Outcomes:
        """Return the jobs that have ended since the last call."""
        loads = [load for load in self._loads if load.over]
        stores = [store for store in self._stores if store.over and store is not self._streaming]
        for load in loads:
            self.moved.load(load, self.block_bytes)
            self._loads.remove(load)
        for store in stores:
            self.moved.store(store, self.block_bytes)
            self._stores.remove(store)
        return Outcomes(
            {each.job.number: 1 for each in (*loads, *stores) if each.landed},
            {each.job.number: 1 for each in (*loads, *stores) if not each.landed},
        )

    def take(self) -> Moved:
        """Return what was moved since the last call."""
        moved, self.moved = self.moved, Moved()
        return moved

    def close(self) -> None:
        """Stop; wait until nothing moves.

        Raises:
            TimeoutError: Not within `timeout_s`.
        """
        self._abandon()
        self.mover.scheduler.close(timeout=self.settings.timeout_s)

    # Inside ----------------------------------------------------------------------------------------------

    def _wait(self, load: Moving, layer: int) -> None:
        assert load.transfer is not None
        start = time.perf_counter()
        try:
            timeout = self.settings.timeout_s + _SLACK_S
            self.moved.waits += layerwise.fence(load.transfer, layer, self._forward, timeout)
        except FAULTS:
            _LOG.exception(
                "load %d broke; as kv_load_failure_policy says, its blocks are computed again or its requests end",
                load.job.number,
            )
            load.broken = True
        self.moved.wait_seconds += time.perf_counter() - start

    def _written(self, store: Moving, layer: int) -> None:
        store.unwritten.discard(layer)
        if store.transfer is None or store.broken:
            return
        try:
            store.transfer.layer_written(layer)
        except FAULTS:
            _LOG.exception("store %d broke; its blocks are not stored", store.job.number)
            store.broken = True
            store.transfer.cancel()

    def _abandon(self) -> None:
        """Let go of a step whose forward raised: what it has not written is not stored."""
        self._end_trace()
        store, self._streaming = self._streaming, None
        if store is not None and store.transfer is not None:
            store.broken = True
            store.transfer.cancel()
        job, self._small = self._small, None
        if job is not None:
            self._stores.append(Moving(job, None, broken=True))
        load, self._load = self._load, None
        if load is not None:
            self._loads.append(Moving(load, None, broken=True))
        later, self._later = self._later, ()
        self._ahead += [Moving(job, None, broken=True) for job in later]

    def _end_trace(self) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None
