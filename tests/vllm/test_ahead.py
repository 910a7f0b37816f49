"""`async_load_tokens`: long loads are done before their request is scheduled, and nobody else waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from offload.integrations.vllm.worker import WorkerSide
from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import BLOCK, Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

LONG = models.prompt(300, 1)
SHORT = models.prompt(60, 2)
LIMIT = 4 * BLOCK
CACHED = 288
"""Tokens of the long prompt that are loaded."""

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "ahead")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """What an engine without a connector answers, computed and then from its own cache."""
    with engine(model) as bare:
        bare.ask([LONG])
        return [*bare.ask([LONG]), *bare.ask([SHORT])]


@attrs.define(eq=False)
class Stored:
    """An engine with both prompts in host memory and nowhere else, and the hooks of its copies."""

    engine: Engine
    hooks: Hooks
    resting: int

    def step_until(self, name: str) -> Answer:
        """Step until a request has finished; return its answer."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for finished, answer in self.engine.step().items():
                if finished.split("-")[0] == name:
                    return answer
        raise AssertionError(f"{name} does not finish")

    def statuses(self) -> list[str]:
        """Return what vLLM says of all requests."""
        return [request.status.name for request in self.engine.scheduler.requests.values()]


def started(model: Path, **changes: Any) -> Iterator[Stored]:
    """Start an engine, and have it store the prompts."""
    hooks = Hooks()
    connector = ours(driver=driver(hooks=hooks), host_blocks=64, **changes)
    with engine(model, connector) as made:
        resting = made.free_blocks
        made.ask([LONG, SHORT])
        made.forget()
        yield Stored(made, hooks, resting)
        made.forget()
        assert made.free_blocks == resting


@pytest.fixture
def stored(model: Path, expected: object) -> Iterator[Stored]:
    """Loads of more than four blocks run ahead."""
    yield from started(model, async_load_tokens=LIMIT, policy="recompute")


def test_a_short_request_does_not_wait_for_a_long_load(
    stored: Stored, expected: list[Answer]
) -> None:
    """While the long prefix is on its way, another request is answered; then the long one is, from host memory."""
    gate = stored.hooks.gate(stream="load", layer=2)
    stored.engine.add("1", LONG)
    stored.engine.step()
    assert stored.statuses() == ["WAITING_FOR_REMOTE_KVS"]
    stored.engine.add("2", models.prompt(50, 9))
    stored.step_until("2")
    assert stored.statuses() == ["WAITING_FOR_REMOTE_KVS"]
    gate.open()
    answer = stored.step_until("1")
    assert answer.cached == CACHED
    TALLY.near([answer], expected[:1])


def test_a_short_load_runs_under_its_forward(stored: Stored, expected: list[Answer]) -> None:
    """Up to the limit nothing has changed: the request is scheduled in the step that begins its load."""
    stored.engine.add("1", SHORT)
    stored.engine.step()
    assert stored.statuses() == ["RUNNING"]
    answer = stored.step_until("1")
    assert answer.cached == BLOCK
    TALLY.near([answer], expected[1:])


@pytest.mark.parametrize("layer", [0, models.LAYERS - 1])
def test_a_long_load_that_breaks_is_computed_again(
    stored: Stored, expected: list[Answer], layer: int
) -> None:
    """Nothing had read its blocks; the next time it is right again."""
    stored.hooks.fail(OSError("the copy broke"), stream="load", layer=layer, nth=1)
    TALLY.near(stored.engine.ask([LONG]), expected[:1])
    stored.engine.forget()
    again = stored.engine.ask([LONG])
    TALLY.near(again, expected[:1])


def test_a_long_load_that_breaks_beside_a_short_one(stored: Stored, expected: list[Answer]) -> None:
    """One of each in a step, and both break: both are computed."""
    stored.hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=1)
    stored.hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=2)
    TALLY.near(stored.engine.ask([LONG, SHORT]), expected)


def test_an_abort_under_a_long_load_leaves_nothing(stored: Stored, expected: list[Answer]) -> None:
    """Its blocks are written until the load is over, and free from then on."""
    gate = stored.hooks.gate(stream="load", layer=1)
    stored.engine.add("1", LONG)
    stored.engine.step()
    stored.engine.abort("1")
    stored.engine.step()
    assert stored.statuses() == ["FINISHED_ABORTED"]
    assert stored.engine.free_blocks < stored.resting
    gate.open()
    stored.engine.quiet()
    assert stored.engine.free_blocks == stored.resting
    TALLY.near(stored.engine.ask([LONG]), expected[:1])


def test_where_users_want_it_a_broken_long_load_fails_its_request(
    model: Path, expected: list[Answer]
) -> None:
    """vLLM's default policy: this request ends with an error, others do not, and no block leaks."""
    for stored in started(model, async_load_tokens=0):
        stored.hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=1)
        inputs = {"prompt_token_ids": LONG}
        parameters = stored.engine.parameters(4)
        (output,) = stored.engine.llm.generate(inputs, parameters, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        TALLY.near(stored.engine.ask([SHORT, LONG])[1:], expected[:1])


def test_every_load_may_run_ahead(model: Path, expected: list[Answer]) -> None:
    """0 is no limit: also prompts that share a prefix in one batch are answered right."""
    prompts = [LONG, SHORT, LONG[:200], [*LONG[:128], *models.prompt(90, 5)]]
    with engine(model) as bare:
        right = [bare.ask([prompt])[0] for prompt in prompts]
    for stored in started(model, async_load_tokens=0, policy="recompute"):
        for _ in range(3):
            answers = stored.engine.ask(prompts)
            assert answers[0].cached == CACHED
            TALLY.near(answers, right)
            stored.engine.forget()


def test_forwards_whose_graph_swallows_the_hooks_are_served(
    model: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full CUDA graph calls nothing between layers: stores start at the end of a step, and no load needs a wait."""
    for hook in ("before", "after"):
        monkeypatch.setattr(WorkerSide, hook, lambda side, name: None)
    for stored in started(model, async_load_tokens=0):
        answers = stored.engine.ask([LONG, SHORT])
        assert [answer.cached for answer in answers] == [CACHED, BLOCK]
        TALLY.near(answers, expected)
