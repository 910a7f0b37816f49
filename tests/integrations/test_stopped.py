"""Forwards that stop, and what a session with states refuses because it cannot take them back."""

from __future__ import annotations

import anyio
import pytest
import torch

import offload
from offload.integrations.transformers import Session
from tests.integrations.tiny import STATES, Rig, forward, ids, model, rig
from tests.integrations.turns import (
    PREFIX,
    STATEFUL,
    continued,
    evicted,
    expected,
    lose,
    run_chunks,
    same_bits,
    tear,
)

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


async def run_all(r: Rig, session: Session, lengths: list[int]) -> None:
    """Run forwards of so many tokens in one block, the first of them the prefix."""
    with session.use() as cache:
        for length in lengths:
            await r.logits(cache, ids(length, seed=1))


async def refused_and_lost(r: Rig, session: Session) -> None:
    """Have a forward refused inside a block, and raise something else behind it."""
    with session.use() as cache:
        await r.logits(cache, ids(1, seed=8))
        with pytest.raises(offload.RequestError, match="larger max_tokens"):
            await r.logits(cache, ids(80, seed=8))
        raise ArithmeticError


@pytest.mark.parametrize("before", [True, False], ids=["alone", "behind another"])
@pytest.mark.parametrize("name", [name for name in STATES if name != "mamba2"])
def test_a_forward_without_room_is_refused_before_it_writes_a_state(
    name: str, before: bool
) -> None:
    """A session that has less room than a forward needs keeps tokens and states, without any backup."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = r.sessions.open(max_tokens=PREFIX + 6)
            if before:
                await r.use(session, ids(PREFIX, seed=1))
            lengths = [7] if before else [PREFIX, 7]
            with pytest.raises(offload.RequestError, match="larger max_tokens"):
                await run_all(r, session, lengths)
            assert (session.resident, session.tokens) == (True, PREFIX)
            logits = [await r.use(session, ids(1, seed=20)), await r.use(session, ids(5, seed=21))]
            assert same_bits(logits, expected(name, torch.float32)[:2])

    anyio.run(body)


def test_another_error_behind_a_refusal_costs_the_states() -> None:
    """Only the refusal itself leaves the block without a doubt about what was written."""

    async def body() -> None:
        async with rig("jamba", torch.float32) as r:
            session = await evicted(r)
            backed_up = session.tokens
            await session.load()
            with pytest.raises(ArithmeticError):
                await refused_and_lost(r, session)
            assert (session.resident, session.tokens) == (False, backed_up)

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
