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
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DeepseekV3Config,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

import offload
from offload.driver.base import Driver
from offload.integrations.transformers import Session, Sessions, pool_spec

VOCABULARY = 97
PAGE_SIZE = 4
WINDOW = 16

_COMMON: dict[str, Any] = {
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

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON),
    # Layer types: sliding everywhere but in every second layer, so that both kinds stand side by side.
    "gemma3": Gemma3TextConfig(
        **_COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "deepseek_v3": DeepseekV3Config(
        **{key: value for key, value in _COMMON.items() if key != "head_dim"}
        | {"num_key_value_heads": 4},
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
    ),
}

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


def ids(count: int, seed: int) -> torch.Tensor:
    """Return random token ids, [1, count]."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def poison(pool: offload.DevicePool | offload.HostPool, pages: slice = slice(None)) -> None:
    """Overwrite pages of a pool with ones in every bit: NaN in every float dtype."""
    for layer in range(pool.num_layers):
        for component in pool.spec.components:
            pool.view(component.name, layer)[pages].fill_(-1)


@attrs.define(eq=False)
class Rig:
    """A model, its sessions, and its pools: the host's free pages are every second one, out of order."""

    model: PreTrainedModel
    device: offload.DevicePool
    host: offload.HostPool
    sessions: Sessions

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


def forward(model: PreTrainedModel, cache: Cache, chunk: torch.Tensor) -> torch.Tensor:
    """Return the logits of a chunk."""
    with torch.inference_mode():
        logits: torch.Tensor = model(chunk, past_key_values=cache).logits
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
            past_key_values=cache,
            max_new_tokens=count,
            do_sample=False,
            num_beams=num_beams,
            prompt_lookup_num_tokens=guesses,
        )
        return tokens


@asynccontextmanager
async def rig(
    name: str,
    dtype: torch.dtype,
    *,
    driver: Driver | None = None,
    layout: str = "page_first",
    num_pages: int = 40,
) -> AsyncIterator[Rig]:
    """Open a scheduler over poisoned pools. Enter it in the test's body."""
    made = model(name, dtype)
    spec = pool_spec(made.config, page_size=PAGE_SIZE, dtype=dtype)
    device = offload.DevicePool.allocate(spec, num_pages=num_pages)
    host = offload.HostPool.like(device, num_pages=64, layout=layout)
    poison(device)
    poison(host)
    scatter(host)
    async with offload.open_scheduler(device, host, driver=driver) as scheduler:
        sessions = Sessions(made.config, scheduler, device=device, host=host)
        yield Rig(made, device, host, sessions)


def scatter(pool: offload.HostPool) -> None:
    """Leave only every second page free, given back in random order."""
    pages = pool.pages.alloc(pool.num_pages)
    for page in np.random.default_rng(3).permutation(pages[::2]):
        pool.pages.free([page])
