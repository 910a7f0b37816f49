"""How long does vLLM take to a second request's first token, when an N-token prefix must come back?

Three engines on the CPU, each in a process of its own, asked in turns: without a connector (the prefix is
recomputed), with ours (layer by layer), with our spec under vLLM's own scheduling (the whole load first).
A small Llama with random weights. The ratios are to recomputing. Needs vLLM: `make vllm-bench`.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.common import finish, options
from offload.trace.read import timeline
from offload.trace.records import ASYNC_LANE

LAYERS = 8
SIZES = (256, 1024, 4096)
QUICK_SIZES = (256, 1024)
TAIL = 32
"""Tokens that follow the prefix: what the second request computes in any case."""

BLOCK = 32
HOST_BYTES = 256 << 20
"""4,096 tokens of 8 layers x 2 x 4 heads x 64 x 2 bytes are 32 MiB."""

ROUNDING = 0.2
"""Of log-probabilities; a wrong page makes one or more."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

OURS: dict[str, Any] = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_gib": HOST_BYTES / 2**30},
}
SPEC: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "OffloadSpec",
        "spec_module_path": "offload.integrations.vllm",
        "cpu_bytes_to_use": HOST_BYTES,
    },
}
ENGINES: Mapping[str, dict[str, Any] | None] = {"recompute": None, "ours": OURS, "spec": SPEC}


def save_model(folder: Path) -> None:
    """Write a Llama of 8 layers with random weights of an ordinary scale."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def serve(model: Path, connector: dict[str, Any] | None, trace: Path, asked: Connection) -> None:
    """Answer (prefix, tail) with (seconds to the first token, tokens not computed, what was likely); None ends it."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {}
    if connector is not None:
        extra = connector["kv_connector_extra_config"] | {"trace": str(trace)}
        connector = connector | {"kv_connector_extra_config": extra}
        settings["kv_transfer_config"] = KVTransferConfig(**connector)
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=max(SIZES) + 2 * TAIL,
        max_num_batched_tokens=max(SIZES) + 2 * TAIL,
        max_num_seqs=2,
        dtype="bfloat16",
        **settings,
    )
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)

    def ask(tokens: list[int]) -> Any:
        return llm.generate({"prompt_token_ids": tokens}, first, use_tqdm=False)[0]

    asked.send("ready")
    while (question := asked.recv()) is not None:
        prefix, tail = question
        if connector is not None:
            ask(prefix)
        while not llm.reset_prefix_cache():
            ask([1])
        start = time.perf_counter()
        output = ask([*prefix, *tail])
        took = time.perf_counter() - start
        likely = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        asked.send((took, output.num_cached_tokens, likely))
    llm.llm_engine.engine_core.shutdown()
    asked.send("written")


@attrs.define(eq=False)
class Engine:
    """The other end of `serve`."""

    name: str
    trace: Path
    pipe: Connection

    @classmethod
    def start(cls, name: str, model: Path, folder: Path) -> Engine:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        trace = folder / f"{name}.trace.json.gz"
        work = (model, ENGINES[name], trace, there)
        context.Process(target=serve, args=work, daemon=True).start()
        assert here.recv() == "ready"
        return cls(name, trace, here)

    def ask(self, prefix: list[int], tail: list[int]) -> tuple[float, int, dict[int, float]]:
        """Return seconds to the first token, tokens that were not computed, and log-probabilities."""
        self.pipe.send((prefix, tail))
        took, cached, likely = self.pipe.recv()
        return took, cached, likely

    def close(self) -> None:
        """End it; the trace is written."""
        self.pipe.send(None)
        assert self.pipe.recv() == "written"


def measure(engines: list[Engine], size: int, repeats: int) -> dict[str, float]:
    """Ask each engine in turns, with a new prefix each time; the first turn warms up."""
    took: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for turn in range(repeats + 1):
        generator = torch.Generator().manual_seed(1000 * size + turn)
        tokens = torch.randint(3, 1024, (size + TAIL,), generator=generator).tolist()
        prefix, tail = tokens[:size], tokens[size:]
        answers = {}
        for engine in engines:
            seconds, cached, answers[engine.name] = engine.ask(prefix, tail)
            assert cached == (0 if engine.name == "recompute" else size)
            if turn:
                took[engine.name].append(seconds)
        check(answers)
    middle = {name: statistics.median(seconds) for name, seconds in took.items()}
    figures = {f"{name}_{size}_ms": 1e3 * seconds for name, seconds in middle.items()}
    for name in ("ours", "spec"):
        figures[f"{name}_{size}_speedup"] = middle["recompute"] / middle[name]
    return figures


def check(answers: Mapping[str, dict[int, float]]) -> None:
    """Require the same from both reloads bit for bit; a computed prefix in one piece rounds otherwise in bf16."""
    computed, ours = answers["recompute"], answers["ours"]
    assert ours == answers["spec"], "two reloads of the same prefix differ"
    shared = computed.keys() & ours.keys()
    worst = max((abs(computed[token] - ours[token]) for token in shared), default=float("inf"))
    assert worst < ROUNDING, f"a reloaded prefix is answered otherwise than a computed one: {worst}"


def stalls(trace: Path) -> dict[str, float]:
    """Return how long forwards waited for each layer, per load."""
    recorded = timeline(trace)
    loads = sum(request.direction == "load" for request in recorded.requests)
    figures = dict.fromkeys((f"ours_stall_layer_{layer}_us" for layer in range(LAYERS)), 0.0)
    for wait in recorded.waits:
        if wait.direction == "load" and wait.lane != ASYNC_LANE and wait.layer >= 0:
            figures[f"ours_stall_layer_{wait.layer}_us"] += (wait.end - wait.start) / 1e3 / loads
    return figures


def main() -> int:
    """Measure and print."""
    given = options(__doc__)
    try:
        import vllm  # noqa: F401
    except ImportError:
        print("vLLM is not installed here; `make vllm-bench` sets it up", file=sys.stderr)
        return 1
    os.environ.update(ENVIRONMENT)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        engines = [Engine.start(each, folder / "model", folder) for each in ENGINES]
        for size in QUICK_SIZES if given.quick else SIZES:
            figures |= measure(engines, size, 3 if given.quick else 7)
        for engine in engines:
            engine.close()
        figures |= stalls(folder / "ours.trace.json.gz")
    finish("vllm_ttft", figures, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
