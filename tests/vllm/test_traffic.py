"""Random traffic through caches that are too small, with aborts, failing copies and resets: every answer is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import attrs
import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

TOKENS = 40
STEPS = 300


def prompts() -> list[list[int]]:
    """Return prompts that share prefixes as the branches of a tree do."""
    trunk = models.prompt(96, 1)
    found = [trunk, trunk[:40]]
    for branch in range(3):
        middle = trunk[: 32 * (branch + 1)] + models.prompt(70, 10 + branch)
        found += [middle, *([*middle, *models.prompt(20 * leaf, 20 + leaf)] for leaf in (1, 2))]
    return found


PROMPTS = prompts()


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "traffic")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """What each prompt is answered alone, where there is room."""
    with engine(model) as bare:
        return [bare.ask([prompt], TOKENS)[0] for prompt in PROMPTS]


@attrs.define(eq=False)
class Traffic:
    """Who is under way, and what the dice say next."""

    engine: Engine
    hooks: Hooks
    dice: Random
    expected: list[Answer]
    failing: list[str]
    """Streams whose copies fail now and then."""

    live: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """By name, the prompt's number and how many tokens are wanted."""

    done: Counter[str] = attrs.field(factory=Counter)
    number: int = 0

    def turn(self) -> None:
        """Do something, and make a step."""
        if len(self.live) < 8 and self.dice.random() < 0.4:
            self.add()
        if self.live and self.dice.random() < 0.04:
            name = self.dice.choice(sorted(self.live))
            self.engine.abort(name)
            del self.live[name]
            self.done["aborted"] += 1
        if self.dice.random() < 0.06:
            stream = self.dice.choice(self.failing)
            layer = self.dice.randrange(models.LAYERS)
            torn = self.dice.random() < 0.5
            self.hooks.fail(OSError("the dice"), stream=stream, layer=layer, nth=1, torn=torn)
        if self.dice.random() < 0.15:
            self.engine.llm.reset_prefix_cache(reset_connector=self.dice.random() < 0.1)
        self.take(self.engine.step())

    def add(self) -> None:
        """Ask one of the prompts."""
        self.number += 1
        which, count = self.dice.randrange(len(PROMPTS)), self.dice.randint(1, TOKENS)
        self.live[str(self.number)] = which, count
        self.engine.add(str(self.number), PROMPTS[which], count)

    def take(self, answers: dict[str, Answer]) -> None:
        """Compare what has finished."""
        for name, answer in answers.items():
            which, count = self.live.pop(name)
            whole = self.expected[which]
            right = attrs.evolve(
                whole, tokens=whole.tokens[:count], logprobs=whole.logprobs[:count]
            )
            TALLY.near([answer], [right])
            self.done["answered"] += 1


@pytest.mark.parametrize(
    ("own", "failing", "seed"),
    [
        pytest.param(True, ["backup"], 5, id="both caches"),
        pytest.param(False, ["load", "backup"], 5, id="host memory alone"),
        pytest.param(True, ["load", "backup"], 3, id="both caches, failing loads"),
    ],
)
def test_random_traffic(
    model: Path, expected: list[Answer], own: bool, failing: list[str], seed: int
) -> None:
    """vllm#54914, vllm#46014: nothing is torn, lost or leaked, whatever comes together."""
    hooks = Hooks()
    hooks.delay(0.003, stream="backup")
    connector = ours(
        host_blocks=44,
        driver=driver(hooks=hooks),
        policy="recompute",
        stream_mib=0.0 if own else 16.0,
        timeout_s=20.0,
    )
    with engine(
        model,
        connector,
        max_model_len=256,
        max_num_batched_tokens=96,
        max_num_seqs=6,
        num_gpu_blocks_override=18,
        enable_prefix_caching=own,
    ) as made:
        resting = made.free_blocks
        traffic = Traffic(made, hooks, Random(seed), expected, failing)
        for _ in range(STEPS):
            traffic.turn()
        traffic.take(made.drain())
        made.forget()
        assert made.free_blocks == resting
    # When copies end is up to the machine, and so is who is preempted: tests of their own make sure of that.
    assert {str(op.stream) for op in hooks.ops} >= ({"backup"} if own else {"backup", "load"})
    assert traffic.done["answered"] > 20
    assert traffic.done["aborted"]
