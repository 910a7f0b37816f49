"""A session's cache computes what an un-offloaded run computes, bit for bit, or says why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    DeepseekV32Config,
    DynamicCache,
    Gemma4TextConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MllamaTextConfig,
    PreTrainedConfig,
    RwkvConfig,
    T5Config,
)
from transformers.cache_utils import CacheLayerMixin

import offload
from offload.driver.hooks import Hooks
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers import Session, Sessions, pool_spec
from tests.integrations.tiny import (
    CONFIGS,
    DTYPES,
    PAGE_SIZE,
    Rig,
    forward,
    generate,
    ids,
    model,
    poison,
    rig,
)

PREFIX = 26  # Six and a half pages, and past Gemma's window.
CHUNKS = (5, 1, 1)
"""After the load: a chunk that fills the last page and grows, then single tokens."""

MODELS = pytest.mark.parametrize("name", CONFIGS)
DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
BACKEND = pytest.mark.parametrize("backend", ["asyncio", "trio"])

Body = Callable[[], Awaitable[None]]


async def evicted(r: Rig) -> Session:
    """Return a session with a prefix on the host, whose device pages others have written over."""
    session = r.sessions.open(max_tokens=80)
    await r.use(session, ids(PREFIX, seed=1))
    await session.evict()
    other = r.sessions.open(max_tokens=r.device.num_pages * PAGE_SIZE)
    await r.use(other, ids(30, seed=9))
    poison(r.device)
    other.close()
    return session


async def continued(r: Rig, session: Session) -> list[torch.Tensor]:
    """Load the session, run the chunks behind it, and return all logits."""
    transfer = await session.load()
    logits = [await r.use(session, ids(n, seed=20 + i)) for i, n in enumerate(CHUNKS)]
    await transfer
    return logits


async def expected(r: Rig) -> list[torch.Tensor]:
    """Return the logits of the same chunks with transformers' own cache."""
    cache = r.stock()
    await r.logits(cache, ids(PREFIX, seed=1))
    return [await r.logits(cache, ids(n, seed=20 + i)) for i, n in enumerate(CHUNKS)]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Compare logits as bytes."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def new_states(stock: DynamicCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of one more token, in the shapes that the layer has cached."""
    cached = stock.layers[layer]
    assert isinstance(cached, CacheLayerMixin)
    assert cached.keys is not None
    assert cached.values is not None
    return cached.keys[:, :, -1:].clone(), cached.values[:, :, -1:].clone()


# Equal bits --------------------------------------------------------------------------------------


@MODELS
@DTYPE
@BACKEND
def test_logits_after_a_load_are_those_of_a_run_without_offload(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    """Backed up, evicted, overwritten, loaded: every logit keeps its bits."""

    async def body() -> None:
        async with rig(name, dtype) as r:
            assert same_bits(await continued(r, await evicted(r)), await expected(r))

    anyio.run(body, backend=backend)


@MODELS
@DTYPE
def test_generate_gives_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    """`generate()` behind a loaded prefix continues like `generate()` on the whole prompt."""

    async def body() -> None:
        async with rig(name, dtype) as r:
            session = await evicted(r)
            prompt = torch.cat([ids(PREFIX, seed=1), ids(3, seed=2)], dim=1)
            await session.load()
            tokens = await r.generated(session, prompt, 10)
            cache = r.stock()
            forward(r.model, cache, ids(PREFIX, seed=1))
            assert tokens.tolist() == generate(r.model, cache, prompt, 10).tolist()

    anyio.run(body)


@MODELS
def test_assisted_generation_rolls_the_cache_back(name: str) -> None:
    """Guesses that were wrong are cropped again, also past a window: the tokens stay the same."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            prompt = torch.cat([ids(PREFIX, seed=1), ids(3, seed=2), ids(3, seed=2)], dim=1)
            with session.use() as cache:
                guessing = partial(generate, r.model, cache, prompt, 10, guesses=3)
                tokens = await anyio.to_thread.run_sync(guessing)
            assert tokens.tolist() == generate(r.model, None, prompt, 10).tolist()

    anyio.run(body)


@MODELS
def test_masks_are_known_before_any_byte_has_landed(name: str) -> None:
    """Lengths and mask sizes of every layer equal transformers' own, while the load is held."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session, stock = await evicted(r), r.stock()
            await r.logits(stock, ids(PREFIX, seed=1))
            gate = hooks.gate(stream="load")
            transfer = await session.load()
            for layer in range(len(stock.layers)):
                assert session.cache.get_mask_sizes(5, layer) == stock.get_mask_sizes(5, layer)
                assert session.cache.get_query_offset(layer) == stock.get_query_offset(layer)
            assert session.cache.is_sliding == stock.is_sliding
            assert transfer.landed_layers == 0
            gate.open()
            await transfer

    anyio.run(body)


@MODELS
def test_update_returns_views_of_the_pool(name: str) -> None:
    """Keys and values come back as strides over the pool's own memory, in the shapes of transformers."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session, stock = r.sessions.open(max_tokens=40), r.stock()
            with session.use() as cache:
                await r.logits(cache, ids(20, seed=1))
                await r.logits(stock, ids(20, seed=1))
                last = len(stock.layers) - 1
                key, value = new_states(stock, last)
                ours = cache.update(key, value, last)
            theirs = stock.update(key, value, last)
            pool = {
                r.device.view(part.name, last).untyped_storage().data_ptr()
                for part in r.device.spec.components
            }
            assert [x.shape for x in ours] == [x.shape for x in theirs]
            assert {x.untyped_storage().data_ptr() for x in ours} <= pool

    anyio.run(body)


def test_a_crop_while_loading_changes_what_is_seen_and_nothing_else() -> None:
    """Tokens cropped while their pages are still loading are gone, and the rest is untouched."""
    hooks = Hooks()

    async def body() -> None:
        async with rig("gemma3", torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            gate = hooks.gate(stream="load")
            transfer = await session.load()
            session.cache.crop(-3)
            gate.open()
            logits = await r.use(session, ids(2, seed=5))
            await transfer
            stock = r.stock()
            # Without it, transformers cannot crop past a window.
            stock.activate_past_recording()  # type: ignore[no-untyped-call]
            await r.logits(stock, ids(PREFIX, seed=1))
            stock.crop(-3)
            assert same_bits([logits], [await r.logits(stock, ids(2, seed=5))])

    anyio.run(body)


# Different bits, on purpose -----------------------------------------------------------------------


def tamper(r: Rig, what: str) -> None:
    """Damage the host's copy of a session's first pages."""
    component = r.host.spec.components[0].name
    pages = r.host.view(component, 2)
    used = np.flatnonzero(r.host.pages.table.locked(np.arange(r.host.num_pages)))
    assert len(used) == 0
    valid = [p for p in range(0, r.host.num_pages, 2) if (pages[p, :2] != -1).all()]
    if what == "two pages swapped":
        pages[valid[:2]] = pages[valid[:2]].flip(0)
    else:
        pages[valid[0], 0, 0, 0] ^= 1 << 20


@pytest.mark.parametrize("what", ["two pages swapped", "one bit changed"])
@MODELS
def test_damage_on_the_host_shows_in_the_logits(name: str, what: str) -> None:
    """The comparison has teeth: two swapped pages, or a single bit, change the logits."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            tamper(r, what)
            assert not same_bits(await continued(r, session), await expected(r))

    anyio.run(body)


@MODELS
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
            assert not same_bits([logits], (await expected(r))[:1])

    anyio.run(body)


@MODELS
def test_each_layer_waits_for_its_own_pages_alone(name: str) -> None:
    """While layer 3 is held, a forward gets through layers 0 to 2 and stops there."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            gate = hooks.gate(stream="load", layer=3)
            transfer = await session.load()
            reached: list[int] = []
            stopped = anyio.Event()
            token = anyio.lowlevel.current_token()
            update = session.cache.update

            def seen(
                key: torch.Tensor, value: torch.Tensor, layer: int
            ) -> tuple[torch.Tensor, ...]:
                reached.append(layer)
                if layer == 3:
                    anyio.from_thread.run_sync(stopped.set, token=token)
                return update(key, value, layer)

            session.cache.update = seen  # type: ignore[method-assign, assignment]
            logits: list[torch.Tensor] = []
            async with anyio.create_task_group() as group:

                async def run() -> None:
                    logits.append(await r.use(session, ids(CHUNKS[0], seed=20)))

                group.start_soon(run)
                await stopped.wait()
                assert reached == [0, 1, 2, 3]
                assert logits == []
                assert transfer.landed_layers == 3
                gate.open()
            await transfer
            assert same_bits(logits, (await expected(r))[:1])

    anyio.run(body)


# Backups -------------------------------------------------------------------------------------------


def test_a_backup_moves_new_pages_only() -> None:
    """The second backup moves the page that had been half full and what came after, and nothing else."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=80)
            page = r.device.spec.page_bytes
            await r.use(session, ids(10, seed=1))
            assert await session.backup() == 3 * page
            assert await session.backup() == 0
            await r.use(session, ids(1, seed=2))
            assert await session.backup() == 1 * page
            await r.use(session, ids(1, seed=3))
            assert await session.backup() == 1 * page  # the same page, which is now full
            await r.use(session, ids(5, seed=4))
            assert await session.backup() == 2 * page
            session.cache.crop(-6)
            await r.use(session, ids(1, seed=5))
            assert await session.backup() == 1 * page

    anyio.run(body)


def test_a_failed_backup_does_not_count() -> None:
    """After a failed backup the session is resident and not backed up; the next one moves it all."""
    hooks = Hooks()

    async def body() -> None:
        async with rig("llama", torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = r.sessions.open(max_tokens=40)
            await r.use(session, ids(PREFIX, seed=1))
            hooks.fail(OSError("no such page"), stream="backup", layer=1, nth=1)
            with pytest.raises(offload.TransferFailed):
                await session.evict()
            assert session.resident
            assert await session.evict() == 7 * r.device.spec.page_bytes
            assert same_bits(await continued(r, session), await expected(r))

    anyio.run(body)


def test_a_full_host_pool_leaves_the_session_as_it_was() -> None:
    """A backup that finds no host pages raises, and works once there are some."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=40)
            await r.use(session, ids(PREFIX, seed=1))
            taken = r.host.pages.alloc(30)
            with pytest.raises(offload.OutOfPagesError):
                await session.evict()
            assert session.resident
            r.host.pages.free(taken)
            await session.evict()
            assert same_bits(await continued(r, session), await expected(r))

    anyio.run(body)


# Failures --------------------------------------------------------------------------------------------


@MODELS
def test_a_failed_load_raises_in_the_forward_and_can_be_tried_again(name: str) -> None:
    """A load that fails at layer 2 raises in the forward; the session is evicted, loses no token, and
    a second load gives the right bits."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            hooks.fail(OSError("no such page"), stream="load", layer=2, nth=1)
            transfer = await session.load()
            with pytest.raises(offload.TransferFailed) as caught:
                await r.use(session, ids(5, seed=20))
            assert isinstance(caught.value.__cause__, OSError)
            with pytest.raises(offload.TransferFailed):
                await transfer
            assert (session.resident, session.tokens) == (False, PREFIX)
            assert same_bits(await continued(r, session), await expected(r))

    anyio.run(body)


def test_a_load_that_failed_unseen_is_reported_by_the_next_backup() -> None:
    """A failed load that no forward met raises from `evict`, and leaves the session evicted."""
    hooks = Hooks()

    async def body() -> None:
        async with rig("llama", torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            hooks.fail(OSError("no such page"), stream="load", layer=0, nth=1)
            await session.load()
            with pytest.raises(offload.TransferFailed):
                await session.evict()
            assert (session.resident, session.tokens) == (False, PREFIX)
            assert same_bits(await continued(r, session), await expected(r))

    anyio.run(body)


def test_a_forward_that_raises_half_way_leaves_no_trace() -> None:
    """Tokens count only when all layers have them: after a torn forward the next one starts over."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = await evicted(r)
            await session.load()
            update = session.cache.update

            def torn(
                key: torch.Tensor, value: torch.Tensor, layer: int
            ) -> tuple[torch.Tensor, ...]:
                if layer == 2:
                    raise ArithmeticError
                return update(key, value, layer)

            session.cache.update = torn  # type: ignore[method-assign, assignment]
            with session.use() as cache, pytest.raises(ArithmeticError):
                await r.logits(cache, ids(3, seed=8))
            del session.cache.update
            assert session.tokens == PREFIX
            logits = [await r.use(session, ids(n, seed=20 + i)) for i, n in enumerate(CHUNKS)]
            assert same_bits(logits, await expected(r))

    anyio.run(body)


# Refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(num_hidden_layers=2), "state space"),
        (JambaConfig(num_hidden_layers=8), "layer 0 is linear attention"),
        (RwkvConfig(num_hidden_layers=2), "stateful"),
        (T5Config(), "encoder-decoder"),
        (BartConfig(), "encoder-decoder"),
        (MllamaTextConfig(), "cross-attention"),
        (DeepseekV32Config(num_hidden_layers=2), "indexer keys"),
        (Gemma4TextConfig(), "layers of one width"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_be_carried_is_refused(config: PreTrainedConfig, why: str) -> None:
    """States, indexers, cross attention and mixed widths are refused before a pool exists."""
    with pytest.raises(offload.GeometryError, match=why):
        pool_spec(config, dtype=torch.float32)


def test_a_config_without_a_dtype_is_refused() -> None:
    """The dtype is never guessed."""
    with pytest.raises(offload.RequestError, match="dtype"):
        pool_spec(LlamaConfig())


def test_a_pool_of_another_shape_is_refused() -> None:
    """Sessions compare the device pool with what the model caches."""

    async def body() -> None:
        spec = pool_spec(CONFIGS["llama"], page_size=PAGE_SIZE, dtype=torch.float32)
        device = offload.DevicePool.allocate(spec, num_pages=4)
        host = offload.HostPool.like(device, num_pages=4)
        async with offload.open_scheduler(device, host) as scheduler:
            with pytest.raises(offload.GeometryError):
                Sessions(CONFIGS["deepseek_v3"], scheduler, device=device, host=host)

    anyio.run(body)


def test_a_pool_whose_pages_cannot_be_one_view_is_refused() -> None:
    """A pool with heads before tokens has no strides for a session's slots, and says so."""

    async def body() -> None:
        spec = pool_spec(CONFIGS["llama"], page_size=PAGE_SIZE, dtype=torch.float32)
        tensors = {name: [torch.zeros(4, 2, PAGE_SIZE, 8) for _ in range(4)] for name in "kv"}
        device = offload.DevicePool.adopt(spec, tensors, axes="p h t d")
        host = offload.HostPool.like(device, num_pages=4)
        async with offload.open_scheduler(device, host) as scheduler:
            with pytest.raises(offload.GeometryError, match="one stride"):
                Sessions(CONFIGS["llama"], scheduler, device=device, host=host)

    anyio.run(body)


def refusal(r: Rig, session: Session, what: str) -> None:
    """Do something that a session's cache does not do."""
    cache = session.cache
    if what == "room":
        forward(r.model, cache, ids(30, seed=1))
    elif what == "beams":
        generate(r.model, cache, ids(3, seed=1), 2, num_beams=2)
    elif what == "batch":
        forward(r.model, cache, ids(3, seed=1).expand(2, 3))
    elif what == "dtype":
        forward(model("llama", torch.bfloat16), cache, ids(3, seed=1))
    elif what == "reorder":
        cache.reorder_cache(torch.LongTensor([0]))
    elif what == "repeat":
        cache.batch_repeat_interleave(2)
    elif what == "select":
        cache.batch_select_indices(torch.tensor([0]))
    elif what == "copy":
        copy.deepcopy(cache)
    elif what == "crop":
        cache.crop(3)


@pytest.mark.parametrize(
    "what",
    ["room", "beams", "batch", "dtype", "reorder", "repeat", "select", "copy", "crop"],
)
def test_what_a_session_cannot_do_raises_and_writes_nothing(what: str) -> None:
    """Too many tokens, beams, batches, another dtype, copies: a typed error, and no byte has changed."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=20)
            before = [r.device.view("k", layer).clone() for layer in range(4)]
            with session.use(), pytest.raises(offload.OffloadError) as caught:
                refusal(r, session, what)
            assert isinstance(caught.value, ValueError)
            assert session.tokens == 0
            assert all(torch.equal(r.device.view("k", i), b) for i, b in enumerate(before))

    anyio.run(body)


def test_a_session_in_use_is_not_moved() -> None:
    """Inside `use`, evict, load, close and a second use are refused; outside, an update is."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=20)
            with pytest.raises(offload.RequestError, match="inside"):
                forward(r.model, session.cache, ids(3, seed=1))
            with session.use() as cache:
                await r.logits(cache, ids(3, seed=1))
                for move in (session.evict, session.load):
                    with pytest.raises(offload.RequestError):
                        await move()
                with pytest.raises(offload.RequestError, match="used by a forward"):
                    session.close()
                with pytest.raises(offload.RequestError), session.use():
                    pass
                assert await session.backup() > 0
            await session.evict()
            with pytest.raises(offload.RequestError, match="evicted"), session.use():
                pass
            with pytest.raises(offload.RequestError, match="evicted"):
                await session.evict()
            session.close()
            with pytest.raises(offload.RequestError, match="closed"):
                await session.load()

    anyio.run(body)


def test_closing_gives_every_page_back() -> None:
    """After closing, both pools are as free as before the session."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            before = [len(r.device.pages.alloc(40)), len(r.host.pages.alloc(32))]
            r.device.pages.free(range(40))
            r.host.pages.free(range(0, 64, 2))
            session = r.sessions.open(max_tokens=80)
            await r.use(session, ids(PREFIX, seed=1))
            await session.evict()
            await (await session.load())
            session.close()
            assert before == [len(r.device.pages.alloc(40)), len(r.host.pages.alloc(32))]

    anyio.run(body)


def test_a_device_pool_without_a_run_of_pages_refuses_the_session() -> None:
    """`open` and `load` are all or nothing."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = await evicted(r)
            other = r.sessions.open(max_tokens=r.device.num_pages * PAGE_SIZE)
            with pytest.raises(offload.OutOfPagesError):
                r.sessions.open(max_tokens=4)
            with pytest.raises(offload.OutOfPagesError):
                await session.load()
            other.close()
            assert same_bits(await continued(r, session), await expected(r))

    anyio.run(body)
