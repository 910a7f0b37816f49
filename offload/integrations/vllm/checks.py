"""What this connector cannot carry, refused before serving starts: one error each, saying what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload import RequestError
from offload.integrations.vllm.adopt import Block
from offload.integrations.vllm.settings import Settings
from offload.integrations.vllm.versions import needed

with needed():
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_NO_DRAFT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculative methods whose drafts leave nothing in the KV cache."""


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Settings:
    """Return the settings, if this model and configuration can be carried.

    Raises:
        RequestError: They cannot. Says what to set.
        UnknownNameError: A key of `kv_connector_extra_config` is unknown.
    """
    transfer = vllm_config.kv_transfer_config
    settings = Settings.read(transfer.kv_connector_extra_config or {})
    if transfer.kv_role != "kv_both":
        raise RequestError(
            f"OffloadConnector has kv_role={transfer.kv_role!r}, and it stores and loads for one engine. "
            "Set kv_role='kv_both'."
        )
    _check_failures(vllm_config, settings)
    _check_prefixes(vllm_config)
    _check_parallel(vllm_config)
    _check_drafts(vllm_config)
    _check_groups(kv_cache_config)
    _check_windows(vllm_config, kv_cache_config)
    return settings


def layer_blocks(kv_cache_config: KVCacheConfig) -> dict[str, Block]:
    """Return what a block of each layer is, as vLLM specifies it."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = dict(spec.kv_cache_specs)
    else:
        specs = dict.fromkeys(group.layer_names, spec)
    return {
        name: Block(
            each.num_heads, each.num_states, each.state_content_size_bytes, each.page_size_bytes
        )
        for name, each in specs.items()
    }


def _check_failures(vllm_config: VllmConfig, settings: Settings) -> None:
    """Refuse to compute again what was not loaded where vLLM plans a step before it has heard of the last one: it
    keeps the token that such a step has computed over the missing blocks. A request whose load runs ahead of it is
    in no step before that load is over.
    """
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return
    if settings.async_load_tokens == 0:
        return
    if vllm_config.max_concurrent_batches > 1:
        raise RequestError(
            f"OffloadConnector has kv_load_failure_policy='recompute', and vLLM plans "
            f"{vllm_config.max_concurrent_batches} steps at once: of a request whose load broke it would keep tokens "
            "that were computed over the missing blocks. Set async_load_tokens=0, which loads before a request is "
            "scheduled; or --no-async-scheduling, and no pipeline parallelism; or kv_load_failure_policy='fail', which "
            "ends such a request with an error."
        )


def _check_prefixes(vllm_config: VllmConfig) -> None:
    """Refuse where vLLM computes prompts whole: such attention reads nothing that was cached before."""
    if (
        not vllm_config.cache_config.enable_prefix_caching
        and not vllm_config.scheduler_config.enable_chunked_prefill
    ):
        raise RequestError(
            "OffloadConnector brings back prefixes, and vLLM runs this model with neither prefix caching nor "
            "chunked prefill: its attention would not read what was loaded. Set --enable-prefix-caching or "
            "--enable-chunked-prefill; where vLLM turns both off by itself, as for latent attention on a CPU, "
            "leave out the connector."
        )
    model = vllm_config.model_config
    if model is not None and getattr(model, "enable_sleep_mode", False):
        raise RequestError(
            "OffloadConnector does not carry sleep mode: sleep gives up the KV caches while copies of them are "
            "under way. Leave out --enable-sleep-mode."
        )


def _check_parallel(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise RequestError(
                f"OffloadConnector does not carry context parallelism, and {name} is {size}: a block's "
                f"tokens lie on several ranks. Leave out {flag}, or use tensor parallelism."
            )
    if getattr(parallel, "enable_dbo", False):
        raise RequestError(
            "OffloadConnector does not carry dual batch overlap: two threads write a layer in turns, and a "
            "store would start after the first. Leave out --enable-dbo."
        )


def _check_drafts(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _NO_DRAFT_KV:
        raise RequestError(
            f"OffloadConnector does not carry speculative decoding by {speculative.method!r}: the draft's KV "
            "of a block depends on the token after it. Use method 'ngram', or leave out "
            "--speculative-config."
        )


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse several groups of caches: vLLM takes block ids that were not loaded only where there is one, and a
    load under the forward that reads it has no other way to say that it broke.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise RequestError(
            f"OffloadConnector carries one group of KV caches, and this model has {len(groups)} "
            f"({kinds}). Set --disable-hybrid-kv-cache-manager, which keeps sliding-window layers whole; "
            "models with recurrent layers need it on, and cannot be offloaded."
        )
    hashed, block = kv_cache_config.hash_block_size, groups[0].kv_cache_spec.block_size
    if hashed not in (None, block):
        raise RequestError(
            f"OffloadConnector needs one hash per block, and a block has {block} tokens and a hash {hashed}. "
            "Leave out --prefix-match-unit."
        )
    for spec in _layer_specs(groups[0].kv_cache_spec):
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
            raise RequestError(
                f"OffloadConnector carries full, sliding-window and latent attention, and this model's KV "
                f"cache is of class {type(spec).__name__}. Leave out the connector for this model."
            )


def _check_windows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse to compute again what was not loaded behind a window: vLLM has given up the blocks that the first of
    these tokens look back at, and goes on without them.
    """
    (group,) = kv_cache_config.kv_cache_groups
    windows = any(isinstance(s, SlidingWindowSpec) for s in _layer_specs(group.kv_cache_spec))
    if windows and vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute":
        raise RequestError(
            "OffloadConnector has kv_load_failure_policy='recompute', and all layers of this model have a sliding "
            "window: vLLM would compute blocks again without those that they look back at. Set "
            "kv_load_failure_policy='fail', which ends such a request with an error."
        )


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]
