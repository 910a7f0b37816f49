"""What the second door uses of vLLM, looked at once when an engine starts."""

from __future__ import annotations

from offload.integrations.vllm.probe import missing_fields, missing_names, unknown_hooks
from offload.integrations.vllm.versions import needed, refused, warn_if_untested

with needed():
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
        OffloadingWorker,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def check_spec(spec: type, worker: type) -> None:
    """Refuse a vLLM that would call the spec or its worker in another way, or lacks what they read.

    Raises:
        RequestError: Says what is missing, and which vLLM has it.
    """
    lacking = [
        *unknown_hooks(spec, CPUOffloadingSpec),
        *unknown_hooks(worker, OffloadingWorker, own=("of",)),
        *missing_names(
            CPUOffloadingSpec,
            ("config", "extra_config", "num_chunks", "blocks_per_chunk", "kv_bytes_per_chunk"),
        ),
        *missing_names(OffloadingConfig, ("parallel", "canonical_layout")),
        *missing_names(CanonicalKVCaches, ("tensors", "group_data_refs")),
        *missing_names(CanonicalKVCacheTensor, ("tensor",)),
        *missing_names(CanonicalKVCacheRef, ("tensor_idx",)),
        *missing_names(GPULoadStoreSpec, ("block_ids", "block_indices")),
        *missing_names(CPULoadStoreSpec, ("block_ids",)),
        *missing_fields(TransferResult, ("job_id", "success", "transfer_size", "transfer_time")),
    ]
    if lacking:
        raise refused(lacking)
    warn_if_untested()
