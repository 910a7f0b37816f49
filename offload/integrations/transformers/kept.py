"""What a transformers model keeps of the tokens it has seen, layer by layer.

Nothing is derived from the fields of a config. One token runs through the model behind transformers' own
`DynamicCache`, and what that cache holds afterwards, shapes and dtypes, is what a session has to carry. A
model that keeps anything else is refused here, before a pool exists.
"""

from __future__ import annotations

import inspect

import attrs
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from offload import GeometryError

KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""transformers' cache layers that are carried. Exactly these: a subclass may keep more."""

CARRIED = "a decoder whose layers keep keys and values, indexer keys, conv or recurrent states"
CACHE_NAMES = ("past_key_values", "cache_params")
"""What the cache is called among the arguments of a forward."""


@attrs.frozen
class Attention:
    """Keys and values of every token."""

    num_heads: int
    key_dim: int
    """Elements of one head of K; for MLA, of the compressed latent without the rope part."""

    value_dim: int
    """Elements of one head of V; for MLA, of the rope part, which transformers caches as V."""

    dtype: torch.dtype
    latent: bool
    """Whether K and V are the two parts of one MLA latent."""


@attrs.frozen
class Indexer:
    """Keys of a sparse-attention index, one of every token."""

    dim: int
    dtype: torch.dtype


@attrs.frozen
class StatePart:
    """One tensor of a layer's state."""

    role: str
    """`conv` or `recurrent`, as transformers calls them."""

    number: int
    """Which one of this role; nearly all layers have one."""

    shape: tuple[int, ...]
    """Without the batch."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name as a component of a pool."""
        return f"{self.role}_{self.number}"


@attrs.frozen
class KeptLayer:
    """One layer of the model; all None where it keeps nothing (no attention, or another layer's KV)."""

    attention: Attention | None = None
    window: int | None = None
    """Tokens that a query sees, itself included; None when it sees all."""

    indexer: Indexer | None = None
    state: tuple[StatePart, ...] | None = None
    """Of fixed size, whatever the number of tokens; every forward writes over it."""


@attrs.frozen
class Kept:
    """What every layer of a model keeps, and where."""

    model_type: str
    device: torch.device
    layers: tuple[KeptLayer, ...]

    @property
    def keeping(self) -> tuple[int, ...]:
        """Layers that keep something, in the order in which a forward comes to them."""
        return tuple(i for i, layer in enumerate(self.layers) if layer != KeptLayer())

    @property
    def last_attention(self) -> int | None:
        """The last layer that keeps something of every token; None for a model of states alone."""
        found = [i for i, layer in enumerate(self.layers) if layer.attention is not None]
        return found[-1] if found else None

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, which cannot be cut back to fewer tokens."""
        return any(layer.state is not None for layer in self.layers)


def kept_by(model: PreTrainedModel) -> Kept:
    """Return what a model keeps. Runs one token through it, with transformers' own cache.

    Raises:
        GeometryError: Something that pages and slots cannot carry. Says which layer, and what.
    """
    config = model.config
    _refuse_whole_models(config)
    stock = _stock_cache(config)
    for index, layer in enumerate(stock.layers):
        if type(layer) not in (*KNOWN, DummyLayer):
            got = f"of class {type(layer).__name__}, which this cache does not know"
            raise _refusal(config, f"layer {index}", got)
    _run_one_token(model, stock)
    latent = [_is_latent(each) for each in config.get_text_config(decoder=True).per_layer_config]
    layers = [
        KeptLayer() if type(layer) is DummyLayer else _kept(config, index, layer, latent[index])
        for index, layer in enumerate(stock.layers)
    ]
    kept = Kept(_name(config), _device(config, stock), tuple(layers))
    if not kept.keeping:
        raise _refusal(config, "the model", "no layer that keeps anything")
    return kept


def _refuse_whole_models(config: PreTrainedConfig) -> None:
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise _refusal(config, "the model", "an encoder-decoder, which caches cross attention too")
    if getattr(decoder, "add_cross_attention", False) or getattr(
        decoder, "cross_attention_layers", None
    ):
        raise _refusal(config, "the model", "one with cross-attention layers")


def _stock_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return the cache that transformers would make for this model."""
    try:
        return DynamicCache(config=config)
    except (AttributeError, KeyError, ValueError) as error:
        got = f"not one that DynamicCache can be built for ({type(error).__name__}: {error})"
        raise _refusal(config, "the model", got) from error


def _run_one_token(model: PreTrainedModel, cache: DynamicCache) -> None:
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in taken), None)
    if name is None:
        got = f"one whose forward takes none of {', '.join(CACHE_NAMES)}"
        raise _refusal(model.config, "the model", got)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(ids, use_cache=True, **{name: cache})
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        got = f"one that does not run with a DynamicCache ({type(error).__name__}: {error})"
        raise _refusal(model.config, "the model", got) from error


def _kept(config: PreTrainedConfig, index: int, layer: object, latent: bool) -> KeptLayer:
    """Return what one of transformers' layers holds after a forward."""
    kept = KeptLayer()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        kept = attrs.evolve(
            kept,
            attention=_attention(config, index, layer, latent),
            window=layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None,
        )
    if isinstance(layer, DynamicIndexedLayer):
        kept = attrs.evolve(kept, indexer=_indexer(config, index, layer))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kept = attrs.evolve(kept, state=_state(layer) or None)
    whole = (
        kept.attention is not None or not isinstance(layer, DynamicLayer),
        kept.state is not None or not isinstance(layer, LinearAttentionCacheLayerMixin),
    )
    if not all(whole):
        got = "one that leaves part of its cache empty: what it keeps is elsewhere"
        raise _refusal(config, f"layer {index}", got)
    return kept


def _attention(
    config: PreTrainedConfig, index: int, layer: DynamicLayer, latent: bool
) -> Attention:
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    if (values.shape[1], values.dtype) != (heads, keys.dtype):
        got = f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of {values.dtype}"
        raise _refusal(config, f"layer {index}", got)
    # A latent is told from one shared head by the config: their shapes can be the same.
    return Attention(heads, key_dim, value_dim, keys.dtype, latent and heads == 1)


def _indexer(config: PreTrainedConfig, index: int, layer: DynamicIndexedLayer) -> Indexer | None:
    if layer.indexer_position_ids is not None:
        raise _refusal(config, f"layer {index}", "an index that caches positions beside its keys")
    keys = layer.indexer_keys
    return None if keys is None else Indexer(keys.shape[2], keys.dtype)


def _state(layer: LinearAttentionCacheLayerMixin) -> tuple[StatePart, ...]:
    return tuple(
        StatePart(role, number, tuple(state.shape[1:]), state.dtype)
        for role, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for number, state in states.items()
        if state is not None
    )


def _device(config: PreTrainedConfig, stock: DynamicCache) -> torch.device:
    found = {
        tensor.device
        for layer in stock.layers
        for tensor in (getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values())
        if tensor is not None
    }
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise _refusal(config, "the model", f"one spread over several devices: {names}")
    return found.pop() if found else torch.device("cpu")


def _is_latent(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "kv_lora_rank", None))


def _name(config: PreTrainedConfig) -> str:
    return config.model_type or type(config).__name__


def _refusal(config: PreTrainedConfig, what: str, got: str) -> GeometryError:
    return GeometryError(
        f"the cache of {_name(config)}", expected={what: f"part of {CARRIED}"}, got={what: got}
    )
