"""The second door: vLLM's own OffloadingConnector decides what moves, and our scheduler moves it.

`kv_connector="OffloadingConnector"` with `spec_name="OffloadSpec"` and
`spec_module_path="offload.integrations.vllm"` in `kv_connector_extra_config`. Sizes, eviction and chunks are
vLLM's (`cpu_bytes_to_use`, `eviction_policy`, `blocks_per_chunk`); `timeout_s`, `io_backend`, `driver`, `trace`
and `trace_capacity` are ours. Loads are whole here: a request starts when all of its blocks are there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offload import RequestError, Tracer, start_scheduler
from offload.integrations.vllm.jobs import Jobs, Pages, opaque_group, sub_pages
from offload.integrations.vllm.needs_spec import check_spec
from offload.integrations.vllm.settings import Settings
from offload.integrations.vllm.versions import needed

with needed():
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingWorker,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

_LOG = logging.getLogger("vllm.offload")  # below vLLM's own, which has the handlers

_OURS = frozenset({"timeout_s", "io_backend", "driver", "trace", "trace_capacity"})


class OffloadSpec(CPUOffloadingSpec):
    """vLLM's host cache with our copies under it. Any device that a driver of ours serves, the CPU too."""

    _made: OffloadWorker | None = None

    def __init__(self, config: OffloadingConfig) -> None:
        check_spec(OffloadSpec, OffloadWorker)
        super().__init__(config)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker of this rank, made once.

        Raises:
            RequestError: Several groups of KV caches, a canonical layout, or no room for one chunk.
        """
        if self._made is None:
            self._made = OffloadWorker.of(self, kv_caches)
        return self._made


class OffloadWorker(OffloadingWorker):
    """Moves whole jobs of one rank."""

    def __init__(
        self, jobs: Jobs, blocks_per_chunk: int, tracer: Tracer | None, path: str | None
    ) -> None:
        self.jobs = jobs
        self.tracer = tracer
        self._blocks_per_chunk = blocks_per_chunk
        self._path = path

    @classmethod
    def of(cls, spec: OffloadSpec, kv_caches: CanonicalKVCaches) -> OffloadWorker:
        """Return a worker over vLLM's opaque pages."""
        _check(spec, kv_caches)
        config = spec.config
        extra = {key: value for key, value in spec.extra_config.items() if key in _OURS}
        pages = spec.num_chunks * spec.blocks_per_chunk
        settings = Settings.read({**extra, "host_blocks": pages})
        tracer = None
        if settings.trace is not None:
            tracer = Tracer(settings.trace_capacity, config.parallel.rank)
        order = dict.fromkeys(ref.tensor_idx for ref in kv_caches.group_data_refs[0])
        group = opaque_group([kv_caches.tensors[index].tensor for index in order], pages)
        scheduler = start_scheduler(
            group, io_backend=settings.io_backend, driver=settings.driver, tracer=tracer
        )
        path = settings.trace_path(config.parallel.rank, config.parallel.world_size)
        return cls(Jobs(scheduler, settings.timeout_s), spec.blocks_per_chunk, tracer, path)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start a store."""
        device, host = self._pages(src_spec, dst_spec)
        self.jobs.store(job_id, device, host)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start a load."""
        device, host = self._pages(dst_spec, src_spec)
        self.jobs.load(job_id, host, device)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended. vLLM ends the engine when one of them has failed."""
        return [
            TransferResult(
                job_id=ended.number,
                success=ended.good,
                transfer_size=ended.nbytes,
                transfer_time=ended.seconds,
            )
            for ended in self.jobs.ended()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended: their blocks are about to be written."""
        self.jobs.wait(job_ids)

    def shutdown(self) -> None:
        """Stop, and write the timeline."""
        self.jobs.close()
        if self._path is not None and self.tracer is not None:
            _LOG.info("timeline written to %s", self.tracer.export(self._path))

    def _pages(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> tuple[Pages, Pages]:
        assert isinstance(host, CPULoadStoreSpec)
        blocks: Pages = device.block_ids.astype("int64")
        pages = sub_pages(
            host.block_ids,
            len(blocks),
            first=device.block_indices[0],
            blocks_per_chunk=self._blocks_per_chunk,
        )
        return blocks, pages


def _check(spec: OffloadSpec, kv_caches: CanonicalKVCaches) -> None:
    groups = len(kv_caches.group_data_refs)
    if groups != 1:
        raise RequestError(
            f"OffloadSpec carries one group of KV caches, and this model has {groups}. Set "
            "--disable-hybrid-kv-cache-manager, or use vLLM's CPUOffloadingSpec."
        )
    if spec.config.canonical_layout:
        raise RequestError(
            "OffloadSpec stores pages as the device has them. Leave out canonical_layout, or use vLLM's "
            "CPUOffloadingSpec."
        )
    if spec.num_chunks < 1:
        raise RequestError(
            f"cpu_bytes_to_use={spec.extra_config.get('cpu_bytes_to_use')} holds no chunk: one is "
            f"{spec.kv_bytes_per_chunk} bytes over all ranks. Set it to that or more."
        )
