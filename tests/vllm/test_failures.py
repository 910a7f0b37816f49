"""Loads that break or never end, stores that break, pages that rot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, distance, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "failures")


PROMPTS = [[*models.prompt(130, 1), *models.prompt(tail, 2 + tail)] for tail in (40, 90)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """What an engine without a connector answers."""
    with engine(model) as bare:
        return bare.ask(PROMPTS)


@attrs.define(eq=False)
class Broken:
    """An engine whose copies a test breaks; both prompts are in host memory and nowhere else."""

    engine: Engine
    hooks: Hooks
    resting: int


@pytest.fixture
def broken(model: Path, expected: list[Answer]) -> Iterator[Broken]:
    """Start it. What was not loaded is to be computed again."""
    hooks = Hooks()
    connector = ours(
        driver=driver(hooks=hooks),
        timeout_s=TIMEOUT_S,
        policy="recompute",
        host_blocks=64,
        stream_mib=0.0,
    )
    with engine(model, connector) as made:
        resting = made.free_blocks
        assert distance(made.ask(PROMPTS), expected) == 0.0
        made.forget()
        yield Broken(made, hooks, resting)


def settle(broken: Broken, expected: list[Answer]) -> None:
    """Ask twice more: no block leaks, and whatever is still cached anywhere is right."""
    for _ in range(2):
        broken.engine.forget()
        assert broken.engine.free_blocks == broken.resting
        answers = broken.engine.ask(PROMPTS)
        TALLY.near(answers, expected)


@pytest.mark.parametrize("layer", [0, models.LAYERS - 1])
def test_a_load_that_fails_is_computed_again(
    broken: Broken, expected: list[Answer], layer: int
) -> None:
    """vllm#39732, vllm#21534: no crash, and no answer over pages that were not loaded."""
    broken.hooks.fail(OSError("the copy broke"), stream="load", layer=layer, nth=1)
    TALLY.near(broken.engine.ask(PROMPTS), expected)
    settle(broken, expected)


def test_where_users_want_it_a_failed_load_fails_its_request(
    model: Path, expected: list[Answer]
) -> None:
    """vLLM's default policy: the request ends with an error, the engine goes on, no block leaks."""
    hooks = Hooks()
    with engine(model, ours(driver=driver(hooks=hooks))) as made:
        resting = made.free_blocks
        made.ask(PROMPTS[:1])
        made.forget()
        hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=1)
        inputs = {"prompt_token_ids": PROMPTS[0]}
        (output,) = made.llm.generate(inputs, made.parameters(4), use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        made.forget()
        assert made.free_blocks == resting
        TALLY.near(made.ask(PROMPTS), expected)


def test_a_load_that_tears_is_computed_again(broken: Broken, expected: list[Answer]) -> None:
    """The bytes moved and the copy reported an error all the same."""
    broken.hooks.fail(OSError("torn"), stream="load", layer=1, nth=1, torn=True)
    TALLY.near(broken.engine.ask(PROMPTS), expected)
    settle(broken, expected)


def test_a_load_that_hangs_is_given_up(broken: Broken, expected: list[Answer]) -> None:
    """vllm#49829, LMCache#4759: a wait ends by its deadline, and the prompt is computed."""
    broken.hooks.delay(1.5 * TIMEOUT_S, stream="load", layer=2, nth=1)
    TALLY.near(broken.engine.ask(PROMPTS), expected)
    settle(broken, expected)


def test_nothing_computed_over_a_failed_load_is_kept(
    broken: Broken, expected: list[Answer]
) -> None:
    """Blocks behind a prefix that was not loaded are stored in the same step: they are not offered to anybody."""
    longer = [*PROMPTS[0], *models.prompt(80, 50)]
    broken.hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=1)
    first = broken.engine.ask([longer])
    broken.engine.forget()
    again = broken.engine.ask([longer])
    assert again[0].cached == 224
    TALLY.near(again, first)
    broken.engine.forget(connector=True)
    TALLY.near(broken.engine.ask([longer]), first)
    settle(broken, expected)


def test_a_store_that_fails_is_forgotten(broken: Broken, expected: list[Answer]) -> None:
    """Blocks whose store broke are not offered to anybody; they are stored the next time."""
    prompt = models.prompt(200, 9)
    broken.hooks.fail(OSError("the copy broke"), stream="backup", layer=1, nth=1)
    first = broken.engine.ask([prompt])
    broken.engine.forget()
    second = broken.engine.ask([prompt])
    assert second[0].cached == 0
    assert distance(second, first) == 0.0
    broken.engine.forget()
    third = broken.engine.ask([prompt])
    assert third[0].cached == 192
    TALLY.near(third, first)
    settle(broken, expected)


def test_a_corrupted_page_changes_the_answer(broken: Broken, expected: list[Answer]) -> None:
    """The comparisons have teeth: one layer of one stored page with other bytes is noticed."""
    (host,) = broken.engine.host_pools()
    rows = host.view("k", 1)
    page = next(page for page in range(host.num_pages) if rows[page].any())
    rows[page].bitwise_not_()
    assert distance(broken.engine.ask(PROMPTS), expected) > 1e-2
