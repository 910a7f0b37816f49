"""Random programs: whatever a session went through, it computes what a replay of its history computes."""

from __future__ import annotations

import random

import anyio
import attrs
import pytest
import torch

import offload
from offload.driver.hooks import Hooks
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers import Session
from tests.integrations.tiny import Rig, forward, ids, rig
from tests.integrations.turns import free_pages, same_bits, tear

Step = torch.Tensor | int
"""A chunk that ran, or minus the number of tokens that were cropped."""

STEPS = 14


@attrs.define(eq=False)
class Program:
    """A session, the steps that made it, and those that its last backup has seen."""

    r: Rig
    hooks: Hooks
    dice: random.Random
    session: Session
    history: list[Step] = attrs.field(factory=list)
    saved: list[Step] = attrs.field(factory=list)

    async def step(self) -> None:
        """Do something at random that the session's place allows."""
        if not self.session.resident:
            await self.dice.choice([self.load, self.load, self.load, self.failed_load])()
            return
        acts = [self.run, self.run, self.torn, self.backup, self.failed_backup, self.evict]
        if not self.r.pools.kept.has_states and count(self.history) > 3:
            acts.append(self.crop)
        await self.dice.choice(acts)()

    async def run(self) -> None:
        """Run a chunk, and compare with a replay of all that came before."""
        chunk = self.chunk()
        logits = await self.r.use(self.session, chunk)
        self.history.append(chunk)
        assert same_bits([logits], [replayed(self.r, self.history)])

    async def torn(self) -> None:
        """Run a chunk that raises at a layer: where there are states, back to the last backup."""
        layer = self.dice.choice(self.r.pools.kept.keeping[1:])
        with pytest.MonkeyPatch.context() as patch:
            tear(patch, layer)
            with pytest.raises(ArithmeticError):
                await self.r.use(self.session, self.chunk())
        if self.r.pools.kept.has_states:
            self.fall_back()

    async def backup(self) -> None:
        """Back up, and note what the host has now."""
        await self.session.backup()
        self.saved = list(self.history)

    async def failed_backup(self) -> None:
        """Let a backup fail at a layer, unless there is nothing to move."""
        if count(self.saved) == count(self.history):
            return
        layer = self.dice.choice(self.r.pools.kept.keeping)
        self.hooks.fail(OSError("no such page"), stream="backup", layer=layer, nth=1)
        with pytest.raises(offload.TransferFailed):
            await self.dice.choice([self.session.backup, self.session.evict])()
        assert self.session.resident

    async def evict(self) -> None:
        """Back up, leave the device, and let others write over it."""
        await self.session.evict()
        self.saved = list(self.history)
        self.r.poison_devices()

    async def load(self) -> None:
        """Come back, to pages or a slot that may be others than before."""
        taken = self.r.pools.take_device(self.dice.randrange(3))
        await self.session.load()
        self.r.pools.free("device", taken)

    async def failed_load(self) -> None:
        """Let a load fail, unless there is nothing to load; a forward meets it."""
        if not self.history:
            return
        layer = self.dice.choice(self.r.pools.kept.keeping)
        self.hooks.fail(OSError("no such page"), stream="load", layer=layer, nth=1)
        transfer = await self.session.load()
        with pytest.raises(offload.TransferFailed):
            await transfer
        with pytest.raises(offload.TransferFailed):
            await self.r.use(self.session, self.chunk())
        assert not self.session.resident
        self.fall_back()

    async def crop(self) -> None:
        """Forget some tokens, here and on the host."""
        self.session.cache.crop(-2)
        self.history.append(-2)
        if count(self.saved) > count(self.history):
            self.saved = list(self.history)

    def chunk(self) -> torch.Tensor:
        """Return one to five tokens."""
        return ids(self.dice.randint(1, 5), seed=self.dice.randrange(1000))

    def fall_back(self) -> None:
        """Expect the session as its last backup has it."""
        self.history = list(self.saved)


def count(steps: list[Step]) -> int:
    """Return the tokens that are there after some steps."""
    return sum(step if isinstance(step, int) else step.shape[1] for step in steps)


def replayed(r: Rig, steps: list[Step]) -> torch.Tensor:
    """Return the logits of the last step, behind transformers' own cache that went through them all."""
    stock, logits = r.stock(), torch.empty(0)
    for step in steps:
        if isinstance(step, int):
            stock.crop(step)
        else:
            logits = forward(r.model, stock, step)
    return logits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "mamba2", "jamba", "falcon_h1"])
def test_a_random_program_computes_what_its_replay_computes(name: str, seed: int) -> None:
    """Runs, torn forwards, backups, loads and failures of both, in any order: every logit is a replay's,
    and in the end every page is back."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            before = free_pages(r)
            session = r.sessions.open(max_tokens=80)
            program = Program(r, hooks, random.Random(seed), session)
            for _ in range(STEPS):
                await program.step()
            if not session.resident:
                await session.load()
            await program.run()
            session.close()
            assert free_pages(r) == before

    anyio.run(body)
