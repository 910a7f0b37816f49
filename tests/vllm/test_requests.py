"""What a request may ask besides tokens, and what the engine tells about all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.connect import ours
from tests.vllm.rig import Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[Engine]:
    """One engine for all; each test has prompts of its own."""
    model = models.save("llama", folder / "requests")
    with engine(model, ours(), disable_log_stats=False) as started:
        yield started


def generate(made: Engine, inputs: dict[str, Any], **changes: Any) -> Any:
    """Run one request with other parameters; return vLLM's output."""
    (output,) = made.llm.generate([inputs], made.parameters(4, **changes), use_tqdm=False)
    return output


def test_log_probabilities_of_the_prompt(made: Engine) -> None:
    """A request that wants them for its prompt computes all of it, whatever host memory has."""
    prompt = models.prompt(150, 1)
    made.ask([prompt])
    made.forget()
    output = generate(made, {"prompt_token_ids": prompt}, prompt_logprobs=1)
    assert output.num_cached_tokens == 0
    assert [position is None for position in output.prompt_logprobs] == [True] + [False] * 149


def test_a_salt_keeps_prefixes_apart(made: Engine) -> None:
    """Requests of different salts share nothing; of the same salt, they do."""
    prompt = models.prompt(100, 2)
    cached = []
    for salt in ("a", "b", "a"):
        inputs = {"prompt_token_ids": prompt, "cache_salt": salt}
        cached.append(generate(made, inputs).num_cached_tokens)
        made.forget()
    assert cached == [0, 0, 96]


def test_several_samples_of_one_prompt(made: Engine) -> None:
    """Three samples share the reloaded prefix; the same seed gives the same three again."""
    inputs = {"prompt_token_ids": models.prompt(130, 3)}
    outputs = []
    for _ in "12":
        outputs.append(generate(made, inputs, n=3, temperature=0.8, seed=1))
        made.forget()
    first, second = ([sample.token_ids for sample in output.outputs] for output in outputs)
    assert first == second
    assert outputs[1].num_cached_tokens == 128


def test_new_weights_forget_everything(made: Engine) -> None:
    """`reset_prefix_cache(reset_connector=True)` empties host memory too; what comes after is stored again."""
    prompt = models.prompt(100, 4)
    made.ask([prompt])
    made.forget(connector=True)
    assert made.ask([prompt])[0].cached == 0
    made.forget()
    assert made.ask([prompt])[0].cached == 96


def test_all_running_requests_are_preempted_at_once(made: Engine) -> None:
    """They start again from host memory, and answer the same."""
    prompts = [models.prompt(100, 5), models.prompt(140, 6)]
    right = made.ask(prompts, 20)
    made.forget(connector=True)
    for name, prompt in zip(("1001", "1002"), prompts, strict=True):
        made.add(name, prompt, 20)
    for _ in range(6):
        made.step()
    made.quiet()
    assert made.llm.reset_prefix_cache(reset_running_requests=True)
    done = made.drain()
    TALLY.near([done["1001"], done["1002"]], right)


def test_numbers_of_the_engine(made: Engine) -> None:
    """Loads, stores and host pages are counted under `vllm:offload_*`."""
    prompt = models.prompt(200, 7)
    made.ask([prompt])
    made.forget()
    before = numbers(made)
    made.ask([prompt])
    made.ask([[1]])
    after = numbers(made)
    assert after["load_blocks"] - before["load_blocks"] == 192 // 32
    assert after["loaded_blocks"] - before["loaded_blocks"] == 192 // 32
    assert after["failed_loads"] == after["failed_stores"] == 0
    assert 6 <= after["host_blocks_used"] <= after["host_blocks"] == 256


def numbers(made: Engine) -> Counter[str]:
    """Return our metrics by their short names; what was never counted is 0."""
    prefix = "vllm:offload_"
    return Counter(
        {
            metric.name.removeprefix(prefix): metric.value
            for metric in made.llm.get_metrics()
            if metric.name.startswith(prefix)
        }
    )


@pytest.mark.parametrize(("store", "cached"), [("prompt", 96), ("none", 0)])
def test_what_is_stored_can_be_chosen(folder: Path, store: str, cached: int) -> None:
    """vllm#43797: `prompt` keeps generated blocks out of host memory, `none` keeps everything out."""
    with engine(models.save("llama", folder / "requests"), ours(store=store)) as made:
        prompt = models.prompt(100, 8)
        answer = made.ask([prompt], 60)[0]
        made.forget()
        assert made.ask([[*prompt, *answer.tokens]])[0].cached == cached
