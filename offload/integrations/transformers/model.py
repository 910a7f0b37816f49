"""What a transformers model caches: which layers, how wide, and the pool that fits.

The layer types are not guessed: a `DynamicCache` built from the config says what transformers itself
would keep for each layer. A layer that keeps anything but keys and values of tokens is refused here,
before a pool exists. Widths come from the config; the first `update` checks them against real tensors.
"""

from __future__ import annotations

import attrs
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from offload import GeometryError, PoolSpec, RequestError

CARRIED = "a decoder of full or sliding-window attention layers, all of the same width"


@attrs.frozen
class CachedLayer:
    """One layer of the model, as the cache sees it."""

    pool_layer: int | None
    """Its layer in the pool; None for a layer that caches nothing (KV shared, or no attention)."""

    window: int | None
    """Tokens that a query sees, itself included; None when it sees all."""


@attrs.frozen
class CachedShape:
    """What one token leaves in the cache of every layer."""

    layers: tuple[CachedLayer, ...]
    """One per layer of the model."""

    num_kv_heads: int
    key_dim: int
    """Elements of one head of K; for MLA, of the compressed latent without the rope part."""

    value_dim: int
    """Elements of one head of V; for MLA, of the rope part, which transformers caches as V."""

    latent: bool
    """Whether K and V are the two parts of one MLA latent."""

    @property
    def num_pool_layers(self) -> int:
        """Layers that the pool needs."""
        return sum(layer.pool_layer is not None for layer in self.layers)


def pool_spec(
    config: PreTrainedConfig, *, page_size: int = 16, dtype: torch.dtype | None = None
) -> PoolSpec:
    """Return the pool that holds the cache of this model.

    MLA models get a `mla` pool, because transformers caches their compressed latent and rope part;
    all others get a `mha` pool. Sliding-window layers keep all their tokens, so that a session can
    be cropped exactly.

    Args:
        page_size: Tokens per page.
        dtype: Of the cached tensors; None takes the config's.

    Raises:
        GeometryError: The model caches something else than keys and values of tokens, or its
            layers differ in width. Says which.
        RequestError: Neither the config nor the call names a dtype.
    """
    shape = cached_shape(config)
    dtype = dtype or _dtype(config)
    if shape.latent:
        return PoolSpec.mla(
            num_layers=shape.num_pool_layers,
            page_size=page_size,
            latent_dim=shape.key_dim + shape.value_dim,
            rope_dim=shape.value_dim,
            dtype=dtype,
        )
    return PoolSpec.mha(
        num_layers=shape.num_pool_layers,
        page_size=page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.key_dim,
        v_head_dim=None if shape.value_dim == shape.key_dim else shape.value_dim,
        dtype=dtype,
    )


def cached_shape(config: PreTrainedConfig) -> CachedShape:
    """Return what the model caches per token.

    Raises:
        GeometryError: Something that pages of keys and values cannot carry.
    """
    _refuse_whole_models(config)
    decoder = config.get_text_config(decoder=True)
    layers = _layers(config, _transformers_layers(config))
    _refuse_other_caches(config)
    widths = {
        index: _width(decoder.per_layer_config[index])
        for index, layer in enumerate(layers)
        if layer.pool_layer is not None
    }
    if not widths:
        raise _refusal(config, "the model", "no layer with a cache of keys and values")
    first, width = next(iter(widths.items()))
    for index, other in widths.items():
        if other != width:
            raise GeometryError(
                f"the cache of {_name(config)}",
                expected={f"(heads, K dim, V dim) of layer {index}": width},
                got={f"(heads, K dim, V dim) of layer {index}": other},
                remedy=f"One pool holds layers of one width; layer {first} set it.",
            )
    heads, key_dim, value_dim = width
    latent = _is_latent(decoder.per_layer_config[first])
    return CachedShape(tuple(layers), heads, key_dim, value_dim, latent)


def _refuse_whole_models(config: PreTrainedConfig) -> None:
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise _refusal(config, "the model", "an encoder-decoder, which caches cross attention too")
    if getattr(decoder, "add_cross_attention", False) or getattr(
        decoder, "cross_attention_layers", None
    ):
        raise _refusal(config, "the model", "one with cross-attention layers")


def _refuse_other_caches(config: PreTrainedConfig) -> None:
    """Refuse what looks like attention by its config, and keeps something of its own by its code."""
    # Both are private to transformers: a version without them leaves the check to the first `update`.
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    supports = getattr(model_class, "_supports_default_dynamic_cache", None)
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(config, "the model", "stateful: it keeps more than the K and V of tokens")
    if supports is not None and not supports():
        raise _refusal(config, "the model", "one with a cache class of its own")


def _transformers_layers(config: PreTrainedConfig) -> list[object]:
    """Return the layers that transformers would make for this model."""
    try:
        return list(DynamicCache(config=config).layers)
    except (AttributeError, KeyError, ValueError) as error:
        got = f"not one that DynamicCache can be built for ({type(error).__name__}: {error})"
        raise _refusal(config, "the model", got) from error


def _layers(config: PreTrainedConfig, stock: list[object]) -> list[CachedLayer]:
    layers: list[CachedLayer] = []
    taken = 0
    for index, layer in enumerate(stock):
        if type(layer) is DummyLayer:
            layers.append(CachedLayer(pool_layer=None, window=None))
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _refusal(config, f"layer {index}", _why_not(layer))
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        layers.append(CachedLayer(pool_layer=taken, window=window))
        taken += 1
    return layers


def _why_not(layer: object) -> str:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "linear attention or a state space, whose conv and recurrent states are not tokens"
    if isinstance(layer, DynamicIndexedLayer):
        return "sparse attention, which caches indexer keys beside K and V"
    return f"a {type(layer).__name__}, which this cache does not know"


def _is_latent(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "kv_lora_rank", None))


def _width(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return (kv heads, K dim, V dim) of one layer's cached tensors."""
    if _is_latent(config):
        return 1, int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return int(heads), int(head_dim), int(getattr(config, "v_head_dim", None) or head_dim)


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    for each in (config.get_text_config(decoder=True), config):
        if isinstance(each.dtype, torch.dtype):
            return each.dtype
    raise RequestError("the config names no dtype; pass dtype=model.dtype")


def _name(config: PreTrainedConfig) -> str:
    return config.model_type or type(config).__name__


def _refusal(config: PreTrainedConfig, what: str, got: str) -> GeometryError:
    return GeometryError(
        f"the cache of {_name(config)}", expected={what: f"part of {CARRIED}"}, got={what: got}
    )
