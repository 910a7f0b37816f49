"""Tiny random models built from config, pools around them, and one rig to run both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, cast

import anyio.to_thread
import attrs
import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cache,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DynamicCache,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
    Zamba2Config,
)

import offload
from offload.driver.base import Driver
from offload.integrations.transformers import (
    Kept,
    Session,
    SessionPools,
    Sessions,
    kept_by,
    session_pools,
)

# Reference kernels are what runs here; the advice to install others is not of interest.
transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

VOCABULARY = 97
PAGE_SIZE = 4
WINDOW = 16
NUM_SLOTS = 4


def common(*without: str, **changes: Any) -> dict[str, Any]:
    """Return what nearly all configs have in common."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return {name: value for name, value in fields.items() if name not in without} | changes


_MLA: dict[str, Any] = common(
    "head_dim",
    num_key_value_heads=4,
    moe_intermediate_size=16,
    kv_lora_rank=12,
    q_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)

# Layer types: sliding everywhere but in every second layer, so that both kinds stand side by side.
_SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**common()),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=96,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen3": Qwen3Config(**common()),
    "gemma3": Gemma3TextConfig(**common(), **_SLIDING, query_pre_attn_scalar=8),
    # Heads of two widths. The wider one, of full attention, is not among the typed fields.
    "gemma4": Gemma4TextConfig(  # type: ignore[call-arg]
        **common(),
        **_SLIDING,
        global_head_dim=16,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "deepseek_v2": DeepseekV2Config(**_MLA),
    "deepseek_v3": DeepseekV3Config(**_MLA),
    "deepseek_v32": DeepseekV32Config(**_MLA, index_n_heads=2, index_head_dim=8, index_topk=8),
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "jamba": JambaConfig(
        **common("head_dim"),
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
    ),
    "bamba": BambaConfig(
        **common("head_dim"), **_MAMBA, attn_layer_indices=[1, 3], mamba_chunk_size=8
    ),
    # Attention and a state in every layer.
    "falcon_h1": FalconH1Config(
        **common(), **_MAMBA, mamba_d_ssm=64, mamba_n_groups=1, mamba_chunk_size=8
    ),
    # Attention and a state in every second layer, a state alone in the others.
    "zamba2": Zamba2Config(
        **common("head_dim", num_key_value_heads=4),
        layers_block_type=["mamba", "hybrid"] * 2,
        n_mamba_heads=8,
        mamba_d_state=4,
        mamba_ngroups=1,
        chunk_size=8,
    ),
    "qwen3_next": Qwen3NextConfig(
        **common(),
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    # A layer that keeps nothing, and a state behind the last attention layer.
    "nemotron_h": NemotronHConfig(
        **common("num_hidden_layers"),
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=8,
    ),
    "lfm2": Lfm2Config(
        **common("head_dim"), layer_types=["conv", "full_attention"] * 2, block_multiple_of=16
    ),
}

ATTENTION = (
    "llama",
    "gpt2",
    "qwen3",
    "gemma3",
    "gemma4",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
)
"""Models that keep nothing but tokens, and can be cropped."""

STATES = tuple(name for name in CONFIGS if name not in ATTENTION)
"""Models that keep states, in some layers or in all."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@cache
def model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the random model of a config; the same weights each time."""
    torch.manual_seed(7)
    # The factory ships no types.
    config = CONFIGS[name]
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    made.train(False)
    made.generation_config.pad_token_id = 0
    return made


@cache
def kept(name: str, dtype: torch.dtype) -> Kept:
    """Return what the random model of a config keeps."""
    return kept_by(model(name, dtype))


def ids(count: int, seed: int) -> torch.Tensor:
    """Return random token ids, [1, count]."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def poison(pool: offload.DevicePool | offload.HostPool, pages: slice = slice(None)) -> None:
    """Overwrite pages of a pool with ones in every bit: NaN in every float dtype."""
    for layer in range(pool.num_layers):
        for component in pool.spec.components:
            view = pool.view(component.name, layer)
            view[pages].fill_(255 if view.dtype is torch.uint8 else -1)


@attrs.define(eq=False)
class Rig:
    """A model, its sessions, and its pools: the host's free pages are every second one, out of order."""

    model: PreTrainedModel
    pools: SessionPools
    sessions: Sessions

    @property
    def device(self) -> offload.DevicePool:
        """The anchor's."""
        return self.pools.anchor.device

    @property
    def host(self) -> offload.HostPool:
        """The anchor's."""
        return self.pools.anchor.host

    def poison_devices(self) -> None:
        """Overwrite all device memory."""
        for member in self.pools.members:
            poison(member.device)

    async def logits(self, cache: Cache, chunk: torch.Tensor) -> torch.Tensor:
        """Run a chunk in a worker thread."""
        return await anyio.to_thread.run_sync(partial(forward, self.model, cache, chunk))

    async def use(self, session: Session, chunk: torch.Tensor) -> torch.Tensor:
        """Run a chunk behind a session's cache."""
        with session.use() as cache:
            return await self.logits(cache, chunk)

    async def generated(self, session: Session, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """Return `generate()`'s tokens behind a session's cache."""
        with session.use() as cache:
            work = partial(generate, self.model, cache, prompt, count)
            return await anyio.to_thread.run_sync(work)

    def stock(self) -> DynamicCache:
        """Return transformers' own cache."""
        return DynamicCache(config=self.model.config)


def _named(model: PreTrainedModel, cache: Cache | None) -> dict[str, Cache | None]:
    """Return the cache under the name that the model's forward has for it."""
    return {"cache_params" if model.config.model_type == "mamba2" else "past_key_values": cache}


def forward(model: PreTrainedModel, cache: Cache, chunk: torch.Tensor) -> torch.Tensor:
    """Return the logits of a chunk."""
    with torch.inference_mode():
        logits: torch.Tensor = model(chunk, use_cache=True, **_named(model, cache)).logits
        return logits


def generate(
    model: PreTrainedModel,
    cache: Cache | None,
    prompt: torch.Tensor,
    count: int,
    *,
    num_beams: int = 1,
    guesses: int | None = None,
) -> torch.Tensor:
    """Return greedy tokens, the prompt included.

    Args:
        guesses: Tokens to guess from the prompt at each step; wrong ones are cropped again.
    """
    with torch.inference_mode():
        # Typed as a module's attribute, which could be a tensor.
        run = cast("Callable[..., torch.Tensor]", model.generate)
        tokens = run(
            prompt,
            max_new_tokens=count,
            do_sample=False,
            num_beams=num_beams,
            prompt_lookup_num_tokens=guesses,
            **_named(model, cache),
        )
        return tokens


def made_pools(
    made: PreTrainedModel, *, num_pages: int = 40, num_slots: int = NUM_SLOTS
) -> SessionPools:
    """Return poisoned pools of a model whose free host pages are scattered."""
    pools = session_pools(
        made,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_host_pages=64,
        num_slots=num_slots,
        num_host_slots=4 * NUM_SLOTS,
    )
    for member in pools.members:
        poison(member.device)
        poison(member.host)
        if member is pools.anchor or member.rule == "own":
            scatter(member.host)
    return pools


@asynccontextmanager
async def rig(
    name: str,
    dtype: torch.dtype,
    *,
    driver: Driver | None = None,
    num_pages: int = 40,
    num_slots: int = NUM_SLOTS,
) -> AsyncIterator[Rig]:
    """Open a scheduler over poisoned pools. Enter it in the test's body."""
    made = model(name, dtype)
    pools = made_pools(made, num_pages=num_pages, num_slots=num_slots)
    async with offload.open_scheduler(pools, driver=driver) as scheduler:
        yield Rig(made, pools, Sessions(scheduler))


def scatter(pool: offload.HostPool) -> None:
    """Leave only every second page free, given back in random order."""
    pages = pool.pages.alloc(pool.num_pages)
    for page in np.random.default_rng(3).permutation(pages[::2]):
        pool.pages.free([page])
