"""What a program may do: each step draws its details from a number of its own.

So a step means the same whatever stands before it, and a failing program can be made smaller by leaving
steps out.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread
import attrs

import offload
from offload.driver.base import Event
from tests.soak.forward import PATIENCE, forward
from tests.soak.model import Cell, Copy
from tests.soak.player import Pairs, Player


@attrs.frozen
class Step:
    """One thing that a program does."""

    kind: str
    seed: int


def program(seed: int) -> list[Step]:
    """Draw a program."""
    draw = random.Random(f"program {seed}")
    kinds = list(STEPS)
    weights = [weight for weight, _ in STEPS.values()]
    chosen = draw.choices(kinds, weights, k=draw.randrange(8, 45))
    return [Step(kind, draw.getrandbits(32)) for kind in chosen]


async def perform(player: Player, step: Step) -> None:
    """Do one step, then let some time pass."""
    draw = random.Random(step.seed)
    await STEPS[step.kind][1](player, draw)
    await player.pause(draw)


def draw_own(
    player: Player, draw: random.Random, *, load: bool, most: int = 4
) -> dict[int, list[tuple[int, int]]] | None:
    """Draw (host, device) page pairs for every owner of pages, from pages that are not pinned."""
    own = {}
    for member, device in player.owned:
        if not device:
            continue
        hosts = player.free_pages(member, device=False)
        devices = player.free_pages(member, device=True)
        if not hosts or not devices:
            return None
        number = draw.randrange(1, min(most, len(hosts), len(devices)) + 1)
        sources, targets = (hosts, devices) if load else (devices, hosts)
        if draw.random() < 0.15:
            chosen = draw.choices(sources, k=number)
        else:
            chosen = draw.sample(sources, number)
        ends = draw.sample(targets, number)
        own[member] = list(zip(*((chosen, ends) if load else (ends, chosen)), strict=True))
    return own


def keys_of(own: dict[int, list[tuple[int, int]]]) -> list[tuple[int, bool, int]]:
    """Return the keys under which pages are pinned."""
    return [
        key
        for member, pairs in own.items()
        for host, device in pairs
        for key in ((member, False, host), (member, True, device))
    ]


def _options(player: Player, draw: random.Random, pairs: Pairs) -> dict[str, object]:
    options: dict[str, object] = {}
    if draw.random() < 0.3:
        options["priority"] = draw.choice((-1, 1, 2))
    if draw.random() < 0.12:
        scale = 1.0 if player.world.sim is not None else 100.0
        options["deadline"] = player.scheduler.now() + scale * draw.choice((1e-6, 1e-5, 1e-4, 1e-3))
    if draw.random() < 0.1:
        options["io_backend"] = "cpu"
    events: list[Event] = []
    for member, _, device in pairs:
        event = player.computed.get((member, device))
        if event is not None and event not in events:
            events.append(event)
    if draw.random() < 0.3:
        options["after"] = [event for event in events if not event.query()] or ()
    return options


async def _submit(player: Player, draw: random.Random, *, load: bool) -> None:
    own = draw_own(player, draw, load=load)
    if own is None:
        return
    pairs = player.pairs(own)
    options = _options(player, draw, pairs)
    word = "load" if load else "backup"
    if draw.random() < 0.5:
        submit_now(player, draw, word, own, options)
        return
    keys = keys_of(own)
    player.pin(keys, 1)
    scheduler = player.scheduler

    outside = player.world.sim is None and draw.random() < 0.4

    async def call(**arguments: object) -> offload.Transfer:
        if outside:
            face = scheduler.from_thread
            return await anyio.to_thread.run_sync(
                partial(face.load if load else face.backup, **arguments, timeout=PATIENCE)  # type: ignore[arg-type]
            )
        return await (scheduler.load if load else scheduler.backup)(**arguments)  # type: ignore[arg-type]

    async def submit() -> None:
        try:
            with anyio.CancelScope() as scope:
                if draw.random() < 0.1:
                    scope.cancel()
                transfer = await call(**player.arguments(own), **options)
                taken(player, draw, transfer, pairs, f"{word} {own} {options}")
        except (TimeoutError, offload.RequestError) as error:
            player.say(f"{word} {own} {options}: {error}")
        finally:
            player.pin(keys, -1)

    player.spawn(submit)
    if draw.random() < 0.5:
        await anyio.lowlevel.checkpoint()


def submit_now(
    player: Player,
    draw: random.Random,
    word: str,
    own: dict[int, list[tuple[int, int]]],
    options: dict[str, object],
) -> Copy | None:
    """Submit without waiting for room."""
    call = getattr(player.scheduler, f"{word}_nowait")
    try:
        transfer = call(**player.arguments(own), **options)
    except anyio.WouldBlock:
        player.say(f"{word} {own}: would block")
        return None
    except offload.RequestError as error:
        player.say(f"{word} {own}: {error}")
        return None
    return taken(player, draw, transfer, player.pairs(own), f"{word} {own} {options}")


def taken(
    player: Player, draw: random.Random, transfer: offload.Transfer, pairs: Pairs, what: str
) -> Copy:
    """Note an admitted transfer; perhaps wait for it somewhere."""
    copy = player.note(transfer, pairs)
    player.say(f"{what} is transfer {transfer.id}")
    if draw.random() < 0.4:
        player.spawn(lambda: _watch(player, draw, transfer, copy))
    return copy


async def _watch(
    player: Player, draw: random.Random, transfer: offload.Transfer, copy: Copy
) -> None:
    """Wait for a layer or for all of it; then read what must be there."""
    layers = list(range(transfer.num_layers))
    if draw.random() < 0.5:
        layers = [draw.choice(layers)]
        await transfer.layer(layers[0])
    else:
        await transfer
    for layer in layers:
        cells = [
            cell
            for cell in _targets(player, copy, layer)
            if player.model.cells[cell].copy is copy and not player.shared(cell)
        ]
        player.touch(reads=cells)
        player.look(f"after transfer {transfer.id} landed layer {layer}", cells)


def _targets(player: Player, copy: Copy, model_layer: int) -> list[Cell]:
    found = []
    for member, host, device in copy.pairs:
        layer = player.model.pool_layers[member][model_layer]
        if layer is not None:
            found.append(Cell(member, copy.load, layer, device if copy.load else host))
    return found


async def load(player: Player, draw: random.Random) -> None:
    """Submit a load."""
    await _submit(player, draw, load=True)


async def backup(player: Player, draw: random.Random) -> None:
    """Submit a backup."""
    await _submit(player, draw, load=False)


async def join(player: Player, draw: random.Random) -> None:
    """Submit an earlier load again, to share it if it still runs."""
    loads = [copy for copy in player.model.copies if copy.load and not copy.transfer.done]
    if not loads:
        await _submit(player, draw, load=True)
        return
    copy = draw.choice(loads)
    own: dict[int, list[tuple[int, int]]] = {}
    for member, device in player.owned:
        if device:
            own[member] = [(h, d) for index, h, d in copy.pairs if index == member]
            if any(
                h not in player.free_pages(member, device=False)
                or d not in player.free_pages(member, device=True)
                for h, d in own[member]
            ):
                return
    layers = range(player.world.group.num_layers)
    cells = [cell for layer in layers for cell in _targets(player, copy, layer)]
    if any(player.model.cells[cell].copy is None for cell in cells):
        return  # compute has written there since, and no scheduler can know
    if draw.random() < 0.5:  # somebody comes between: then it must be copied again
        between = draw_own(player, draw, load=True)
        if between is not None:
            between[0] = [(between[0][0][0], own[0][0][1])]
            submit_now(player, draw, "load", between, {})
    submit_now(player, draw, "load", own, {"join": True, "priority": draw.choice((-1, 0, 2))})


async def hold(player: Player, draw: random.Random) -> None:
    """Submit several requests in one `hold`: one batch, where they share no page."""
    only = draw.choice((True, False, None))
    used: set[tuple[int, bool, int]] = set()
    with player.scheduler.hold():
        for _ in range(draw.randrange(1, 5)):
            way = draw.random() < 0.5 if only is None else only
            own = draw_own(player, draw, load=way, most=2)
            if own is not None and (only is None or not used & set(keys_of(own))):
                used |= set(keys_of(own))
                submit_now(player, draw, "load" if way else "backup", own, {})
    if draw.random() < 0.3:
        player.world.hooks.fail(
            OSError("planted"), nth=draw.randrange(1, 4), torn=draw.random() < 0.5
        )
    if draw.random() < 0.5:
        await forward(player, draw)


async def cancel(player: Player, draw: random.Random) -> None:
    """Cancel one of the latest transfers."""
    transfers = [copy.transfer for copy in player.model.copies[-8:]]
    live = [transfer for transfer in transfers if not transfer.done]
    if live:
        transfer = draw.choice(live)
        player.say(f"cancel transfer {transfer.id}")
        transfer.cancel()


async def alloc(player: Player, draw: random.Random) -> None:
    """Allocate pages; compute on fresh device pages at once, as their owner may."""
    member, device = draw.choice(list(player.owned))
    try:
        pages = player.alloc(member, draw.randrange(1, 4), device=device)
    except offload.OutOfPagesError:
        return
    player.say(f"alloc {'device' if device else 'host'} pages {pages} of member {member}")


async def free(player: Player, draw: random.Random) -> None:
    """Free pages, whatever still moves there."""
    member, device = draw.choice(list(player.owned))
    pages = player.free_pages(member, device=device)
    if len(pages) < 3:
        return
    given = draw.sample(pages, draw.randrange(1, 3))
    for page in given:
        player.owned[member, device].remove(page)
    player.world.pool(member, device=device).pages.free(given)
    player.say(f"free {'device' if device else 'host'} pages {given} of member {member}")


async def fill(player: Player, draw: random.Random) -> None:
    """Write host pages from outside, once nothing moves there."""
    pages = player.free_pages(0, device=False)
    if not pages:
        return
    page = draw.choice(pages)
    player.pin([(0, False, page)], 1)

    async def write() -> None:
        try:
            await player.scheduler.idle(host_pages=[page])
            layers = player.model.pool_layers[0]
            cells = [Cell(0, False, layer, page) for layer in layers if layer is not None]
            player.touch(writes=cells)
            for cell in cells:
                player.world.write(cell, player.model.write(cell))
            player.say(f"filled host page {page}")
        finally:
            player.pin([(0, False, page)], -1)

    player.spawn(write)


async def wait(player: Player, draw: random.Random) -> None:
    """Let much happen."""
    if player.world.sim is not None:
        await player.world.sim.advance(draw.choice((5e-5, 3e-4)))
    else:
        await anyio.sleep(0.001)


async def idle(player: Player, draw: random.Random) -> None:
    """Let everything happen."""
    if player.world.sim is not None:
        await player.world.sim.run_until_idle()


async def close(player: Player, draw: random.Random) -> None:
    """Close the scheduler while things go on."""
    if draw.random() < 0.7:
        return
    drain = draw.random() < 0.5
    player.say(f"aclose(drain={drain})")
    player.spawn(lambda: player.scheduler.aclose(drain=drain))


async def crowd(player: Player, draw: random.Random) -> None:
    """Let many threads come while the loop is busy."""
    from tests.soak import crowd as made  # it takes up what these steps do

    await made.crowd(player, draw)


STEPS: dict[str, tuple[int, Callable[[Player, random.Random], Awaitable[None]]]] = {
    "load": (22, load),
    "backup": (16, backup),
    "forward": (14, forward),
    "cancel": (9, cancel),
    "alloc": (6, alloc),
    "free": (6, free),
    "hold": (8, hold),
    "join": (8, join),
    "fill": (4, fill),
    "wait": (6, wait),
    "idle": (2, idle),
    "close": (1, close),
    "crowd": (2, crowd),
}
"""Weight and action by name."""
