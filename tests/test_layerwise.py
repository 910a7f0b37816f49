"""Hooks on a forward: each layer waits for its own pages, and is backed up when it has run."""

from __future__ import annotations

import anyio.to_thread
import pytest
import torch

import offload
from offload.testing import Hooks, ThreadsDriver
from tests.sched import content, contents, on_both, sim_scheduler, state, threads_scheduler


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


def hooks_of(layers: list[Layer]) -> int:
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
