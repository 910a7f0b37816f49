"""Loads that break while others share their blocks: vLLM has named the blocks by then, and cuts back one request only.

Scripted: what a request computed over a prefix that was not loaded is garbage, and must be found by nobody, also
where the request that was to compute it again never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

PREFIX = models.prompt(160, 1)
PROMPTS = {name: [*PREFIX, *models.prompt(80, seed)] for seed, name in enumerate("ab", 2)}
"""Two requests with a prefix of five blocks in common, and two and a half of their own."""


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "shared")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    """What an engine without a connector answers."""
    with engine(model) as bare:
        return {name: bare.ask([prompt])[0] for name, prompt in PROMPTS.items()}


@attrs.define(eq=False)
class Broken:
    """An engine that has the prefix in host memory and nowhere else, and whose next load breaks."""

    engine: Engine
    hooks: Hooks

    def arm(self) -> None:
        """Make it so."""
        self.engine.drain()
        self.engine.quiet()
        self.engine.forget(connector=True)
        self.engine.ask([PREFIX])
        self.engine.quiet()
        self.engine.forget()
        self.hooks.fail(OSError("the copy broke"), stream="load", layer=1, nth=1)

    def add(self, *names: str) -> None:
        """Queue requests."""
        for name in names:
            self.engine.add(name, PROMPTS[name])


@pytest.fixture(scope="module", params=["recompute", "fail"])
def broken(
    request: pytest.FixtureRequest, model: Path, expected: dict[str, Answer]
) -> Iterator[Broken]:
    """Start it, under each of vLLM's policies. A step computes 128 tokens: not all of one prompt."""
    hooks = Hooks()
    connector = ours(driver=driver(hooks=hooks), policy=request.param)
    with engine(model, connector, max_num_batched_tokens=128) as made:
        yield Broken(made, hooks)


def alone(broken: Broken) -> None:
    """One request, which goes on."""
    broken.add("a")
    broken.engine.step()


def aborted(broken: Broken) -> None:
    """One request, aborted before it computes anything again."""
    broken.add("a")
    broken.engine.step()
    broken.engine.abort("a")


def aborted_in_the_step(broken: Broken) -> None:
    """One request, aborted from under the forward: vLLM hears of the broken load when nobody has its blocks."""

    def heard(layer: int) -> None:
        if layer == 0:
            broken.engine.abort_in_step("a")

    broken.add("a")
    with broken.engine.after_each_layer(heard):
        broken.engine.step()


def preempted(broken: Broken) -> None:
    """One request, preempted before it computes anything again, and vLLM's cache reset if nothing is held."""
    broken.add("a")
    broken.engine.step()
    broken.engine.preempt()


def shared(broken: Broken) -> None:
    """Two requests in one step: the second finds the blocks that the first loads."""
    broken.add("a", "b")
    broken.engine.step()


def shared_and_aborted(broken: Broken) -> None:
    """The second trusts the first, which vLLM has cut back, and which never computes."""
    broken.add("a", "b")
    broken.engine.step()
    broken.engine.abort("a")


def joined(broken: Broken) -> None:
    """The second comes when the first has computed a part again."""
    broken.add("a")
    broken.engine.step()
    broken.add("b")


@pytest.mark.parametrize(
    "story",
    [alone, aborted, aborted_in_the_step, preempted, shared, shared_and_aborted, joined],
    ids=lambda story: story.__name__,
)
def test_nobody_reads_what_was_computed_over_a_failed_load(
    broken: Broken, expected: dict[str, Answer], story: Callable[[Broken], None]
) -> None:
    """vLLM's prefix cache, its scheduler and our stores: what all of them give afterwards is right."""
    broken.arm()
    story(broken)
    answers = broken.engine.drain()
    for name, answer in answers.items():
        if answer.tokens:  # else vLLM has failed it, as its policy says
            TALLY.near([answer], [expected[name.split("-")[0]]])
    for _ in range(2):
        for name, prompt in PROMPTS.items():
            TALLY.near(broken.engine.ask([prompt]), [expected[name]])
    broken.engine.quiet()
    broken.engine.forget()
    for name, prompt in PROMPTS.items():
        TALLY.near(broken.engine.ask([prompt]), [expected[name]])
