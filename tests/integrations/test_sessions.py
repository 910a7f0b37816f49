"""What a session backs up, what failures leave of it, and when it may not be moved."""

from __future__ import annotations

import anyio
import pytest
import torch

import offload
from offload.driver.hooks import Hooks
from offload.driver.threads import ThreadsDriver
from tests.integrations.tiny import PAGE_SIZE, forward, ids, rig
from tests.integrations.turns import (
    ALL,
    CROPPABLE,
    PREFIX,
    continued,
    evicted,
    expected,
    free_pages,
    run_chunks,
    same_bits,
    tear,
)

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
            assert same_bits(await continued(r, session), expected("llama", torch.float32))

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
            assert same_bits(await continued(r, session), expected("llama", torch.float32))

    anyio.run(body)


# Failures -------------------------------------------------------------------------------------------


@ALL
def test_a_failed_load_raises_in_the_forward_and_can_be_tried_again(name: str) -> None:
    """A load that fails at layer 2 raises in the forward; the session is evicted, loses no token, and
    a second load gives the right bits."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            tokens = session.tokens
            hooks.fail(OSError("no such page"), stream="load", layer=2, nth=1)
            transfer = await session.load()
            with pytest.raises(offload.TransferFailed) as caught:
                await r.use(session, ids(1, seed=20))
            assert isinstance(caught.value.__cause__, OSError)
            with pytest.raises(offload.TransferFailed):
                await transfer
            assert (session.resident, session.tokens) == (False, tokens)
            assert same_bits(await continued(r, session), expected(name, torch.float32))

    anyio.run(body)


def test_each_part_of_a_layer_waits_for_its_bytes() -> None:
    """Index keys may be written before K and V: they too come behind the load, or fail with it."""
    hooks = Hooks()

    async def body() -> None:
        async with rig("deepseek_v32", torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            session = await evicted(r)
            hooks.fail(OSError("no such page"), stream="load", layer=0, nth=1)
            transfer = await session.load()
            with pytest.raises(offload.TransferFailed):
                await transfer
            with session.use() as cache, pytest.raises(offload.TransferFailed):
                cache.update_indexer(torch.zeros(1, 1, 8), 0)

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
            assert same_bits(await continued(r, session), expected("llama", torch.float32))

    anyio.run(body)


@CROPPABLE
def test_a_forward_that_raises_half_way_leaves_no_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens count only when all layers have them: after a torn forward the next one starts over."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            session = await evicted(r)
            await session.load()
            with monkeypatch.context() as patch:
                tear(patch, 2)
                with pytest.raises(ArithmeticError):
                    await r.use(session, ids(3, seed=8))
            assert (session.resident, session.tokens) == (True, PREFIX)
            assert same_bits(await run_chunks(r, session), expected(name, torch.float32))

    anyio.run(body)


def test_a_forward_that_raises_between_two_parts_of_a_layer_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K and V without their index do not count, nor do they count for the next forward."""

    async def body() -> None:
        async with rig("deepseek_v32", torch.float32) as r:
            session = await evicted(r)
            await session.load()
            with session.use() as cache:
                with monkeypatch.context() as patch:
                    tear(patch, 3, nth=2)
                    with pytest.raises(ArithmeticError):
                        await r.logits(cache, ids(3, seed=8))
                assert session.tokens == PREFIX
            assert same_bits(await run_chunks(r, session), expected("deepseek_v32", torch.float32))

    anyio.run(body)


# Moving ----------------------------------------------------------------------------------------------


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


def test_a_session_in_use_is_not_moved() -> None:
    """Inside `use`, evict, load, close and a second use are refused; outside, an update is."""

    async def body() -> None:
        async with rig("llama", torch.float32) as r:
            session = r.sessions.open(max_tokens=20)
            with pytest.raises(offload.RequestError, match="inside"):
                forward(r.model, session.cache, ids(3, seed=1))
            with session.use() as cache:
                await r.logits(cache, ids(3, seed=1))
                with pytest.raises(offload.RequestError, match="already"):
                    await session.load()
                with pytest.raises(
                    offload.RequestError, match="used by a forward, and cannot be evicted"
                ):
                    await session.evict()
                with pytest.raises(
                    offload.RequestError, match="used by a forward, and cannot be closed"
                ):
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


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_session_is_not_closed_under_a_backup(name: str) -> None:
    """Pages that are being written stay the session's until that is done."""
    hooks = Hooks()

    async def body() -> None:
        async with rig(name, torch.float32, driver=ThreadsDriver(hooks=hooks)) as r:
            before = free_pages(r)
            session = r.sessions.open(max_tokens=20)
            await r.use(session, ids(5, seed=1))
            gate = hooks.gate(stream="backup")
            async with anyio.create_task_group() as group:
                group.start_soon(session.backup)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(offload.RequestError, match="being backed up"):
                    session.close()
                gate.open()
            session.close()
            assert free_pages(r) == before

    anyio.run(body)


@ALL
def test_closing_gives_every_page_back(name: str) -> None:
    """After closing, all pools are as free as before the session."""

    async def body() -> None:
        async with rig(name, torch.float32) as r:
            before = free_pages(r)
            session = r.sessions.open(max_tokens=80)
            await r.use(session, ids(PREFIX, seed=1))
            await session.evict()
            await session.load()
            await r.use(session, ids(3, seed=2))
            await session.backup()
            assert free_pages(r) != before
            session.close()
            assert free_pages(r) == before

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
            assert same_bits(await continued(r, session), expected("llama", torch.float32))

    anyio.run(body)
