"""A KV cache too small for its requests, a host pool too small for what was asked: answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

PROMPTS = [models.prompt(60 + 9 * i, 10 + i) for i in range(6)]
TOKENS = 90
"""Each request grows from 2-4 blocks to 5-7, so six of them want over 30."""

BLOCKS = 17
"""One of them is vLLM's null block."""


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "preemption")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """What each prompt is answered without a connector, where there is room."""
    with engine(model) as bare:
        return bare.ask(PROMPTS, TOKENS)


@pytest.fixture(
    params=[(0.0, 16.0), (0.05, 0.0)], ids=["quick, whole stores", "slow, streaming stores"]
)
def small(request: pytest.FixtureRequest, model: Path, expected: object) -> Iterator[Engine]:
    """An engine with a tiny KV cache. `expected` has been closed by then."""
    delay, stream_mib = request.param
    hooks = Hooks()
    hooks.delay(delay, stream="backup")
    with engine(
        model,
        ours(driver=driver(hooks=hooks), stream_mib=stream_mib),
        num_gpu_blocks_override=BLOCKS,
        max_model_len=256,
        max_num_batched_tokens=128,
    ) as made:
        yield made


def test_preempted_requests_come_back(small: Engine, expected: list[Answer]) -> None:
    """vllm#46014, vllm#29870: preempted while blocks are stored, admitted again from host memory."""
    resting = small.free_blocks
    with small.preemptions() as preempted:
        answers = small.ask(PROMPTS, TOKENS)
    assert preempted
    TALLY.near(answers, expected)
    small.forget()
    assert small.free_blocks == resting
    again = small.ask(PROMPTS, TOKENS)
    assert any(answer.cached for answer in again)
    TALLY.near(again, expected)


def test_a_tiny_host_evicts(model: Path, expected: object) -> None:
    """vllm#54914: prompts come and go through a host that holds two of nine, for many rounds."""
    prompts = [models.prompt(150 + 20 * i, 40 + i) for i in range(9)]
    with engine(model) as bare:
        right = [bare.ask([prompt])[0] for prompt in prompts]
    order = Random(5)
    reloaded = 0
    with engine(model, ours(host_blocks=12)) as made:
        resting = made.free_blocks
        for _ in range(40):
            chosen = order.sample(range(len(prompts)), order.choice([1, 1, 2, 3]))
            answers = made.ask([prompts[i] for i in chosen])
            made.forget()
            assert made.free_blocks == resting
            cached = sum(answer.cached for answer in answers)
            TALLY.near(answers, [right[i] for i in chosen])
            reloaded += cached
    assert reloaded


def test_a_host_of_one_block(model: Path, expected: object) -> None:
    """The smallest host pool serves; it keeps the first block of whoever came last."""
    prompt = models.prompt(100, 70)
    with engine(model, ours(host_blocks=1)) as made:
        first = made.ask([prompt])
        made.forget()
        again = made.ask([prompt])
        assert again[0].cached in (0, 32)
        TALLY.near(again, first)
