"""A crowd: the loop is busy for a while, and meanwhile many threads submit, cancel, and say what is written."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import attrs

import offload
from tests.soak.model import Copy
from tests.soak.player import Player, SoakError
from tests.soak.steps import draw_own, keys_of, taken

Own = dict[int, list[tuple[int, int]]]
PATIENCE = 20.0
REFUSED = (TimeoutError, offload.RequestError, offload.SchedulerClosedError)


@attrs.define(eq=False)
class Comer:
    """One thread, and what came of its call."""

    call: Callable[[], object]
    own: Own | None
    """What it submits, if that is what it does."""

    load: bool = False
    answer: object = None

    def run(self) -> None:
        """Call."""
        try:
            self.answer = self.call()
        except BaseException as error:  # noqa: BLE001 - judged on the loop
            self.answer = error


async def crowd(player: Player, draw: random.Random) -> None:
    """Let threads come while the loop is busy; take note of what they submitted, in the order of admission."""
    if player.world.sim is not None:
        return  # there it would be another program each time
    stream = _stream(player, draw)
    written = [] if stream is None else _pages(player, stream)
    player.pin(written, 1)  # nobody else comes between these layers
    comers = [] if stream is None else _writers(player, stream)
    for _ in range(draw.choice((2, 8, 30, 300))):
        comer = _comer(player, draw)
        if comer is not None:
            comers.append(comer)
    keys = [key for comer in comers if comer.own is not None for key in keys_of(comer.own)]
    player.pin(keys, 1)
    draw.shuffle(comers)
    try:
        await _come(player, draw, comers)
    finally:
        player.pin([*written, *keys], -1)


def _pages(player: Player, copy: Copy) -> list[tuple[int, bool, int]]:
    owners = {member for member, _ in player.owned}
    return [
        key
        for member, host, device in copy.pairs
        if member in owners
        for key in ((member, False, host), (member, True, device))
    ]


def _stream(player: Player, draw: random.Random) -> Copy | None:
    """Submit a streaming backup for threads to write."""
    own = draw_own(player, draw, load=False, most=2)
    if own is None or draw.random() < 0.5:
        return None
    try:
        transfer = player.scheduler.backup_nowait(**player.arguments(own), streaming=True)  # type: ignore[arg-type]
    except (anyio.WouldBlock, offload.RequestError):
        return None
    player.say(f"a crowd writes {own}, streaming backup {transfer.id}")
    return player.note(transfer, player.pairs(own), streaming=True)


def _writers(player: Player, stream: Copy) -> list[Comer]:
    """Nothing is computed there meanwhile, so all layers are written now, whenever that is said."""
    comers = []
    for layer in range(stream.transfer.num_layers):
        player.model.written(stream, layer)
        comers.append(Comer(partial(stream.transfer.layer_written, layer), None))
    return comers


def _comer(player: Player, draw: random.Random) -> Comer | None:
    live = [copy.transfer for copy in player.model.copies[-12:] if not copy.transfer.done]
    if live and draw.random() < 0.2:
        return Comer(draw.choice(live).cancel, None)
    load = draw.random() < 0.6
    own = draw_own(player, draw, load=load, most=2)
    if own is None:
        return None
    face = player.scheduler.from_thread
    call = partial(
        face.load if load else face.backup,
        **player.arguments(own),  # type: ignore[arg-type]
        priority=draw.choice((0, 0, 0, 2)),
        timeout=draw.choice((0, 0.01, 1.0)),
    )
    return Comer(call, own, load)


async def _come(player: Player, draw: random.Random, comers: list[Comer]) -> None:
    threads = [threading.Thread(target=comer.run, daemon=True) for comer in comers]
    for thread in threads:
        thread.start()
    time.sleep(draw.choice((0.0, 0.001, 0.01)))  # noqa: ASYNC251 - the loop is busy
    await anyio.lowlevel.checkpoint()
    _judge_bound(player)

    def join() -> bool:
        for thread in threads:
            thread.join(PATIENCE)
        return any(thread.is_alive() for thread in threads)

    stuck = await anyio.to_thread.run_sync(join)
    _judge_bound(player)
    if stuck:
        raise SoakError("a thread of a crowd has no answer")
    _note(player, draw, comers)


def _judge_bound(player: Player) -> None:
    """Check that no more is queued than may be, unless it is one request."""
    now, most = player.scheduler.statistics(), player.world.limits.max_queued_bytes
    if most is not None and now.queued_requests > 1 and now.queued_bytes > most:
        raise SoakError(f"{now.queued_bytes} bytes are queued, and {most} may be")


def _note(player: Player, draw: random.Random, comers: list[Comer]) -> None:
    admitted: list[tuple[offload.Transfer, Comer]] = []
    for comer in comers:
        answer = comer.answer
        if isinstance(answer, offload.Transfer):
            admitted.append((answer, comer))
        elif isinstance(answer, BaseException) and not isinstance(answer, REFUSED):
            raise SoakError(f"a thread of a crowd was told {answer!r}") from answer
    player.say(f"a crowd of {len(comers)} threads has come, and {len(admitted)} were admitted")
    for transfer, comer in sorted(admitted, key=lambda each: each[0].id):
        assert comer.own is not None
        what = f"{'load' if comer.load else 'backup'} {comer.own} of a thread"
        taken(player, draw, transfer, player.pairs(comer.own), what)
