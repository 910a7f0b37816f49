"""A request is aborted in every state it can be in: the others get their answers, and every block comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import pytest

from offload.testing import Hooks
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

COMMON = models.prompt(160, 1)
VICTIM = [*COMMON, *models.prompt(50, 2)]
SURVIVOR = [*COMMON, *models.prompt(30, 3)]
TOKENS = 12


@attrs.define(eq=False)
class Scene:
    """An engine whose copies can be held, and the blocks that are free when it rests."""

    engine: Engine
    hooks: Hooks
    expected: list[Answer]
    """Of victim and survivor, each alone, without a connector."""

    resting: int

    def fresh(self) -> None:
        """Forget both caches."""
        self.engine.forget(connector=True)

    def known(self) -> None:
        """Have victim's and survivor's prompts in host memory, and nowhere else."""
        self.engine.ask([VICTIM, SURVIVOR], count=1)
        self.engine.forget()


@pytest.fixture(scope="module")
def scene(folder: Path) -> Iterator[Scene]:
    """Start the engine; two requests run at once, a third one queues."""
    model = models.save("llama", folder / "aborts")
    with engine(model) as bare:
        expected = [bare.ask([prompt], TOKENS)[0] for prompt in (VICTIM, SURVIVOR)]
    hooks = Hooks()
    connector = ours(driver=driver(hooks=hooks), stream_mib=0.0)
    with engine(model, connector, max_num_seqs=2, max_num_batched_tokens=128) as made:
        yield Scene(made, hooks, expected, made.free_blocks)


def queued(scene: Scene) -> None:
    """Abort before its first step."""
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    scene.engine.abort("victim")


def queued_with_a_hit(scene: Scene) -> None:
    """Abort before its first step a request whose prefix host memory has."""
    scene.known()
    queued(scene)


def queued_behind_others(scene: Scene) -> None:
    """Abort a request that found no room, while others run."""
    scene.known()
    for name in ("survivor", "another"):
        scene.engine.add(name, SURVIVOR, TOKENS)
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.step()
    scene.engine.abort("victim")


def computing_its_prompt(scene: Scene) -> None:
    """Abort when one chunk of its prompt is computed and the next is not."""
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    scene.engine.step()
    scene.engine.abort("victim")


def storing(scene: Scene) -> None:
    """Abort while its blocks are on their way to host memory; they arrive later."""
    gate = scene.hooks.gate(stream="backup")
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    scene.engine.step()
    assert gate.wait_arrived(timeout=20)
    scene.engine.abort("victim")
    scene.engine.step()
    gate.open()


def loading(scene: Scene) -> None:
    """Abort under the forward that its load feeds, when half of the layers have landed."""
    scene.known()
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    aborted: list[int] = []

    def after(layer: int) -> None:
        if layer == models.LAYERS // 2 and not aborted:
            aborted.append(layer)
            scene.engine.abort_in_step("victim")

    with scene.engine.after_each_layer(after):
        scene.engine.step()
    assert aborted


def decoding(scene: Scene) -> None:
    """Abort when it has generated some tokens."""
    scene.known()
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    for _ in range(5):
        scene.engine.step()
    scene.engine.abort("victim")


def finished(scene: Scene) -> None:
    """Abort when it has finished by itself."""
    scene.engine.add("victim", VICTIM, 1)
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    while "victim" not in scene.engine.step():
        pass
    scene.engine.abort("victim")


def twice(scene: Scene) -> None:
    """Abort it, and abort it again."""
    computing_its_prompt(scene)
    scene.engine.abort("victim")


def abort_and_ask_again(scene: Scene) -> None:
    """Abort it while its blocks are stored, and ask the same under the same name."""
    gate = scene.hooks.gate(stream="backup")
    scene.engine.add("victim", VICTIM, TOKENS)
    scene.engine.step()
    assert gate.wait_arrived(timeout=20)
    scene.engine.abort("victim")
    scene.engine.add("survivor", SURVIVOR, TOKENS)
    scene.engine.step()
    gate.open()


STATES: Mapping[str, Callable[[Scene], None]] = {
    state.__name__: state
    for state in (
        queued,
        queued_with_a_hit,
        queued_behind_others,
        computing_its_prompt,
        storing,
        loading,
        decoding,
        finished,
        twice,
        abort_and_ask_again,
    )
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_an_abort_harms_nobody(scene: Scene, state: Callable[[Scene], None]) -> None:
    """vllm#49118, LMCache#1034: the survivor is answered, no block leaks, and both prompts still come out right."""
    scene.fresh()
    state(scene)
    done = scene.engine.drain()
    assert "victim" not in done
    TALLY.near([done["survivor"]], scene.expected[1:])
    scene.engine.forget()
    assert scene.engine.free_blocks == scene.resting
    again = scene.engine.ask([VICTIM, SURVIVOR], TOKENS)
    TALLY.near(again, scene.expected)
