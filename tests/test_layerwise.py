"""Hooks on a forward: each layer waits for its own pages, and is backed up when it has run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio.to_thread
import pytest
import torch

import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import (
    PATIENCE_S,
    content,
    contents,
    on_both,
    on_loops,
    sim_scheduler,
    state,
    threads_scheduler,
)


class Layer(torch.nn.Module):
    """Notes what its page holds when it runs, then does as it is told."""

    def __init__(self, pool: offload.DevicePool, layer: int, page: int, seen: list[bytes]) -> None:
        super().__init__()
        self.pool, self.layer, self.page, self.seen = pool, layer, page, seen
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look at the page."""
        self.seen.append(content(self.pool, self.page, self.layer))
        if self.error is not None:
            raise self.error
        return x


def model(pool: offload.DevicePool, page: int) -> tuple[list[Layer], torch.nn.Sequential]:
    """Return layers that look at one page, and the model that runs them."""
    seen: list[bytes] = []
    layers = [Layer(pool, layer, page, seen) for layer in range(pool.num_layers)]
    return layers, torch.nn.Sequential(*layers)


def hooks_of(layers: Sequence[torch.nn.Module]) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in layers)


@on_both
async def test_each_layer_of_a_forward_waits_for_its_own_pages() -> None:
    """A forward in a worker thread reads each layer after it landed, while later ones are still held."""
    hooks = Hooks()
    gate = hooks.gate(layer=3)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, device, host):
        before = contents(host, [5])
        layers, whole = model(device, 1)
        load = await scheduler.load(host_pages=[5], device_pages=[1])

        def forward() -> None:
            layers[2].register_forward_hook(lambda *_: gate.open())
            whole(torch.zeros(1))

        with offload.layerwise.attach(layers, load=load):
            await anyio.to_thread.run_sync(forward)
        assert layers[0].seen == before


@on_both
async def test_each_layer_is_backed_up_when_it_has_run() -> None:
    """A streaming backup hears of every layer, and the context leaves no hook behind."""
    async with threads_scheduler() as (scheduler, device, host):
        before = contents(device, [1])
        layers, whole = model(device, 1)
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        with offload.layerwise.attach(layers, backup=backup):
            assert hooks_of(layers) > 0
            await anyio.to_thread.run_sync(whole, torch.zeros(1))
        assert hooks_of(layers) == 0
        await backup
        assert contents(host, [5]) == before


@on_both
async def test_loads_and_backups_of_one_forward() -> None:
    """Several loads and backups may be attached at once."""
    async with threads_scheduler() as (scheduler, device, host):
        before = contents(host, [5, 6])
        layers, whole = model(device, 2)
        loads = [
            await scheduler.load(host_pages=[page], device_pages=[page - 4]) for page in (5, 6)
        ]
        backups = [
            await scheduler.backup(device_pages=[page - 4], host_pages=[page + 4], streaming=True)
            for page in (5, 6)
        ]
        with offload.layerwise.attach(layers, load=loads, backup=backups):
            await anyio.to_thread.run_sync(whole, torch.zeros(1))
        for each in backups:
            await each
        assert contents(host, [9, 10]) == before


@pytest.mark.parametrize("bad", range(4))
@on_both
async def test_a_forward_that_raises_cancels_its_backups(bad: int) -> None:
    """An exception leaves the block as itself, removes the hooks and cancels what was not written."""
    async with threads_scheduler() as (scheduler, device, _):
        layers, whole = model(device, 1)
        layers[bad].error = KeyError("mine")
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)

        async def forward() -> None:
            with offload.layerwise.attach(layers, backup=backup):
                await anyio.to_thread.run_sync(whole, torch.zeros(1))

        with pytest.raises(KeyError, match="mine"):
            await forward()
        assert hooks_of(layers) == 0
        with pytest.raises(offload.TransferCancelled):
            await backup


@on_both
async def test_a_failed_load_stops_the_forward() -> None:
    """A forward whose load failed raises TransferFailed at the layer that it cannot have."""
    hooks = Hooks()
    hooks.fail(OSError("no"), layer=2)
    async with threads_scheduler(driver=ThreadsDriver(hooks=hooks)) as (scheduler, device, _):
        layers, whole = model(device, 1)
        load = await scheduler.load(host_pages=[5], device_pages=[1])

        async def forward() -> None:
            with offload.layerwise.attach(layers, load=load):
                await anyio.to_thread.run_sync(whole, torch.zeros(1))

        with pytest.raises(offload.TransferFailed, match="layer 2"):
            await forward()
        assert len(layers[0].seen) == 2


@pytest.mark.parametrize("count", [0, 3, 5])
@on_both
async def test_the_number_of_layers_must_fit(count: int) -> None:
    """Modules that are not one per model layer are refused, and no hook is left."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        layers = [Layer(device, 0, 1, []) for _ in range(count)]
        with pytest.raises(offload.RequestError, match=f"given {count} layers"):
            offload.layerwise.attach(layers, load=load)
        assert hooks_of(layers) == 0
        await sim.run_until_idle()
        assert state(load) == "done"


@pytest.mark.parametrize("given", ["load", "backup"])
@on_both
async def test_loads_and_backups_do_not_change_places(given: str) -> None:
    """A forward that waited for its own backup would wait for ever; a load hears of no written layer."""
    async with sim_scheduler() as (scheduler, sim, device, _):
        layers, _ = model(device, 1)
        if given == "load":
            backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
            with pytest.raises(offload.RequestError, match="is a backup, and a forward waits"):
                offload.layerwise.attach(layers, load=backup)
            with pytest.raises(offload.RequestError, match="is a backup, and a forward waits"):
                offload.layerwise.fence(backup, 0)
            backup.cancel()
        else:
            load = await scheduler.load(host_pages=[5], device_pages=[1])
            with pytest.raises(offload.RequestError, match="is a load, and has no layers"):
                offload.layerwise.attach(layers, backup=[load])
        await sim.run_until_idle()
        assert hooks_of(layers) == 0


def test_a_module_that_is_no_list_is_refused() -> None:
    """A single layer in place of the list of layers is told apart from a model with too few."""
    with pytest.raises(offload.RequestError, match=r"takes a list of layers.* got Linear"):
        offload.layerwise.attach(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


# A block that is left under its forward ------------------------------------------------------------


class Steps(torch.nn.Module):
    """A layer that tells when it is reached, and goes on when it may."""

    def __init__(self, seen: list[int], number: int, at: int) -> None:
        super().__init__()
        self.seen, self.number, self.at = seen, number, at
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Stop where it is told to."""
        if self.number == self.at:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        self.seen.append(self.number)
        return x


def by_to_thread(run: Callable[[], None]) -> Awaitable[None]:
    return asyncio.to_thread(run)


def by_anyio(run: Callable[[], None]) -> Awaitable[None]:
    return anyio.to_thread.run_sync(run)


def by_executor(run: Callable[[], None]) -> Awaitable[None]:
    return asyncio.get_running_loop().run_in_executor(None, run)


async def left_behind(
    layers: Sequence[torch.nn.Module],
    run: Callable[[], None],
    start: Callable[[Callable[[], None]], Awaitable[None]],
    reached: threading.Event,
    *,
    load: offload.Transfer | None = None,
    backup: offload.Transfer | None = None,
) -> None:
    """Run a forward in a block, and leave that by a native cancellation as soon as the forward has come so far."""

    async def request() -> None:
        with offload.layerwise.attach(layers, load=load, backup=backup):
            await start(run)

    task = asyncio.ensure_future(request())
    await asyncio.to_thread(reached.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("kind", ["load", "backup"])
@pytest.mark.parametrize("start", [by_to_thread, by_anyio, by_executor])
@on_loops("asyncio")
async def test_a_forward_whose_block_was_left_comes_to_no_further_layer(
    start: Callable[[Callable[[], None]], Awaitable[None]], kind: str
) -> None:
    """It raises where it reaches the next layer; other forwards of the model go on, and no hook stays."""
    async with threads_scheduler() as (scheduler, *_):
        seen: list[int] = []
        layers = [Steps(seen, number, at=1) for number in range(4)]
        whole = torch.nn.Sequential(*layers)
        transfer = (
            await scheduler.load(host_pages=[5], device_pages=[1])
            if kind == "load"
            else await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        )
        ended: list[BaseException | None] = []
        over = threading.Event()

        def run() -> None:
            try:
                whole(torch.zeros(1))
                ended.append(None)
            except offload.RequestError as error:
                ended.append(error)
            over.set()

        load, backup = (transfer, None) if kind == "load" else (None, transfer)
        await left_behind(layers, run, start, layers[1].reached, load=load, backup=backup)
        seen.append(-1)
        await asyncio.to_thread(torch.nn.Sequential(layers[0], *layers[2:]), torch.zeros(1))
        layers[1].go_on.set()
        await asyncio.to_thread(over.wait, PATIENCE_S)
        assert seen == [0, -1, 0, 2, 3, 1]
        assert isinstance(ended[0], offload.RequestError)
        assert "was left" in str(ended[0])
        for _ in range(2):
            await start(lambda: whole(torch.zeros(1)))
        assert seen[6:] == [0, 1, 2, 3] * 2
        assert hooks_of(layers) == 0


@pytest.mark.parametrize("start", [by_to_thread, by_anyio])
@on_loops("asyncio")
async def test_a_forward_that_begins_after_its_block_was_left_is_refused(
    start: Callable[[Callable[[], None]], Awaitable[None]],
) -> None:
    """Its thread was started under the block: so it comes to no layer, and the next forward does."""
    async with threads_scheduler() as (scheduler, *_):
        seen: list[int] = []
        layers = [Steps(seen, number, at=-1) for number in range(4)]
        whole = torch.nn.Sequential(*layers)
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            go_on.wait(PATIENCE_S)
            try:
                whole(torch.zeros(1))
            except offload.RequestError:
                over.set()

        await left_behind(layers, run, start, begun, load=load)
        go_on.set()
        assert await asyncio.to_thread(over.wait, PATIENCE_S)
        assert seen == []
        await start(lambda: whole(torch.zeros(1)))
        assert seen == [0, 1, 2, 3]


@on_loops("asyncio")
async def test_the_next_block_does_not_hear_of_a_forward_left_behind() -> None:
    """A layer that ends in another forward is not written in this one, and that one ends at its next layer."""
    async with threads_scheduler() as (scheduler, device, host):
        seen: list[int] = []
        layers = [Steps(seen, number, at=1) for number in range(4)]
        whole = torch.nn.Sequential(*layers)
        over = threading.Event()

        def run() -> None:
            with suppress(offload.RequestError):
                whole(torch.zeros(1))
            over.set()

        first = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        await left_behind(layers, run, by_to_thread, layers[1].reached, backup=first)
        second = await scheduler.backup(device_pages=[2], host_pages=[6], streaming=True)
        with offload.layerwise.attach(layers, backup=second):
            layers[1].go_on.set()
            await asyncio.to_thread(over.wait, PATIENCE_S)
            assert second.landed_layers == 0
            assert seen == [0, 1]
            await asyncio.to_thread(whole, torch.zeros(1))
        await second
        assert contents(host, [6]) == contents(device, [2])


@pytest.mark.parametrize("how", ["cancel", "scope", "wait_for"])
@on_loops("asyncio")
async def test_pages_are_freed_when_the_forward_has_left(how: str) -> None:
    """The shape that the documentation shows: whatever ends the request, its pages are its own until then."""
    async with threads_scheduler() as (scheduler, device, _):
        seen: list[int] = []
        layers = [Steps(seen, number, at=1) for number in range(4)]
        whole = torch.nn.Sequential(*layers)
        pages, left, freed = device.pages.alloc(1), anyio.Event(), anyio.Event()

        async def request() -> None:
            load = await scheduler.load(host_pages=[5], device_pages=pages)
            try:
                with offload.layerwise.attach(layers, load=load):
                    forward = asyncio.ensure_future(asyncio.to_thread(whole, torch.zeros(1)))
                    await asyncio.shield(forward)
            finally:
                left.set()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([forward])
                assert isinstance(forward.exception(), offload.RequestError)
                device.pages.free(pages)
                freed.set()

        async with anyio.create_task_group() as group:
            if how == "scope":
                group.start_soon(request)
            else:
                task = asyncio.ensure_future(request())
            await asyncio.to_thread(layers[1].reached.wait, PATIENCE_S)
            if how == "scope":
                group.cancel_scope.cancel()
            elif how == "cancel":
                task.cancel()
            else:
                ending = asyncio.ensure_future(asyncio.wait_for(task, 0))
            with anyio.CancelScope(shield=True):
                await left.wait()
                layers[1].go_on.set()
                await freed.wait()
        assert seen == [0, 1]
        if how != "scope":
            await asyncio.gather(*([task] if how == "cancel" else [ending]), return_exceptions=True)


# A block that is left before all is written -----------------------------------------------------------


@pytest.mark.parametrize("ran", [(), (0, 1), (0, 1, 3), (1, 2, 3)])
@on_both
async def test_what_a_block_leaves_unwritten_is_cancelled(ran: tuple[int, ...]) -> None:
    """Its backup says which layer was not written first, and loads of its host page wait for nothing."""
    async with threads_scheduler() as (scheduler, device, _):
        layers, _ = model(device, 1)
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        behind = await scheduler.load(host_pages=[5], device_pages=[2])
        with offload.layerwise.attach(layers, backup=backup):
            for number in ran:
                await anyio.to_thread.run_sync(layers[number], torch.zeros(1))
        await anyio.to_thread.run_sync(torch.nn.Sequential(*layers), torch.zeros(1))
        assert hooks_of(layers) == 0
        first = min(set(range(4)) - set(ran))
        with pytest.raises(
            offload.TransferCancelled, match=f"was cancelled: layer {first} was not written"
        ):
            await backup
        await backup.source_reusable()
        later = await scheduler.load(host_pages=[5], device_pages=[3])
        for load in (behind, later):
            with anyio.fail_after(PATIENCE_S), suppress(offload.TransferFailed):
                await load


@on_both
async def test_a_block_that_raises_after_all_was_written_cancels_nothing() -> None:
    """What comes behind the last layer may fail: the pages hold what the layers wrote."""
    async with threads_scheduler() as (scheduler, device, host):
        layers, whole = model(device, 1)
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)
        with pytest.raises(KeyError), offload.layerwise.attach(layers, backup=backup):  # noqa: PT012
            await anyio.to_thread.run_sync(whole, torch.zeros(1))
            raise KeyError
        await backup
        assert contents(host, [5]) == contents(device, [1])


# One forward, one block, one attachment ----------------------------------------------------------------


@pytest.mark.parametrize("first", [(0, 1, 2, 3), (1, 2, 3), (0, 1)])
@on_both
async def test_a_second_forward_in_a_block_with_a_backup_is_refused(first: tuple[int, ...]) -> None:
    """It ends at its first layer, before anything of it is written; what the first one wrote is backed up."""
    async with threads_scheduler() as (scheduler, device, host):
        layers, whole = model(device, 1)
        backup = await scheduler.backup(device_pages=[1], host_pages=[5], streaming=True)

        async def two() -> None:
            with offload.layerwise.attach(layers, backup=backup):
                for number in first:
                    await anyio.to_thread.run_sync(layers[number], torch.zeros(1))
                await anyio.to_thread.run_sync(whole, torch.zeros(1))

        with pytest.raises(offload.RequestError, match="attach once per forward"):
            await two()
        assert len(layers[0].seen) == len(first)
        assert hooks_of(layers) == 0
        if len(first) == 4:
            await backup
            assert contents(host, [5]) == contents(device, [1])
        else:
            with pytest.raises(offload.TransferCancelled, match="was not written"):
                await backup


@on_both
async def test_many_forwards_may_read_what_one_block_loads() -> None:
    """Without a backup nothing is written twice: a prefill and its steps fit in one block."""
    async with threads_scheduler() as (scheduler, device, _):
        layers, whole = model(device, 1)
        load = await scheduler.load(host_pages=[5], device_pages=[1])
        with offload.layerwise.attach(layers, load=load):
            for _ in range(3):
                await anyio.to_thread.run_sync(whole, torch.zeros(1))
        assert len(layers[0].seen) == 12
        assert hooks_of(layers) == 0


def test_a_module_is_attached_once_at_a_time() -> None:
    """A second attach that shares a module is refused, attached or entered, until the first block ends."""
    layers = [torch.nn.Identity() for _ in range(3)]
    early = offload.layerwise.attach(layers[2:])
    with offload.layerwise.attach(layers):
        with pytest.raises(offload.RequestError, match=r"layer 1 .*attached already"):
            offload.layerwise.attach([torch.nn.Identity(), layers[2]])
        with pytest.raises(offload.RequestError, match=r"layer 0 .*attached already"):
            early.__enter__()
    with early, offload.layerwise.attach(layers[:2]):
        pass
    assert all(not each._forward_pre_hooks for each in layers)
