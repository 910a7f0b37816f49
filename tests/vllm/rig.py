"""vLLM's engine on the CPU, started in this process, and what its answers are compared by.

Nothing here imports vLLM before an engine is started: the module loads where vLLM is not installed.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

BLOCK = 32
"""Tokens of a page: the smallest block that attention on the CPU takes."""

TOP = 5
"""How many log-probabilities of each generated token are compared."""

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Else the sampler compiles a function of one line, for seconds, with a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


@attrs.frozen
class Answer:
    """What a request got."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """For each generated token, the log-probabilities of the likeliest ones, by token."""

    cached: int = attrs.field(eq=False)
    """Prompt tokens that were not computed."""


def distance(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Return the largest difference of a log-probability; infinite where the tokens differ."""
    worst = 0.0
    for mine, yours in zip(left, right, strict=True):
        if mine.tokens != yours.tokens:
            return float("inf")
        for one, other in zip(mine.logprobs, yours.logprobs, strict=True):
            shared = one.keys() & other.keys()
            worst = max([worst, *(abs(one[token] - other[token]) for token in shared)])
    return worst


@attrs.define(eq=False)
class Engine:
    """An engine in this process. One at a time: vLLM keeps its connector in a global variable."""

    llm: Any

    def ask(self, prompts: Sequence[Sequence[int]], count: int = 4) -> list[Answer]:
        """Run the prompts together, greedily, and return the answers in their order."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, self.parameters(count), use_tqdm=False)
        return [answer(output) for output in outputs]

    def forget(self) -> None:
        """Drop vLLM's own prefix cache, and nothing of a connector's."""
        assert self.llm.reset_prefix_cache(), "blocks are still in use"

    def parameters(self, count: int) -> Any:
        """Return vLLM's parameters of a greedy request for so many tokens."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=count, logprobs=TOP, detokenize=False, ignore_eos=True
        )

    # What follows drives the engine step by step, where a test has to act between two of them.

    def add(self, name: str, prompt: Sequence[int], count: int = 4) -> None:
        """Queue a request."""
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt)}, self.parameters(count)
        )

    def step(self) -> dict[str, Answer]:
        """Make one step; return what finished in it."""
        outputs = self.llm.llm_engine.step()
        return {output.request_id: answer(output) for output in outputs if output.finished}

    def drain(self) -> dict[str, Answer]:
        """Step until nothing is left; return what finished."""
        finished: dict[str, Answer] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            finished |= self.step()
        return finished

    def abort(self, *names: str) -> None:
        """Abort requests."""
        self.llm.llm_engine.abort_request(list(names))

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler; only where the engine's core runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()


def answer(output: Any) -> Answer:
    """Return what is compared of a finished request's output."""
    completion = output.outputs[0]
    return Answer(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs
        ),
        cached=output.num_cached_tokens or 0,
    )


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def engine(
    model: Path,
    connector: Mapping[str, Any] | None = None,
    *,
    processes: bool = False,
    dtype: str = "float32",
    **settings: Any,
) -> Iterator[Engine]:
    """Start an engine; shut it down afterwards.

    Args:
        connector: vLLM's `kv_transfer_config`, or None for an engine without one.
        processes: Run the engine's core in a process of its own.
        settings: Arguments of `vllm.LLM` that differ from the smallest engine.
    """
    own = ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with environment(own), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Engine(_start(model, connector, {"dtype": dtype} | settings))
        try:
            yield made
        finally:
            made.llm.llm_engine.engine_core.shutdown()
            made.llm = None
            gc.collect()


def _start(model: Path, connector: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    smallest: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 128,
        "disable_log_stats": True,
    }
    if connector is not None:
        smallest["kv_transfer_config"] = KVTransferConfig(**connector)
    return LLM(str(model), **(smallest | dict(settings)))
