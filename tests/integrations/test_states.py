"""States are one slot per session: copied whole, valid for the tokens at their backup, never cut back."""

from __future__ import annotations

import anyio
import pytest
import torch

import offload
from offload.driver.hooks import Hooks
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers import Kept, PagedCache, Session, SessionPools, Sessions
from offload.integrations.transformers.kept import Attention, KeptLayer, StatePart
from offload.integrations.transformers.plan import MemberPlan, plans
from tests.integrations.tiny import Rig, forward, ids, poison, rig
from tests.integrations.turns import (
    PREFIX,
    STATEFUL,
    continued,
    evicted,
    expected,
    lose,
    same_bits,
)

ONE_OF_EACH = pytest.mark.parametrize("name", ["mamba2", "jamba", "falcon_h1", "lfm2"])
"""States alone; in other layers than attention; in the same; and without a recurrent one."""


# Backups -------------------------------------------------------------------------------------------


@ONE_OF_EACH
def test_states_move_whole_whenever_a_forward_ran(name: str) -> None:
    """Each backup after a forward moves the new pages and the whole slot; with no forward, nothing."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            page, slot = r.pools.page_bytes, r.pools.slot_bytes
            await r.use(session, ids(10, seed=1))
            assert await session.backup() == 3 * page + slot
            assert await session.backup() == 0
            await r.use(session, ids(1, seed=2))
            assert await session.backup() == page + slot
            await r.use(session, ids(5, seed=3))
            assert await session.evict() == 2 * page + slot
            transfer = await session.load()
            await transfer
            assert transfer.nbytes == 4 * page + slot
            assert await session.evict() == 0

    anyio.run(body)


@ONE_OF_EACH
def test_a_failed_backup_leaves_the_last_one_whole(name: str) -> None:
    """A backup that fails at its last layer has overwritten nothing of the one before."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            backed_up = session.tokens
            await continued(r, session)
            hooks.fail(OSError("no such slot"), stream="backup", layer=3, nth=1)
            with pytest.raises(offload.TransferFailed):
                await session.evict()
            assert session.resident
            with pytest.raises(ArithmeticError):
                await lose(r, session)
            assert session.tokens == backed_up
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


@ONE_OF_EACH
def test_a_session_has_one_slot_on_the_host(name: str) -> None:
    """Backups take a fresh slot each, and give the one before back."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            host = r.pools.members[-1].host.pages
            free = host.num_free
            session = r.sessions.open(max_tokens=80)
            for index in range(5):
                await r.use(session, ids(2, seed=index))
                await session.backup()
                assert host.num_free == free - 1
            session.close()
            assert host.num_free == free

    anyio.run(body)


def test_a_full_host_pool_leaves_the_states_as_they_were() -> None:
    """Without a free slot a backup raises, keeps the last one, and works once there is room."""

    async def body() -> None:
        async with rig("jamba", torch.float32) as r:
            session = await evicted(r)
            await continued(r, session)
            host = r.pools.members[-1].host.pages
            taken = host.alloc(host.num_free)
            with pytest.raises(offload.OutOfPagesError, match="pool 'state'"):
                await session.backup()
            with pytest.raises(ArithmeticError):
                await lose(r, session)
            host.free(taken)
            assert same_bits(await continued(r, session), expected("jamba", torch.float32))

    anyio.run(body)


def test_a_backup_waits_for_no_forward() -> None:
    """While a forward may change the states they are not copied, and the other way round."""
    hooks = Hooks()

    async def body() -> None:
        async with rig("jamba", torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = r.sessions.open(max_tokens=80)
            with session.use() as cache:
                await r.logits(cache, ids(PREFIX, seed=1))
                with pytest.raises(offload.RequestError, match="used by a forward"):
                    await session.backup()
            gate = hooks.gate(stream="backup")
            async with anyio.create_task_group() as group:
                group.start_soon(session.backup)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(offload.RequestError, match="being backed up"), session.use():
                    pass
                gate.open()

    anyio.run(body)


# Sessions ------------------------------------------------------------------------------------------


@ONE_OF_EACH
def test_sessions_take_turns_on_fewer_slots(name: str) -> None:
    """Three sessions on two slots, a token each in turn: none sees another's state."""

    async def body() -> None:
        async with rig(name, torch.float32, num_slots=2) as r:
            sessions: list[Session] = []
            for _ in range(3):
                sessions.append(await opened(r, sessions))
            stocks = [r.stock() for _ in sessions]
            for turn in range(3):
                for number, (session, stock) in enumerate(zip(sessions, stocks, strict=True)):
                    if not session.resident:
                        await idle(sessions)
                        await session.load()
                    chunk = ids(3 if turn == 0 else 1, seed=10 * turn + number)
                    ours = await r.use(session, chunk)
                    assert same_bits([ours], [forward(r.model, stock, chunk)])

    async def idle(sessions: list[Session]) -> None:
        resident = [session for session in sessions if session.resident]
        if len(resident) == 2:
            await resident[0].evict()

    async def opened(r: Rig, sessions: list[Session]) -> Session:
        await idle(sessions)
        return r.sessions.open(max_tokens=20)

    anyio.run(body)


def test_a_device_without_a_slot_refuses_the_session() -> None:
    """`open` takes pages and a slot, or neither."""

    async def body() -> None:
        async with rig("jamba", torch.float32, num_slots=1) as r:
            session = r.sessions.open(max_tokens=8)
            free = r.device.pages.num_free
            with pytest.raises(offload.OutOfPagesError, match="pool 'state'"):
                r.sessions.open(max_tokens=8)
            assert r.device.pages.num_free == free
            session.close()
            r.sessions.open(max_tokens=8)

    anyio.run(body)


@STATEFUL
def test_a_reset_session_is_a_new_one(name: str) -> None:
    """After `reset` nothing of the old states is left."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            await r.use(session, ids(7, seed=6))
            await session.backup()
            session.cache.reset()
            assert session.tokens == 0
            await r.use(session, ids(PREFIX, seed=1))
            await session.evict()
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


CONV = tuple(StatePart("conv", number, (3, 4), torch.bfloat16) for number in range(2))
WIDE = (
    StatePart("conv", 0, (5, 4), torch.float32),
    StatePart("recurrent", 0, (2, 3), torch.float64),
)
MADE_UP = {
    "states": Kept("made_up", torch.device("cpu"), (KeptLayer(state=CONV), KeptLayer(state=WIDE))),
    "states and tokens": Kept(
        "made_up",
        torch.device("cpu"),
        (
            KeptLayer(state=WIDE),
            KeptLayer(attention=Attention(1, 2, 2, torch.float32, latent=False)),
            KeptLayer(),
            KeptLayer(state=CONV),
        ),
    ),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_states_of_several_sizes_go_by_one_slot(name: str) -> None:
    """Layers whose states differ stand in members of their own, which share a session's one slot."""
    kept = MADE_UP[name]
    pools = SessionPools(kept, **{name: pair(plan) for name, plan in plans(kept, 4).items()})

    def write(cache: PagedCache, value: float) -> None:
        for index in kept.keeping:
            layer = kept.layers[index]
            if layer.attention is not None:
                tokens = torch.full((1, 1, 3, 2), value)
                cache.update(tokens, tokens, index)
            for part in layer.state or ():
                state = torch.full((1, *part.shape), value, dtype=part.dtype)
                getattr(cache, f"update_{part.role}_state")(state, index, part.number)

    def holds(cache: PagedCache, value: float) -> bool:
        seen: list[torch.Tensor] = []
        for index in kept.keeping:
            cache.residency.visit(index, "pass")
            seen += [
                getattr(cache, f"get_{part.role}_state")(index, part.number)
                for part in kept.layers[index].state or ()
            ]
        return all(bool((state == value).all()) for state in seen)

    async def body() -> None:
        async with offload.open_scheduler(pools) as scheduler:
            sessions = [Sessions(scheduler).open(max_tokens=8) for _ in range(2)]
            for value, session in zip((1.0, 2.0), sessions, strict=True):
                with session.use() as cache, torch.inference_mode():
                    write(cache, value)
                await session.evict()
            for member in pools.members:
                poison(member.device)
            for value, session in zip((2.0, 1.0), reversed(sessions), strict=True):
                await (await session.load())
                with session.use() as cache, torch.inference_mode():
                    assert holds(cache, value)

    anyio.run(body)


def pair(plan: MemberPlan) -> tuple[offload.DevicePool, offload.HostPool]:
    """Return small pools for a member."""
    device = offload.DevicePool.allocate(plan.spec, num_pages=5)
    return device, offload.HostPool.like(device, num_pages=6)
