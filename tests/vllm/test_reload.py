"""A second request's prefix comes from host memory, layer by layer, and its answer is the one of a computed prefix.

Each model runs first without a connector: computed, then from vLLM's own prefix cache. A pass that stores
equals the first bit for bit, and a pass that reloads the second, because the same tokens are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import BLOCK, Answer, Engine, distance, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

Prompts = Sequence[Sequence[int]]


def head(length: int, *tails: int, seed: int) -> Prompts:
    """Return prompts that begin alike and end differently."""
    common = models.prompt(length, seed)
    return [common + models.prompt(tail, 100 * seed + i) for i, tail in enumerate(tails)]


BATCHES: Mapping[str, Prompts] = {
    "one": [models.prompt(200, 1)],
    "three of different lengths": [models.prompt(length, 2) for length in (40, 129, 300)],
    "shared prefixes": [*head(160, 40, 1, 77, seed=3), *head(64, 60, 200, seed=4)],
    "the same one four times": [models.prompt(170, 5)] * 4,
    "whole blocks": [models.prompt(BLOCK * blocks, 6 + blocks) for blocks in (1, 2, 5)],
    "shorter than a block": [models.prompt(BLOCK - 1, 20), models.prompt(1, 21)],
    "one block and a token": [models.prompt(BLOCK + 1, 22)],
    "more than the engine runs at once": [models.prompt(70 + i, 30 + i) for i in range(12)],
}


@attrs.frozen
class Case:
    """A model and how its KV is stored."""

    model: str
    dtype: str
    stream_mib: float
    """Stores from this size on leave layer by layer."""


CASES = {
    "llama-fp32, streaming": Case("llama", "float32", 0.0),
    "qwen3-bf16, whole stores": Case("qwen3", "bfloat16", 16.0),
}


@attrs.frozen
class Expected:
    """What an engine without a connector answers."""

    cold: list[Answer]
    warm: list[Answer]
    """From its own prefix cache."""


@attrs.define(eq=False)
class Run:
    """An engine with our connector, and what one without it has said."""

    case: Case
    engine: Engine
    hooks: Hooks
    expected: Mapping[str, Expected]
    turns: list[list[Answer]]


FIRST, REPLY = models.prompt(60, 40), models.prompt(30, 41)
"""A conversation: a prompt, and what is asked after its answer."""


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def run(request: pytest.FixtureRequest, folder: Path) -> Iterator[Run]:
    """Run every batch without a connector, then give an engine with it."""
    case: Case = request.param
    model = models.save(case.model, folder / f"reload-{case.model}")
    with engine(model, dtype=case.dtype) as bare:
        expected = {
            name: Expected(*(bare.ask(batch) for _ in "12")) for name, batch in BATCHES.items()
        }
        turns = conversation(bare)
    hooks = Hooks()
    hooks.delay(0.005, stream="load")  # whoever does not wait reads what was there before
    connector = ours(driver=driver(hooks=hooks), stream_mib=case.stream_mib)
    with engine(model, connector, dtype=case.dtype) as made:
        yield Run(case, made, hooks, expected, turns)


def conversation(made: Engine) -> list[list[Answer]]:
    """Ask, and ask again behind the answer; vLLM's own cache is dropped between."""
    first = made.ask([FIRST], count=70)
    made.forget()
    second = made.ask([[*FIRST, *first[0].tokens, *REPLY]])
    return [first, second]


@pytest.mark.parametrize("name", BATCHES)
def test_a_second_pass_is_reloaded(run: Run, name: str) -> None:
    """All full blocks come back, no fewer than vLLM's own cache had, and both passes answer as without us."""
    expected, batch = run.expected[name], BATCHES[name]
    TALLY.same(run.engine.ask(batch), expected.cold)
    run.engine.forget()
    before = len(run.hooks.ops)
    again = run.engine.ask(batch)
    cached = [answer.cached for answer in again]
    assert cached == [answer.cached for answer in expected.warm]
    TALLY.same(again, expected.warm)
    loads = [op for op in run.hooks.ops[before:] if op.stream == "load"]
    assert bool(loads) == any(cached)
    assert {op.layer for op in loads} == (set(range(models.LAYERS)) if loads else set())


def test_generated_blocks_are_stored_too(run: Run) -> None:
    """The next turn of a conversation finds what the answer before it has written, the last token excepted."""
    first, second = conversation(run.engine)
    TALLY.same(first, run.turns[0])
    # The last generated token's KV was never computed.
    assert second[0].cached == (len(FIRST) + 70 - 1) // BLOCK * BLOCK == 128
    if run.case.dtype == "float32":
        TALLY.near(second, run.turns[1])
    else:
        assert distance(second, run.turns[1]) < 0.2, "the same tokens, rounded otherwise"


def test_a_hit_on_both_caches(run: Run) -> None:
    """A prefix of which vLLM still has the head: only what follows is loaded, behind it."""
    prompts = head(96, 130, seed=50)
    first = run.engine.ask(prompts)
    run.engine.forget()
    run.engine.ask([prompts[0][:97]])
    before = len(run.hooks.ops)
    again = run.engine.ask(prompts)
    assert again[0].cached == (96 + 130 - 1) // BLOCK * BLOCK
    assert any(op.stream == "load" for op in run.hooks.ops[before:])
    assert distance(again, first) < (1e-4 if run.case.dtype == "float32" else 0.2)


def test_a_prefix_that_was_never_seen(run: Run) -> None:
    """A prompt that differs in its first token shares nothing, whatever follows."""
    prompts = models.prompt(100, 60)
    run.engine.ask([prompts])
    run.engine.forget()
    other = [prompts[0] ^ 1, *prompts[1:]]
    assert run.engine.ask([other])[0].cached == 0
