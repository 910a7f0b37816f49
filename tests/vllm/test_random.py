"""A random hour in the life of an engine, in small: requests come, go and are preempted while copies are slow or break."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

TINY: dict[str, Any] = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 128}
"""A device cache that a few requests fill, and prompts in several pieces."""

Asked = dict[str, tuple[list[int], int]]
"""By name, a prompt and how many tokens are wanted."""


def requests(dice: random.Random, count: int) -> Asked:
    """Return requests that share prefixes, with names that sort as they come."""
    stems = [models.prompt(300, seed) for seed in range(3)]
    return {
        f"q{number:02}": (
            dice.choice(stems)[: dice.choice([40, 100, 170, 260])]
            + models.prompt(dice.choice([3, 30, 70]), 100 + dice.randrange(6)),
            dice.choice([1, 3, 20, 40]),
        )
        for number in range(count)
    }


def by_name(answers: dict[str, Answer]) -> dict[str, Answer]:
    """Return answers by the name that a request was given; vLLM adds to it."""
    return {name.split("-")[0]: answer for name, answer in answers.items()}


def live(made: Engine, asked: Asked, dice: random.Random, hooks: Hooks) -> dict[str, Answer]:
    """Let requests come and go; return the answers of those that were not aborted."""
    coming, running, answers = dict(asked), set[str](), dict[str, Answer]()
    while coming or running:
        if coming and dice.random() < 0.4:
            name = min(coming)
            made.add(name, *coming.pop(name))
            running.add(name)
        if running and dice.random() < 0.05:
            victim = dice.choice(sorted(running))
            made.abort(victim)
            running.remove(victim)
        if dice.random() < 0.1:
            made.llm.reset_prefix_cache()
        if dice.random() < 0.15:
            stream, layer = dice.choice(["load", "backup"]), dice.randrange(models.LAYERS)
            hooks.fail(OSError("the copy broke"), stream=stream, layer=layer, nth=1)
        finished = by_name(made.step())
        answers |= {name: answer for name, answer in finished.items() if name in running}
        running -= set(finished)
    return answers


@pytest.mark.parametrize("async_load_tokens", [None, 64], ids=["under", "long ahead"])
def test_whatever_happens_answers_are_right_and_no_block_leaks(
    folder: Path, async_load_tokens: int | None
) -> None:
    """vllm#54914, vllm#29781: evictions, aborts, preemption, reuse, slow copies and broken ones, together."""
    dice = random.Random(3)
    asked = requests(dice, 40)
    model = models.save("llama", folder / "random")
    with engine(model, **TINY) as bare:
        for name, (prompt, count) in asked.items():
            bare.add(name, prompt, count)
        expected = by_name(bare.drain())
    hooks = Hooks()
    hooks.delay(0.003, stream="backup")
    hooks.delay(0.002, stream="load")
    connector = ours(
        host_blocks=24,
        policy="recompute",
        driver=driver(hooks=hooks),
        async_load_tokens=async_load_tokens,
    )
    with engine(model, connector, **TINY) as made:
        resting = made.free_blocks
        answers = live(made, asked, dice, hooks)
        made.forget()
        assert made.free_blocks == resting
        assert not made.scheduler.connector.scheduler.busy
        assert {op.stream for op in hooks.ops} == {"load", "backup"}
    names = sorted(answers)
    assert len(names) > len(asked) // 2
    TALLY.near([answers[name] for name in names], [expected[name] for name in names])
