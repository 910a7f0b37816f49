"""Run programs: one, many, and a failing one again and again until it is small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import anyio
import attrs

import offload
from tests.sched import LOOPS
from tests.soak.player import Player, SoakError
from tests.soak.steps import Step, perform, program
from tests.soak.world import World, make_world


@attrs.frozen
class Outcome:
    """What became of one program."""

    seed: int
    steps: int
    operations: int
    """Layer copies made."""

    faults: int
    """Layer copies that were made to fail."""

    error: BaseException | None
    story: Sequence[str]


def play(seed: int, steps: Sequence[Step] | None = None, *, threads: bool = False) -> Outcome:
    """Run the program of a seed, or some of its steps."""
    chosen = program(seed) if steps is None else steps
    world = make_world(seed, threads=threads)
    story: list[str] = []
    error: BaseException | None = None
    backend, options = LOOPS[{6: "uvloop", 7: "trio"}.get(seed % 8, "asyncio")]
    try:
        anyio.run(_play, world, chosen, story, backend=backend, backend_options=options)
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            raise
        error = _first(raised)
    ops = world.hooks.ops
    story += [
        f"{op.stream} layer {op.layer} of {op.flight!r} failed"
        for op in ops
        if op.state == "failed"
    ]
    return Outcome(
        seed, len(chosen), len(ops), sum(op.state == "failed" for op in ops), error, story
    )


async def _play(world: World, steps: Sequence[Step], story: list[str]) -> None:
    strange: list[object] = []
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: strange.append(context))
    draw = random.Random(f"end {world.seed}")
    limit = 30.0 if world.sim is None else 120.0  # virtual time is free: for what never ends
    with anyio.fail_after(limit):
        async with anyio.create_task_group() as tasks:
            try:
                await _perform_all(world, steps, story, tasks, draw)
            finally:
                tasks.cancel_scope.cancel()
    if strange:
        raise SoakError(f"the loop was told of {strange}")


async def _perform_all(
    world: World,
    steps: Sequence[Step],
    story: list[str],
    tasks: anyio.abc.TaskGroup,
    draw: random.Random,
) -> None:
    made = offload.open_scheduler(world.group, driver=world.driver, limits=world.limits)
    async with made as scheduler:
        player = Player.start(world, scheduler, tasks)
        player.story = story
        for step in steps:
            try:
                await perform(player, step)
            except offload.SchedulerClosedError:
                player.say("it is closed")
                break
        leave = draw.choice(("quiet", "quiet", "now", "drain", "late"))
        if leave == "quiet":
            await _quiet(player)
        elif leave == "drain":
            await scheduler.aclose(drain=True)
        elif leave == "late":
            await scheduler.aclose(drain=True, deadline=scheduler.now() + 2e-5)
        player.say(f"leave: {leave}")
    await _quiet(player)
    player.judge()


async def _quiet(player: Player) -> None:
    """Let everything happen that still can."""
    sim = player.world.sim
    if sim is not None:
        await sim.run_until_idle()
        await sim.advance(1.0)
        await sim.run_until_idle()
        return
    while player.pending:
        player.quiet = anyio.Event()
        await player.quiet.wait()
    for copy in player.model.copies:
        await copy.transfer.source_reusable()


def _first(error: BaseException) -> BaseException:
    """Return the error that matters out of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def shrink(
    outcome: Outcome, *, tries: int = 300, threads: bool = False
) -> tuple[Outcome, list[int]]:
    """Leave out steps as long as the program still fails; return the last failure and what is left."""
    steps = program(outcome.seed)
    kept = list(range(len(steps)))
    size = max(1, len(kept) // 2)
    while tries and kept:
        smaller = False
        for start in range(0, len(kept), size):
            less = kept[:start] + kept[start + size :]
            tries -= 1
            again = play(outcome.seed, [steps[i] for i in less], threads=threads)
            if again.error is not None and type(again.error) is type(outcome.error):
                outcome, kept, smaller = again, less, True
                break
            if not tries:
                break
        if not smaller:
            if size == 1:
                break
            size //= 2
    return outcome, kept
