"""vLLM brings a prompt's prefix back from host memory layer by layer, under the forward that needs it.

A tiny random Llama stands for the model.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib.util import find_spec

if not find_spec("vllm"):
    sys.exit("There is no vLLM here: run `make vllm` first, then this with .venv-vllm/bin/python.")
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, and ended by it
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

TRACE = "vllm.trace.json.gz"  # opens in https://ui.perfetto.dev
CONNECTOR = KVTransferConfig(
    kv_connector="OffloadConnector", kv_connector_module_path="offload.integrations.vllm", kv_role="kv_both",
    kv_load_failure_policy="recompute", kv_connector_extra_config={"host_gib": 0.25, "trace": TRACE},
)  # fmt: skip


def save_model(folder: str) -> None:
    """Write a Llama with random weights of an ordinary scale."""
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def main() -> None:
    """Ask the same three times without vLLM's own prefix cache; the last time, host memory has the prefix."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048, block_size=32,
                  dtype="float32", async_scheduling=False, kv_transfer_config=CONNECTOR)  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    prompt = {"prompt_token_ids": [i * 7 % 500 for i in range(1500)]}
    for which in ("computed", "computed again", "from host memory"):
        while not llm.reset_prefix_cache(reset_connector=which != "from host memory"):
            llm.generate({"prompt_token_ids": [1]}, greedy, use_tqdm=False)  # stores are under way
        start = time.perf_counter()
        (output,) = llm.generate(prompt, greedy, use_tqdm=False)
        print(f"{which}: {time.perf_counter() - start:.3f} s, {output.num_cached_tokens} of 1500 tokens reloaded,",
              f"answer {list(output.outputs[0].token_ids)}")  # fmt: skip
    llm.llm_engine.engine_core.shutdown()  # writes the timeline
    print(f"see: python -m offload report {TRACE}")


main()
