"""What sessions do not carry or do: a typed error that says why, before anything is written."""

from __future__ import annotations

import copy
from typing import Any

import anyio
import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

import offload
from offload.integrations.transformers import (
    Session,
    SessionPools,
    Sessions,
    kept_by,
    session_pools,
)
from offload.integrations.transformers.plan import plans
from tests.integrations.tiny import (
    PAGE_SIZE,
    VOCABULARY,
    WINDOW,
    Rig,
    common,
    forward,
    generate,
    ids,
    kept,
    model,
    rig,
)
from tests.integrations.turns import PREFIX, continued, expected, same_bits

# Models -------------------------------------------------------------------------------------------------


_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "t5": (
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
        ),
        "encoder-decoder",
    ),
    "bart": (transformers.BartConfig(**_BART), "encoder-decoder"),
    "bert": (
        transformers.BertConfig(
            **_SMALL,
            num_attention_heads=4,
            intermediate_size=32,
            is_decoder=True,
            add_cross_attention=True,
        ),
        "cross-attention",
    ),
    "rwkv": (
        transformers.RwkvConfig(**_SMALL, attention_hidden_size=32),
        "takes none of past_key_values, cache_params",
    ),
    "xlstm": (
        transformers.xLSTMConfig(**_SMALL, num_blocks=2, num_heads=4),
        "does not run with a DynamicCache",
    ),
    "minimax": (
        transformers.MiniMaxConfig(
            **common(),
            layer_types=["linear_attention", "full_attention"] * 2,
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=8,
        ),
        "does not run with a DynamicCache",
    ),
    "recurrent_gemma": (
        transformers.RecurrentGemmaConfig(
            **common("head_dim"), lru_width=32, attention_window_size=WINDOW
        ),
        "leaves part of its cache empty",
    ),
    "deepseek_v4": (transformers.DeepseekV4Config(**common()), "which this cache does not know"),
}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of the config, decoder or not."""
    decoder, both = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    factory = both if config.is_encoder_decoder else decoder
    made: PreTrainedModel = factory.from_config(config)  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_carried_is_refused(name: str) -> None:
    """Cross attention, caches of a model's own, and unknown layers are refused before a pool exists."""
    config, why = REFUSED[name]
    with pytest.raises(offload.GeometryError, match=why):
        session_pools(random_model(config), num_pages=8, num_host_pages=8)


def test_a_layer_of_another_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of a known cache layer may keep more: it is not taken for the known one."""

    class Other(transformers.cache_utils.DynamicLayer):  # type: ignore[no-untyped-call]
        pass

    mapping = transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    monkeypatch.setitem(mapping, "full_attention", Other)
    with pytest.raises(offload.GeometryError, match="layer 0 is of class Other"):
        kept_by(model("llama", torch.float32))


# Pools ------------------------------------------------------------------------------------------------------


def test_a_number_that_is_missing_is_named() -> None:
    """Each sort of member asks for its own numbers."""
    with pytest.raises(offload.GeometryError, match=r"keeps 'kv'.*num_host_pages.*at least 1"):
        session_pools(model("llama", torch.float32), num_pages=8)
    with pytest.raises(offload.GeometryError, match=r"keeps 'state'.*num_slots.*at least 1"):
        session_pools(model("jamba", torch.float32), num_pages=8, num_host_pages=8)


def test_pools_are_made_for_what_the_model_keeps() -> None:
    """Each member has the layers, sizes and dtypes of the model; the group's layers are the model's."""
    pools = session_pools(
        model("nemotron_h", torch.bfloat16),
        page_size=8,
        num_pages=5,
        num_host_pages=7,
        num_slots=2,
        num_host_slots=3,
        layout="layer_first",
    )
    kv, state = pools.members
    assert (kv.pool_layers, state.pool_layers) == ((None, None, 0, None), (0, None, None, 1))
    assert pools.holes == {1}
    assert (kv.device.num_pages, kv.host.num_pages) == (5, 7)
    assert (state.device.num_pages, state.host.num_pages) == (2, 3)
    assert kv.host.geometry.label == "layer_first"
    dtypes = {part.name: part.dtype for part in state.device.spec.components}
    assert dtypes == {"conv_0": torch.bfloat16, "recurrent_0": torch.float32}
    assert pools.page_bytes == kv.device.spec.page_bytes
    assert pools.slot_bytes == state.device.spec.page_bytes


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "llama": {"kv": "mha"},
        "gemma4": {"kv": "mha", "kv_2": "mha"},
        "deepseek_v3": {"kv": "mla"},
        "deepseek_v32": {"kv": "mla", "indexer": "rows"},
        "mamba2": {"state": "state"},
        "falcon_h1": {"kv": "mha", "state": "state"},
    }.items(),
)
def test_each_sort_of_layer_has_its_kind_of_pool(name: str, kinds: dict[str, str]) -> None:
    """K and V, a latent, an index, a state: each is a member of its own kind, the anchor first."""
    members = plans(kept(name, torch.float32), PAGE_SIZE)
    assert {member: plan.spec.kind for member, plan in members.items()} == kinds


def test_pools_of_another_model_are_refused() -> None:
    """Members are compared with what the model keeps, all differences at once."""
    other = kept("deepseek_v3", torch.float32)
    device = offload.DevicePool.allocate(plans(other, PAGE_SIZE)["kv"].spec, num_pages=4)
    host = offload.HostPool.like(device, num_pages=4)
    with pytest.raises(offload.GeometryError, match="the pools of jamba") as caught:
        SessionPools(kept("jamba", torch.float32), kv=(device, host))
    assert set(caught.value.got) == {"kv", "state"}


def test_a_pool_whose_pages_cannot_be_one_view_is_refused() -> None:
    """A pool with heads before tokens has no strides for a session's slots, and says so."""
    keeps = kept("llama", torch.float32)
    spec = plans(keeps, PAGE_SIZE)["kv"].spec
    tensors = {name: [torch.zeros(4, 2, PAGE_SIZE, 8) for _ in range(4)] for name in "kv"}
    device = offload.DevicePool.adopt(spec, tensors, axes="p h t d")
    with pytest.raises(offload.GeometryError, match="one stride"):
        SessionPools(keeps, kv=(device, offload.HostPool.like(device, num_pages=4)))


def test_pools_may_be_adopted() -> None:
    """Sessions live as well on tensors that someone else owns: all layers in one, heads not split."""
    keeps = kept("llama", torch.float32)
    spec = plans(keeps, PAGE_SIZE)["kv"].spec
    tensors = {name: torch.zeros(4, 20 * PAGE_SIZE, 2, 8) for name in "kv"}
    device = offload.DevicePool.adopt(spec, tensors)
    pools = SessionPools(keeps, kv=(device, offload.HostPool.like(device, num_pages=20)))

    async def body() -> None:
        async with offload.open_scheduler(pools) as scheduler:
            r = Rig(model("llama", torch.float32), pools, Sessions(scheduler))
            session = r.sessions.open(max_tokens=40)
            await r.use(session, ids(PREFIX, seed=1))
            await session.evict()
            r.poison_devices()
            assert same_bits(await continued(r, session), expected("llama", torch.float32))

    anyio.run(body)


def test_a_scheduler_over_other_pools_is_refused() -> None:
    """Sessions live on the pools that were made for their model."""

    async def body() -> None:
        spec = plans(kept("llama", torch.float32), PAGE_SIZE)["kv"].spec
        device = offload.DevicePool.allocate(spec, num_pages=4)
        host = offload.HostPool.like(device, num_pages=4)
        async with offload.open_scheduler(device, host) as scheduler:
            with pytest.raises(offload.RequestError, match="session_pools"):
                Sessions(scheduler)

    anyio.run(body)


# Calls ------------------------------------------------------------------------------------------------------


def refusal(r: Rig, session: Session, what: str) -> None:
    """Do something that a session's cache does not do."""
    cache = session.cache
    if what == "room":
        forward(r.model, cache, ids(30, seed=1))
    elif what == "beams":
        generate(r.model, cache, ids(3, seed=1), 2, num_beams=2)
    elif what == "batch":
        forward(r.model, cache, ids(3, seed=1).expand(2, 3))
    elif what == "dtype":
        forward(model("llama", torch.bfloat16), cache, ids(3, seed=1))
    elif what == "reorder":
        cache.reorder_cache(torch.LongTensor([0]))
    elif what == "repeat":
        cache.batch_repeat_interleave(2)
    elif what == "select":
        cache.batch_select_indices(torch.tensor([0]))
    elif what == "copy":
        copy.deepcopy(cache)
    elif what == "crop":
        cache.crop(3)


@pytest.mark.parametrize(
    "what",
    ["room", "beams", "batch", "dtype", "reorder", "repeat", "select", "copy", "crop"],
)
def test_what_a_session_cannot_do_raises_and_writes_nothing(what: str) -> None:
    """Too many tokens, beams, batches, another dtype, copies: a typed error, and no byte has changed."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=20)
            before = [r.device.view("k", layer).clone() for layer in range(4)]
            with session.use(), pytest.raises(offload.OffloadError) as caught:
                refusal(r, session, what)
            assert isinstance(caught.value, ValueError)
            assert session.tokens == 0
            assert all(torch.equal(r.device.view("k", i), b) for i, b in enumerate(before))

    anyio.run(body)
