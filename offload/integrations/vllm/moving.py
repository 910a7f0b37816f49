"""Jobs as transfers: submitted with a deadline and a tag, watched until nothing of them touches memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs

from offload import BlockingScheduler, OffloadError, State, Tracer, Transfer
from offload.integrations.vllm.messages import Job

_LOG = logging.getLogger("vllm.offload")  # below vLLM's own, which has the handlers

FAULTS = (OffloadError, TimeoutError, RuntimeError)
"""What ends a job and not the engine: ours, and what torch says of CUDA. An error that the device does not recover
from comes again from the engine's own next call."""

_AHEAD = -0.2
"""The priority of a load that no forward waits for: two seconds of waiting outweigh it."""

Tags = Mapping[str, str | int | float | bool | None]


@attrs.define(eq=False)
class Moving:
    """A job and its transfer."""

    job: Job

    transfer: Transfer | None
    """None where it was not submitted."""

    broken: bool = False
    """Whether its bytes cannot be trusted, whatever becomes of the transfer."""

    reported: bool = False
    """Of a load: whether its blocks were reported as not loaded."""

    unwritten: set[int] = attrs.field(factory=set)
    """Of a store that streams: the layers that the forward has not written."""

    @property
    def over(self) -> bool:
        """Whether nothing of it touches memory any more."""
        return self.transfer is None or (
            self.transfer.done and self.transfer.state is not State.DRAINING
        )

    @property
    def landed(self) -> bool:
        """Whether it is over, and its bytes are right."""
        return self.transfer is not None and not self.broken and self.transfer.state is State.DONE


@attrs.define(eq=False)
class Mover:
    """Submits jobs, from the model's thread."""

    scheduler: BlockingScheduler
    timeout_s: float
    tags: Tagger

    def load(self, job: Job, *, ahead: bool = False) -> Moving:
        """Submit a load. One that is ahead of its request gives way to those under a forward."""
        scheduler, timeout = self.scheduler, self.timeout_s
        self.tags.job = job
        try:
            return Moving(
                job,
                scheduler.load(
                    host_pages=job.host_pages, device_pages=job.device_pages,
                    priority=_AHEAD if ahead else 0, deadline=scheduler.now() + timeout, timeout=timeout,
                ),
            )  # fmt: skip
        except FAULTS:
            _LOG.exception("load %d was not submitted; its blocks did not come", job.number)
            return Moving(job, None, broken=True)
        finally:
            self.tags.job = None

    def store(self, job: Job, *, streaming: bool) -> Moving:
        """Submit a store: layer by layer as they are written, or as a whole after what was queued."""
        scheduler, timeout = self.scheduler, self.timeout_s
        self.tags.job = job
        try:
            return Moving(
                job,
                scheduler.backup(
                    device_pages=job.device_pages, host_pages=job.host_pages, streaming=streaming,
                    deadline=scheduler.now() + timeout, timeout=timeout,
                ),
            )  # fmt: skip
        except FAULTS:
            _LOG.exception("store %d was not submitted; its blocks are not stored", job.number)
            return Moving(job, None, broken=True)
        finally:
            self.tags.job = None


@attrs.define(eq=False)
class Tagger:
    """What a tracer shows with a request: which of vLLM's requests it serves."""

    job: Job | None = None
    """The one that is being submitted."""

    def __call__(self) -> Tags | None:
        """Return its tags."""
        return None if self.job is None else {"requests": self.job.tag, "job": self.job.number}

    def tracer(self, capacity: int, rank: int) -> Tracer:
        """Return a tracer that shows them."""
        return Tracer(capacity, rank, labels=self)


@attrs.define
class Moved:
    """What a rank has moved in an interval."""

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
    wait_seconds: float = 0.0

    def load(self, moving: Moving, block_bytes: int) -> None:
        """Count a load that is over."""
        blocks = len(moving.job.device_pages) if moving.landed else 0
        self.loads += moving.landed
        self.failed_loads += not moving.landed
        self.load_blocks += blocks
        self.load_bytes += blocks * block_bytes

    def store(self, moving: Moving, block_bytes: int) -> None:
        """Count a store that is over."""
        blocks = len(moving.job.device_pages) if moving.landed else 0
        self.stores += moving.landed
        self.failed_stores += not moving.landed
        self.store_blocks += blocks
        self.store_bytes += blocks * block_bytes
