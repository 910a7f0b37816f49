"""The class that vLLM loads. It forwards: decisions are in `plan.py`, copies in `worker.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload import RequestError
from offload.integrations.vllm.adopt import adopt
from offload.integrations.vllm.checks import check, layer_blocks
from offload.integrations.vllm.memory import memory
from offload.integrations.vllm.messages import Outcomes
from offload.integrations.vllm.needs import check_connector, check_pool
from offload.integrations.vllm.scheduler_side import SchedulerSide
from offload.integrations.vllm.settings import GIB, Settings
from offload.integrations.vllm.stats import OffloadPromMetrics, OffloadStats
from offload.integrations.vllm.versions import needed
from offload.integrations.vllm.wire import (
    OffloadHandshake,
    OffloadMetadata,
    OffloadWorkerMetadata,
)
from offload.integrations.vllm.worker import WorkerSide

with needed():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger("vllm.offload")  # below vLLM's own, which has the handlers


class OffloadConnector(KVConnectorBase_V1):
    """Keeps prefixes in host memory, and brings them back layer by layer under the forward that needs them."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_connector(OffloadConnector)
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings: Settings = check(vllm_config, kv_cache_config)
        self._num_ranks: int = vllm_config.parallel_config.world_size
        self.worker: WorkerSide | None = None
        """The worker side, from `register_kv_caches` on; None on the scheduler side."""
        self.scheduler: SchedulerSide | None = None
        """The scheduler side; None in a worker."""
        if role == KVConnectorRole.SCHEDULER:
            (group,) = kv_cache_config.kv_cache_groups
            self.scheduler = SchedulerSide(
                self.settings, group.kv_cache_spec.block_size, self._num_ranks
            )
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                _LOG.warning(
                    "kv_load_failure_policy is 'fail': a load that breaks ends its requests with an error. "
                    "Set it to 'recompute', and --no-async-scheduling or async_load_tokens=0, to compute their blocks "
                    "again instead."
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored: losing it costs a later recompute."""
        return False

    # Worker side -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Adopt vLLM's caches, allocate host memory, start the scheduler of copies.

        Raises:
            GeometryError: A cache cannot be adopted.
            RequestError: Host memory holds no block, or is more than the machine or this container has.
            UnsupportedPairError: The io backend cannot copy these caches.
        """
        parallel = self._vllm_config.parallel_config
        adopted = adopt(
            kv_caches,
            self._kv_cache_config.num_blocks,
            blocks=layer_blocks(self._kv_cache_config),
            order=list(self._vllm_config.compilation_config.static_forward_context),
        )
        there = memory()
        count = self.settings.num_host_blocks(
            adopted.block_bytes,
            memory=there,
            num_ranks=parallel.local_world_size * max(1, parallel.data_parallel_size_local),
        )
        size = count * adopted.block_bytes / GIB
        _LOG.info(
            "host memory of a rank: %.1f GiB; %s %.1f GiB", size, there.who, there.nbytes / GIB
        )
        self.worker = WorkerSide.start(self.settings, adopted, count, parallel.rank)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Say how many blocks this rank's host memory holds."""
        return None if self.worker is None else OffloadHandshake(self.worker.num_host_blocks)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, OffloadMetadata)
        if self.worker is not None:
            self.worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit one load for all requests of the step. Returns at once."""
        if self.worker is not None:
            self.worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for this layer of the loads that are under way, and for no other."""
        if self.worker is not None:
            self.worker.before(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Start to store this layer of the step's blocks; the forward goes on."""
        if self.worker is not None:
            self.worker.after(layer_name)

    def wait_for_save(self) -> None:
        """Start what no hook has started. Does not wait for copies: their blocks are held until they end."""
        if self.worker is not None:
            self.worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads, done before they are scheduled, are over: well, or with bad blocks."""
        return None, (None if self.worker is None else self.worker.arrived()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM must compute again."""
        return set() if self.worker is None else self.worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return which jobs have ended on this rank."""
        outcomes = None if self.worker is None else self.worker.ended()
        return OffloadWorkerMetadata(outcomes) if outcomes else None

    def shutdown(self) -> None:
        """Wait until nothing moves, and write the timeline."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        worker.close()
        rank = self._vllm_config.parallel_config.rank
        path = self.settings.trace_path(rank, self._num_ranks)
        if path is not None and worker.tracer is not None:
            _LOG.info("timeline written to %s", worker.tracer.export(path))

    # Scheduler side ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool whose blocks are held while they are copied.

        Raises:
            RequestError: It is not the pool of a vLLM that this works with.
        """
        if self.scheduler is not None:
            check_pool(gpu_block_pool)
            self.scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the host sizes of all ranks."""
        if self.scheduler is not None:
            self.scheduler.ranks_have(
                each.num_host_blocks
                for each in metadata.values()
                if isinstance(each, OffloadHandshake)
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what the host has beyond the device, and whether that is loaded before the request is scheduled."""
        return self._deciding.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take a request that got its blocks."""
        self._deciding.admitted(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the step moves."""
        return OffloadMetadata(
            self._deciding.plan(
                scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
            )
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the ranks say."""
        said = connector_output.kv_connector_worker_meta
        outcomes = said.outcomes if isinstance(said, OffloadWorkerMetadata) else Outcomes()
        bad = connector_output.invalid_block_ids
        if outcomes or bad:
            self._deciding.heard(outcomes, bad_blocks=bad)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let its blocks go: those that are being copied have holds of their own, until the copies end."""
        self._deciding.finished(request.request_id)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a copy frees a block, so that nobody is preempted for it."""
        return self.scheduler is not None and self.scheduler.frees_blocks

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping, to hear that copies have ended."""
        return self.scheduler is not None and self.scheduler.busy

    def reset_cache(self) -> bool | None:
        """Forget what the host has."""
        if self.scheduler is not None:
            self.scheduler.clear()
        return True

    @property
    def _deciding(self) -> SchedulerSide:
        if self.scheduler is None:
            raise RequestError(
                "a worker's connector was asked what only the scheduler's decides: it was made with "
                "KVConnectorRole.WORKER"
            )
        return self.scheduler

    # Both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the numbers since the last call."""
        if self.worker is not None:
            return OffloadStats.of_worker(self.worker.take())
        if self.scheduler is None or not self.scheduler.ready:
            return None
        tally, evictions = self.scheduler.take()
        index = self.scheduler.planner.index
        return OffloadStats.of_scheduler(
            tally, evictions=evictions, num_used=index.num_used, num_blocks=index.num_pages
        )

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return the numbers that another process has sent."""
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the Prometheus metrics, `vllm:offload_*`."""
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether loads run under forwards: a full graph would swallow the wait for each layer.

        Where all of them run ahead of their requests, there is none, and a store that no layer has started
        starts at the end of its step.
        """
        return extra_config.get("async_load_tokens") != 0

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout that the user wants, or None: any order of strides is adopted."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        return Settings.read(extra).kv_cache_layout
