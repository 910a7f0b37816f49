"""A session's cache computes what an un-offloaded run computes, bit for bit; damage and haste show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import anyio
import anyio.to_thread
import pytest
import torch
from transformers.cache_utils import CacheLayerMixin

import offload
from offload.driver.hooks import Hooks
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers.residency import Residency
from tests.integrations.tiny import CONFIGS, STATES, Rig, forward, generate, ids, kept, rig
from tests.integrations.turns import (
    ALL,
    CHUNKS,
    CROPPABLE,
    DTYPE,
    PREFIX,
    STATEFUL,
    continued,
    evicted,
    expected,
    same_bits,
)

PAGED = [name for name in CONFIGS if name != "mamba2"]
INDEXED = ["deepseek_v32"]
ON_TRIO = ("llama", "deepseek_v32", "mamba2", "zamba2")
"""Of each kind of group one: what a backend could change is not in the model."""


# Equal bits --------------------------------------------------------------------------------------


async def restores(name: str, dtype: torch.dtype) -> None:
    """Compare every logit behind a prefix that was away with that of a run where it never left."""
    async with rig(name, dtype) as r:
        logits = await continued(r, await evicted(r))
        assert same_bits(logits, expected(name, dtype))
        assert all(torch.isfinite(each).all() for each in logits)


@ALL
@DTYPE
def test_logits_after_a_load_are_those_of_a_run_without_offload(
    name: str, dtype: torch.dtype
) -> None:
    """Backed up, evicted, overwritten, loaded: every logit keeps its bits."""
    anyio.run(restores, name, dtype)


@pytest.mark.parametrize("name", ON_TRIO)
def test_logits_after_a_load_are_the_same_on_trio(name: str) -> None:
    """The event loop makes no difference."""
    anyio.run(restores, name, torch.float32, backend="trio")


@ALL
def test_a_session_that_comes_and_goes_keeps_its_bits(name: str) -> None:
    """Evicted and loaded before every chunk, on other pages and slots each time: the bits stay."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            logits: list[torch.Tensor] = []
            for index, count in enumerate(CHUNKS):
                blocker = r.pools.take_device(index)
                await session.load()
                logits.append(await r.use(session, ids(count, seed=20 + index)))
                await session.evict()
                r.pools.free("device", blocker)
                r.poison_devices()
            assert same_bits(logits, expected(name, torch.float32))

    anyio.run(body)


@ALL
def test_generate_gives_the_same_tokens(name: str) -> None:
    """`generate()` behind a loaded prefix continues like `generate()` behind one that never left."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            prompt = torch.cat([ids(PREFIX, seed=1), ids(3, seed=2)], dim=1)
            await session.load()
            tokens = await r.generated(session, prompt, 8)
            cache = r.stock()
            forward(r.model, cache, ids(PREFIX, seed=1))
            assert tokens.tolist() == generate(r.model, cache, prompt, 8).tolist()

    anyio.run(body)


@CROPPABLE
def test_assisted_generation_rolls_the_cache_back(name: str) -> None:
    """Guesses that were wrong are cropped again, also past a window: the tokens stay the same."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            prompt = torch.cat([ids(PREFIX, seed=1), ids(3, seed=2), ids(3, seed=2)], dim=1)
            with session.use() as cache:
                guessing = partial(generate, r.model, cache, prompt, 8, guesses=3)
                tokens = await anyio.to_thread.run_sync(guessing)
            assert tokens.tolist() == generate(r.model, r.stock(), prompt, 8, guesses=3).tolist()

    anyio.run(body)


@pytest.mark.parametrize("name", PAGED)
def test_masks_are_known_before_any_byte_has_landed(name: str) -> None:
    """Lengths and mask sizes of every layer equal transformers' own, while the load is held."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session, stock = await evicted(r), r.stock()
            await r.logits(stock, ids(PREFIX, seed=1))
            gate = hooks.gate(stream="load")
            transfer = await session.load()
            cache = session.cache
            for layer, each in enumerate(stock.layers):
                if isinstance(each, CacheLayerMixin):
                    assert cache.get_mask_sizes(5, layer) == stock.get_mask_sizes(5, layer)
                    assert cache.get_query_offset(layer) == stock.get_query_offset(layer)
            for kind in ("is_sliding", "is_linear", "is_dummy"):
                assert getattr(cache, kind) == getattr(stock, kind)
            assert cache.get_seq_length() == stock.get_seq_length() == PREFIX
            if any(stock.is_linear):
                assert cache.has_previous_state()
            assert transfer.landed_layers == len(r.pools.holes)
            gate.open()
            await transfer

    anyio.run(body)


# No copies ------------------------------------------------------------------------------------------


def storages(r: Rig) -> set[int]:
    """Return where the device pools' memory begins, all arrays of all members."""
    return {
        member.device.view(part.name, layer).untyped_storage().data_ptr()
        for member in r.pools.members
        for layer in range(member.device.num_layers)
        for part in member.device.spec.components
    }


@pytest.mark.parametrize("name", PAGED)
def test_update_returns_views_of_the_pool(name: str) -> None:
    """Keys and values come back as strides over the pool's own memory, in the shapes of transformers."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session, stock = r.sessions.open(max_tokens=40), r.stock()
            last = kept(name, torch.float32).last_attention
            assert last is not None
            await r.logits(stock, ids(20, seed=1))
            layer = stock.layers[last]
            assert isinstance(layer, CacheLayerMixin)
            assert layer.keys is not None
            assert layer.values is not None
            new = layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone()
            with session.use() as cache, torch.inference_mode():
                await r.logits(cache, ids(20, seed=1))
                for each in kept(name, torch.float32).keeping:
                    if each == last:
                        ours = cache.update(*new, last)
                    else:
                        cache.residency.visit(each, "pass")
            theirs = stock.update(*new, last)
            assert [x.shape for x in ours] == [x.shape for x in theirs]
            assert {x.untyped_storage().data_ptr() for x in ours} <= storages(r)

    anyio.run(body)


@STATEFUL
def test_a_state_is_handed_out_itself(name: str) -> None:
    """What a model is handed, and may write over, is the slot, in the shape and dtype of transformers."""

    async def body() -> None:
        async with rig(name, torch.bfloat16) as r:
            session, stock = r.sessions.open(max_tokens=40), r.stock()
            await r.logits(stock, ids(20, seed=1))
            with session.use() as cache, torch.inference_mode():
                await r.logits(cache, ids(20, seed=1))
                layers = kept(name, torch.bfloat16).layers
                for index in kept(name, torch.bfloat16).keeping:
                    cache.residency.visit(index, "pass")
                    for part in layers[index].state or ():
                        get = f"get_{part.role}_state"
                        ours, theirs = (getattr(c, get)(index) for c in (cache, stock))
                        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                        assert torch.equal(ours, theirs)
                        assert ours.untyped_storage().data_ptr() in storages(r)

    anyio.run(body)


# Different bits, on purpose -----------------------------------------------------------------------


def swap_pages(host: offload.HostPool, mine: list[int], other: list[int]) -> None:
    """Exchange a page with another session's, in the last layer."""
    exchange(host, mine[0], other[0], layers=[host.num_layers - 1])


def flip_bit(host: offload.HostPool, mine: list[int], other: list[int]) -> None:
    """Change one bit, the highest of an exponent: in the first layer, the last of a page or of a state."""
    host.view(host.spec.components[-1].name, 0)[mine[0], -1, -1, -1] ^= 1 << 30


def swap_slots(host: offload.HostPool, mine: list[int], other: list[int]) -> None:
    """Exchange the states of two sessions."""
    exchange(host, mine[0], other[0], layers=range(host.num_layers))


def exchange(host: offload.HostPool, one: int, other: int, *, layers: Iterable[int]) -> None:
    """Exchange all that two pages hold in some layers."""
    for layer in layers:
        for component in host.spec.components:
            view = host.view(component.name, layer)
            view[[one, other]] = view[[other, one]]


def full_pages(host: offload.HostPool) -> list[int]:
    """Return the host pages whose every token was written."""
    view = host.view(host.spec.components[-1].name, host.num_layers - 1)
    blank = 255 if view.dtype is torch.uint8 else -1
    rows = view.reshape(host.num_pages, host.spec.page_size, -1)
    found: list[int] = torch.nonzero((rows != blank).any(2).all(1)).flatten().tolist()
    return found


Damage = Callable[[offload.HostPool, list[int], list[int]], None]

DAMAGES: dict[Damage, dict[str, Sequence[str]]] = {
    swap_pages: {"kv": PAGED, "indexer": INDEXED},
    flip_bit: {"kv": PAGED, "state": STATES},
    swap_slots: {"state": STATES},
}


@pytest.mark.parametrize(
    ("damage", "member", "name"),
    [
        pytest.param(damage, member, name, id=f"{damage.__name__}-{member}-{name}")
        for damage, members in DAMAGES.items()
        for member, names in members.items()
        for name in names
    ],
)
def test_damage_on_the_host_shows_in_the_logits(damage: Damage, member: str, name: str) -> None:
    """The comparison has teeth: swapped pages or slots, or a single bit, change the logits."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            host = next(each.host for each in r.pools.members if each.name == member)
            session = await evicted(r)
            mine = full_pages(host)
            await evicted(r, seed=5)
            damage(host, mine, [page for page in full_pages(host) if page not in mine])
            assert not same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


@ALL
def test_a_forward_that_does_not_wait_reads_poison(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the wait removed and the copies held, the logits differ: the wait is what makes them right."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            gate = hooks.gate(stream="load")
            transfer = await session.load()
            monkeypatch.setattr(offload.Transfer, "fence", lambda self, layer: None)
            logits = await r.use(session, ids(CHUNKS[0], seed=20))
            gate.open()
            await transfer
            assert not same_bits([logits], expected(name, torch.float32)[:1])

    anyio.run(body)


@ALL
def test_each_layer_waits_for_its_own_bytes_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While layer 3 is held, a forward gets through the layers before it and stops there."""
    hooks = Hooks()
    reached: list[int] = []
    fence = Residency.fence

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            gate = hooks.gate(stream="load", layer=3)
            transfer = await session.load()
            stopped = anyio.Event()
            token = anyio.lowlevel.current_token()

            def seen(residency: Residency, layer: int) -> None:
                if layer not in reached:
                    reached.append(layer)
                    if layer == 3:
                        anyio.from_thread.run_sync(stopped.set, token=token)
                fence(residency, layer)

            monkeypatch.setattr(Residency, "fence", seen)
            logits: list[torch.Tensor] = []
            async with anyio.create_task_group() as group:

                async def run() -> None:
                    logits.append(await r.use(session, ids(CHUNKS[0], seed=20)))

                group.start_soon(run)
                await stopped.wait()
                assert tuple(reached) == r.pools.kept.keeping
                assert logits == []
                assert transfer.landed_layers == 3
                gate.open()
            await transfer
            assert same_bits(logits, expected(name, torch.float32)[:1])

    anyio.run(body)
