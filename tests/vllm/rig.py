"""vLLM's engine on the CPU, started in this process, and what its answers are compared by.

Nothing here imports vLLM before an engine is started: the module loads where vLLM is not installed.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

import offload

BLOCK = 32
"""Tokens of a page: the smallest block that attention on the CPU takes."""

TOP = 5
"""How many log-probabilities of each generated token are compared."""

RELOADED = Counter[str]()
"""`tokens`: those whose KV our connector's loads have brought, in all engines of this process."""

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

    def forget(self, *, connector: bool = False) -> None:
        """Drop vLLM's own prefix cache; with `connector=True` also what a connector keeps.

        Blocks that are still being stored are in use; an engine hears of the end of a store when it steps.
        """
        until = time.monotonic() + 30
        while not self.llm.reset_prefix_cache(reset_connector=connector):
            assert time.monotonic() < until, "blocks are still in use"
            self.ask([[1]], count=1)
        self.scribble()

    def scribble(self) -> None:
        """Overwrite vLLM's blocks, all free now: else the same prompt gets its old blocks, and its old bytes."""
        core = self.llm.llm_engine.engine_core
        if not hasattr(core, "engine_core"):
            return  # in another process
        for cache in core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches:
            if cache.dtype.is_floating_point and cache.itemsize > 1:
                cache.normal_()
            else:
                cache.view(torch.uint8).random_(100)  # fp8: below the patterns of NaN

    def parameters(self, count: int, **changes: Any) -> Any:
        """Return vLLM's parameters of a greedy request for so many tokens, or of one that differs."""
        from vllm import SamplingParams

        plain = {"temperature": 0, "logprobs": TOP, "detokenize": False, "ignore_eos": True}
        return SamplingParams(max_tokens=count, **(plain | changes))

    def quiet(self) -> None:
        """Step until our connector moves nothing."""
        until = time.monotonic() + 30
        while self.scheduler.connector.scheduler.busy:
            assert time.monotonic() < until, "copies do not end"
            self.step()

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

    def abort_in_step(self, name: str) -> None:
        """Abort a request from under a forward: the core takes it when the step's model has run."""
        processor, core = self.llm.llm_engine.output_processor, self.llm.llm_engine.engine_core
        core.engine_core.aborts_queue.put_nowait(processor.abort_requests([name], internal=False))

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler; only where the engine's core runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def reloaded_tokens(self) -> int:
        """Return how many tokens' KV our connector's loads have brought, if it is in this process."""
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        worker = getattr(self.connector, "worker", None) if has_kv_transfer_group() else None
        if worker is None:
            return 0
        blocks = worker.mover.scheduler.statistics().load.nbytes // worker.block_bytes
        return int(blocks) * int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    def host_pools(self) -> list[offload.HostPool]:
        """Return the host memory of our connector."""
        group = self.connector.worker.mover.scheduler._shell.group
        return [member.host for member in group.members]

    @property
    def free_blocks(self) -> int:
        """Blocks of vLLM's pool that no request and no copy uses."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @contextmanager
    def after_each_layer(self, heard: Callable[[int], object]) -> Iterator[None]:
        """Call `heard(layer)` whenever a layer of the model has run."""
        core = self.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        handles = [
            layer.register_forward_hook(lambda *_, number=number: heard(number) and None)
            for number, layer in enumerate(runner.model.model.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def preempt(self) -> None:
        """Do what vLLM's reset of all that runs does, without its error where a store still holds blocks."""
        scheduler = self.scheduler
        while scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.clear()
        scheduler.kv_cache_manager.reset_prefix_cache()

    @contextmanager
    def preemptions(self) -> Iterator[list[str]]:
        """Collect the names of requests that are preempted meanwhile."""
        scheduler, names = self.scheduler, []
        original = scheduler._preempt_request

        def preempt(request: Any, *rest: Any, **more: Any) -> None:
            names.append(request.request_id)
            original(request, *rest, **more)

        scheduler._preempt_request = preempt
        try:
            yield names
        finally:
            del scheduler._preempt_request


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
        try:
            made = Engine(_start(model, connector, {"dtype": dtype} | settings))
        except BaseException:
            _clean_up()
            raise
        try:
            yield made
        finally:
            RELOADED["tokens"] += made.reloaded_tokens()
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


def _clean_up() -> None:
    """Take down what an engine that did not start has left in this process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
