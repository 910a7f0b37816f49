"""What is used of vLLM beyond its documented doors, in one list, looked at once when an engine starts."""

from __future__ import annotations

from offload.integrations.vllm.probe import (
    missing_call,
    missing_fields,
    missing_names,
    missing_of_pool,
    missing_writes,
    unknown_hooks,
)
from offload.integrations.vllm.versions import needed, refused, warn_if_untested

with needed():
    from vllm.config import CompilationConfig, KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def check_connector(connector: type) -> None:
    """Refuse a vLLM that would not call a hook of the connector, or lacks what both of its sides read.

    Raises:
        RequestError: Says what is missing, and which vLLM has it.
    """
    _raise(
        [
            *unknown_hooks(connector, KVConnectorBase_V1),
            *missing_names(VllmConfig, ("max_concurrent_batches", "compilation_config")),
            *missing_names(CompilationConfig, ("static_forward_context",)),
            *missing_names(KVTransferConfig, ("kv_role", "kv_load_failure_policy")),
            *missing_names(ParallelConfig, ("world_size", "local_world_size", "rank")),
            *missing_names(KVCacheConfig, ("num_blocks", "kv_cache_groups", "hash_block_size")),
            *missing_names(KVCacheGroupSpec, ("layer_names", "kv_cache_spec")),
            *missing_names(UniformTypeKVCacheSpecs, ("kv_cache_specs",)),
            *missing_names(
                AttentionSpec,
                (
                    "block_size",
                    "num_heads",
                    "num_states",
                    "state_content_size_bytes",
                    "page_size_bytes",
                ),
            ),
            *missing_names(SchedulerOutput, ("num_scheduled_tokens", "kv_connector_block_state")),
            *missing_call(KVConnectorBlockState, "get_block_ids", "req_id"),
            *missing_names(KVConnectorOutput, ("kv_connector_worker_meta", "invalid_block_ids")),
            *missing_names(
                Request, ("request_id", "block_hashes", "num_tokens", "num_prompt_tokens")
            ),
            *missing_writes(Request, ("num_computed_tokens",)),
            *missing_fields(KVConnectorStats, ("data",)),
            *missing_names(KVConnectorPromMetrics, ("_counter_cls", "_gauge_cls")),
        ]
    )


def check_pool(pool: object) -> None:
    """Refuse a block pool whose users cannot be counted, or whose prefix cache cannot be told to forget.

    Raises:
        RequestError: Says what is missing, and which vLLM has it.
    """
    _raise(missing_of_pool(pool))


def _raise(lacking: list[str]) -> None:
    if lacking:
        raise refused(lacking)
    warn_if_untested()
