"""A forward pass: layer by layer it waits for loads, computes, and says what its backup may copy."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import anyio.to_thread
import attrs

import offload
from tests.soak.model import Copy
from tests.soak.player import Player

PATIENCE = 20.0
"""Seconds after which a thread that waits is stuck."""


@attrs.define(eq=False)
class Pass:
    """One forward pass and the pages that are its own while it runs."""

    player: Player
    draw: random.Random
    pages: dict[int, list[int]]
    """Device pages by member."""

    before: list[Copy]
    """Copies whose pages these are, too: each is waited for, layer by layer."""

    backup: Copy | None = None
    broken: set[Copy] = attrs.field(factory=set)

    async def run(self) -> None:
        """Run the layers in some order; perhaps break off half way."""
        layers = list(range(self.player.world.group.num_layers))
        if self.draw.random() < 0.3:
            self.draw.shuffle(layers)
        stop = self.draw.randrange(len(layers)) if self.draw.random() < 0.1 else len(layers)
        for position, layer in enumerate(layers):
            if position == stop:
                self.player.say("a forward breaks off")
                if self.backup is not None:
                    self.backup.transfer.cancel()
                return
            await self._wait(layer)
            self._compute(layer)
            self._written(layer)
            if self.draw.random() < 0.3:
                await anyio.lowlevel.checkpoint()

    def run_in_thread(self) -> None:
        """Run the layers on a thread that is not the loop's, blocking where it has to wait."""
        for layer in range(self.player.world.group.num_layers):
            for copy in self.before:
                if copy not in self.broken:
                    try:
                        copy.transfer.wait_layer(layer, timeout=PATIENCE)
                    except offload.TransferFailed:
                        self.broken.add(copy)
                        copy.transfer.wait_source_reusable(timeout=PATIENCE)
            self._compute(layer)
            self._written(layer)

    async def _wait(self, layer: int) -> None:
        """Order compute after every copy that touches the pages, or wait until it is over."""
        for copy in self.before:
            if copy not in self.broken:
                try:
                    await self._fence(copy.transfer, layer)
                except offload.TransferFailed:
                    self.broken.add(copy)
                    await copy.transfer.source_reusable()

    async def _fence(self, transfer: offload.Transfer, layer: int) -> None:
        if self.player.world.sim is None or self.draw.random() < 0.3:
            await transfer.layer(layer)
        else:
            await transfer.issued(layer)
            transfer.fence(layer)

    def _compute(self, layer: int) -> None:
        player, model = self.player, self.player.model
        cells = [
            cell
            for member, pages in self.pages.items()
            for cell in model.cells_of(member, pages, layer)
        ]
        reads = [cell for cell in cells if self.draw.random() < 0.7]
        meant = [(cell, model.cells[cell]) for cell in reads]
        stamps = [(cell, model.write(cell)) for cell in cells if self.draw.random() < 0.6]

        def work() -> None:
            for cell, version in meant:
                what = f"a forward at layer {layer}"
                model.seen.append((what, cell, version, player.world.read(cell)))
            for cell, stamp in stamps:
                player.world.write(cell, stamp)

        seconds = self.draw.choice((0.0, 1e-6, 2e-5, 1e-4))
        player.compute(work, reads, [cell for cell, _ in stamps], seconds)

    def _written(self, layer: int) -> None:
        if self.backup is not None:
            self.player.model.written(self.backup, layer)
            self.backup.transfer.layer_written(layer)


async def forward(player: Player, draw: random.Random) -> None:
    """Start a forward pass on some device pages, perhaps with a streaming backup and a late load."""
    own = {}
    for member, device in player.owned:
        if device:
            free = player.free_pages(member, device=True)
            if not free:
                return
            own[member] = _recent(player, draw, member, free)
    pages = player.followers(own[0], own)
    one = Pass(player, draw, pages, player.touching(pages))
    say = f"forward on {own}"
    if draw.random() < 0.6:
        one.backup = _stream(player, draw, own)
        say += f" with streaming backup {one.backup.request}" if one.backup is not None else ""
    if draw.random() < 0.3:
        late = _late_load(player, draw, own)
        if late is not None:
            one.before.append(late)
            say += f" and late load {late.request}"
    player.say(f"{say} after {[copy.request for copy in one.before]}")
    threaded = player.world.sim is None and draw.random() < 0.5
    if threaded:
        one.draw = random.Random(draw.random())
    keys = [(member, True, page) for member, some in own.items() for page in some]
    player.pin(keys, 1)

    async def run() -> None:
        try:
            if threaded:
                await anyio.to_thread.run_sync(one.run_in_thread)
            else:
                await one.run()
        finally:
            player.pin(keys, -1)

    player.spawn(run)


def _recent(player: Player, draw: random.Random, member: int, free: list[int]) -> list[int]:
    """Draw some of the pages that the program owns: often those that a copy has just been given."""
    number = draw.randrange(1, min(3, len(free)) + 1)
    if player.model.copies and draw.random() < 0.5:
        copy = draw.choice(player.model.copies[-3:])
        touched = [page for page in free if page in copy.device_pages(member)]
        if touched:
            return touched[:number]
    return draw.sample(free, number)


def _stream(player: Player, draw: random.Random, own: dict[int, list[int]]) -> Copy | None:
    return _submit(player, draw, own, player.scheduler.backup_nowait, streaming=True)


def _late_load(player: Player, draw: random.Random, own: dict[int, list[int]]) -> Copy | None:
    return _submit(player, draw, own, player.scheduler.load_nowait)


def _submit(
    player: Player,
    draw: random.Random,
    own: dict[int, list[int]],
    call: Callable[..., offload.Transfer],
    *,
    streaming: bool = False,
) -> Copy | None:
    chosen = {}
    for member, devices in own.items():
        hosts = player.free_pages(member, device=False)
        if len(hosts) < len(devices):
            return None
        chosen[member] = list(zip(draw.sample(hosts, len(devices)), devices, strict=True))
    options = {"streaming": True} if streaming else {}
    try:
        transfer = call(**player.arguments(chosen), **options)
    except (anyio.WouldBlock, offload.RequestError, offload.SchedulerClosedError):
        return None
    return player.note(transfer, player.pairs(chosen), streaming=streaming)
