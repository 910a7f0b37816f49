"""Tiny models in a folder, as vLLM wants them: built from config, with random weights of an ordinary scale.

vLLM's own `load_format="dummy"` has weights of a thousandth: attention then hardly depends on what is cached, and
corrupted pages go unnoticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

VOCABULARY = 512
LAYERS = 4
HEADS = 2
HEAD_DIM = 32
"""The smallest that vLLM's attention on the CPU takes."""

MAX_TOKENS = 1024
WINDOW = 64
"""Tokens that a sliding-window layer looks back."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON),
    "mistral": MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **_COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_DIM,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    ),
    # 512 + 64 is the only width of a latent row that vLLM takes.
    "deepseek_v2": DeepseekV2Config(
        **{key: value for key, value in _COMMON.items() if key != "head_dim"}
        | {"num_key_value_heads": 4},
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=LAYERS,
    ),
}


def save(name: str, folder: Path, *, layers: int = LAYERS) -> Path:
    """Write the model's config and random weights; the same weights each time."""
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict() | {"num_hidden_layers": layers})
    torch.manual_seed(7)
    # The factory ships no types.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def prompt(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
