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
from tests.integrations.tiny import Rig, forward, ids, model, poison, rig
from tests.integrations.turns import (
    PREFIX,
    STATEFUL,
    continued,
    evicted,
    expected,
    run_chunks,
    same_bits,
    tear,
)

ONE_OF_EACH = pytest.mark.parametrize("name", ["mamba2", "jamba", "falcon_h1", "lfm2"])
"""States alone; in other layers than attention; in the same; and without a recurrent one."""


async def lose(r: Rig, session: Session) -> None:
    """Run a forward in a block that raises behind it."""
    with session.use() as cache:
        await r.logits(cache, ids(1, seed=8))
        raise ArithmeticError


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


# Forwards that stop ----------------------------------------------------------------------------------


@STATEFUL
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_forward_that_stops_costs_what_was_not_backed_up(
    name: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States written half way cannot be taken back: the session falls back to its last backup."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            backed_up = session.tokens
            await session.load()
            with monkeypatch.context() as patch:
                tear(patch, layer)
                with pytest.raises(ArithmeticError):
                    await r.use(session, ids(3, seed=8))
            assert (session.resident, session.tokens) == (False, backed_up)
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


@pytest.mark.parametrize("name", ["jamba", "mamba2"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_forward_behind_one_that_stopped_is_refused(
    name: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside one block of `use` too, nothing is computed from states that were written half way."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            await session.load()
            with session.use() as cache:
                with monkeypatch.context() as patch:
                    tear(patch, layer)
                    with pytest.raises(ArithmeticError):
                        await r.logits(cache, ids(3, seed=8))
                with pytest.raises(offload.RequestError, match="the one before it stopped"):
                    await r.logits(cache, ids(3, seed=8))
            assert not session.resident
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


@pytest.mark.parametrize("name", ["jamba", "mamba2"])
def test_a_forward_that_stopped_outside_the_cache_is_seen_too(name: str) -> None:
    """Layer 0 is come to again before the others were: the forward before did not get there."""

    def stop(module: torch.nn.Module, args: object) -> None:
        raise ArithmeticError

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            await session.load()
            lists = (each for each in r.model.modules() if isinstance(each, torch.nn.ModuleList))
            layers = next(each for each in lists if len(each) == 4)
            with session.use() as cache:
                hook = layers[1].register_forward_pre_hook(stop)
                with pytest.raises(ArithmeticError):
                    await r.logits(cache, ids(1, seed=8))
                hook.remove()
                with pytest.raises(offload.RequestError, match="the one before it stopped"):
                    await r.logits(cache, ids(1, seed=8))
            assert not session.resident
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


def test_a_block_that_raises_costs_what_was_not_backed_up() -> None:
    """Whether the last forward was whole is not known when its block raises: it does not count."""

    async def body() -> None:
        async with rig("nemotron_h", torch.float32) as r:
            session = await evicted(r)
            await session.load()
            with pytest.raises(ArithmeticError):
                await lose(r, session)
            assert (session.resident, session.tokens) == (False, PREFIX)
            assert same_bits(await continued(r, session), expected("nemotron_h", torch.float32))

    anyio.run(body)


def test_a_new_session_that_stops_is_empty() -> None:
    """What was never backed up is gone, and the session can start again."""

    async def body() -> None:
        async with rig("jamba", torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            with pytest.raises(ArithmeticError):
                await lose(r, session)
            assert session.tokens == 0
            await session.load()
            await r.use(session, ids(PREFIX, seed=1))
            logits = await run_chunks(r, session)
            assert same_bits(logits, expected("jamba", torch.float32))

    anyio.run(body)


# Refusals --------------------------------------------------------------------------------------------


def refusal(r: Rig, session: Session, what: str) -> None:
    """Do something that a session with states does not do."""
    cache = session.cache
    if what == "crop":
        cache.crop(-1)
    elif what == "guesses":
        cache.activate_past_recording()
    elif what == "gradients":
        r.model(ids(3, seed=1), past_key_values=cache)
    elif what == "dtype":
        forward(model("jamba", torch.bfloat16), cache, ids(3, seed=1))
    elif what == "batch":
        forward(r.model, cache, ids(3, seed=1).expand(2, 3))


@pytest.mark.parametrize("what", ["crop", "guesses", "gradients", "dtype", "batch"])
def test_what_a_session_with_states_cannot_do_raises(what: str) -> None:
    """Going back, gradients, another dtype, batches: a typed error, and no token is counted."""

    async def body() -> None:
        async with rig("jamba", torch.float32) as r:
            session = await evicted(r)
            await session.load()
            with pytest.raises(offload.OffloadError) as caught, session.use():
                refusal(r, session, what)
            assert isinstance(caught.value, ValueError)
            assert session.tokens == PREFIX
            logits = await (run_chunks if session.resident else continued)(r, session)
            assert same_bits(logits, expected("jamba", torch.float32))

    anyio.run(body)


@pytest.mark.parametrize("moved", [False, True])
def test_later_states_take_the_dtype_of_the_first(moved: bool) -> None:
    """As in transformers: what the first forward wrote decides, here and after a load."""

    async def body() -> None:
        async with rig("jamba", torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            with session.use() as cache:
                await r.logits(cache, ids(3, seed=1))
            if moved:
                await session.evict()
                await (await session.load())
            with session.use() as cache, torch.inference_mode():
                held = cache.get_recurrent_state(0)
                assert held is not None
                state = held.double() + 0.1
                assert torch.equal(cache.update_recurrent_state(state, 0), state.float())
                for layer in (1, 2, 3):
                    cache.residency.visit(layer, "pass")

    anyio.run(body)


def test_a_state_that_was_not_measured_is_refused() -> None:
    """A conv model that came to write a recurrent state would lose it: it raises."""

    async def body() -> None:
        async with rig("lfm2", torch.float32) as r:
            session = r.sessions.open(max_tokens=8)
            state = torch.zeros(1, 2, 2)
            with (
                torch.inference_mode(),
                session.use() as cache,
                pytest.raises(offload.GeometryError, match="recurrent state 0 of layer 0"),
            ):
                cache.update_recurrent_state(state, 0)

    anyio.run(body)
