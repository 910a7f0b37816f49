"""Take any one edge out of the CUDA driver, under a whole scheduler: bytes go wrong, or two accesses race."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload import BlockingScheduler, Tracer, start_scheduler
from offload.driver.cuda import ComputeStream, CudaDriver
from offload.driver.cuda_calls import RawStream
from offload.driver.cuda_event import CudaEvent, Hub
from offload.driver.cuda_waiter import Waiter
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import Forgetful, store
from tests.driver.test_cuda_scheduler import SPEC, page, pools

PATIENCE = 3.0
LAYERS = range(SPEC.num_layers)
PARTS = ("k", "v")


class World:
    """Pools, a scheduler on a fake GPU, and compute that runs on a stream of its own."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.device, self.host = pools()
        self.driver = CudaDriver(0, calls=fake)
        self.compute = fake.new_stream()
        self.made, self.zero = (torch.full_like(self.at(0, 0, "k"), value) for value in (7, 0))

    def at(self, layer: int, index: int, part: str) -> torch.Tensor:
        return page(self.device, part, layer, index)

    def kernel(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a kernel that copies."""
        self.fake.compute(lambda: store(target, source), reads=[source], writes=[target])

    def fill(self, index: int, layer: int, source: torch.Tensor) -> None:
        for part in PARTS:
            self.kernel(self.at(layer, index, part), source)

    def copy_out(self, index: int, layer: int, out: list[torch.Tensor]) -> None:
        """Queue kernels that read a page of a layer."""
        for part in PARTS:
            out.append(torch.empty_like(self.made))
            self.kernel(out[-1], self.at(layer, index, part))


def overtaken(scheduler: BlockingScheduler, one: int, other: int) -> None:
    """Wait until requests that nothing holds back have been issued both ways: whatever could go has gone."""
    for transfer in (
        scheduler.load(host_pages=[one], device_pages=[one], after=()),
        scheduler.backup(device_pages=[other], host_pages=[other], after=()),
    ):
        transfer.wait_issued(0, timeout=PATIENCE)


def program(fake: FakeCuda, tracer: Tracer | None = None) -> list[str]:
    """Back a page up behind compute, overwrite it behind a fence, load it back; return what went wrong."""
    world = World(fake)
    before = [world.at(layer, 2, part).clone() for layer in LAYERS for part in PARTS]
    seen: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    load_raw, backup_raw = (
        world.driver.stream(name).raw  # type: ignore[attr-defined]
        for name in ("load", "backup")
    )
    opened = start_scheduler(
        world.device, world.host, io_backend="direct", driver=world.driver, tracer=tracer
    )
    with fake.using(world.compute), fake.running(), opened as scheduler:
        with fake.holding(load_raw, backup_raw):
            with fake.holding(world.compute):
                for layer in LAYERS:
                    world.fill(1, layer, world.made)
                backup = scheduler.backup(device_pages=[1], host_pages=[5])
                overtaken(scheduler, 6, 7)
            for layer in LAYERS:
                backup.wait_issued(layer, timeout=PATIENCE)
                backup.fence(layer)
                world.fill(1, layer, world.zero)
            with fake.holding(world.compute):
                for layer in LAYERS:
                    world.copy_out(2, layer, seen)
                load = scheduler.load(host_pages=[5], device_pages=[2])
                overtaken(scheduler, 3, 4)
        with fake.holding(load_raw):
            for layer in LAYERS:
                load.wait_issued(layer, timeout=PATIENCE)
                load.fence(layer)
                world.copy_out(2, layer, out)
        for transfer in (backup, load):
            transfer.result(timeout=PATIENCE)
        fake.drained(PATIENCE)
    wrong = list(fake.faults)
    wrong += ["compute saw the page overwritten"] * (not same(seen, before))
    wrong += ["the page came back with other bytes"] * (not same(out, [world.made] * len(out)))
    return wrong


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_program_is_clean(seed: int, traced: bool) -> None:
    """With nothing taken out there is no race and no wrong byte; only a recording takes timing events."""
    fake = FakeCuda(seed)
    assert program(fake, Tracer(active=traced)) == []
    assert bool(fake.named("elapsed_ms")) == traced
    assert ((True,) in {call.arguments for call in fake.named("new_event")}) == traced


def test_no_wait_can_be_left_out() -> None:
    """Every single wait of a stream for an event is needed."""
    counted = Forgetful("wait", 0)
    assert program(counted) == []
    assert counted.made == 2 * len(LAYERS)
    for nth in range(1, counted.made + 1):
        assert found(Forgetful("wait", nth)), f"wait {nth} of {counted.made} is not needed"


def nothing(*_: object, **__: object) -> None:
    """Leave a call out."""


def unrecorded(hub: Hub, stream: RawStream, waiter: Waiter, *, timing: bool = False) -> CudaEvent:
    """Make an event as `Hub.record` does, and forget to record it."""
    raw = hub.calls.new_event(timing=timing)
    return CudaEvent(hub, raw, waiter, waiter.next_position(), (stream.device_index, timing))


PLANTS: dict[str, tuple[tuple[object, str, Callable[..., object]], ...]] = {
    "marks are not taken": ((CudaDriver, "marks", lambda _: ()),),
    "a fence orders nothing": ((ComputeStream, "wait", nothing),),
    "an event orders nothing": ((CudaEvent, "order", nothing),),
    "events are not recorded": ((Hub, "record", unrecorded),),
    "a layer lands when it is enqueued": (
        (Waiter, "_await", lambda *_: True),
        (Waiter, "_passed", lambda *_: True),
    ),
    "an event has always passed": ((CudaEvent, "query", lambda _: True),),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_each_edge_is_needed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without it is found out, as a race or by the bytes."""
    for where, name, instead in PLANTS[plant]:
        monkeypatch.setattr(where, name, instead)
    assert found(FakeCuda(1))


def found(fake: FakeCuda) -> list[str]:
    """Return what went wrong; a wait that would not end is something, too."""
    try:
        return program(fake)
    except TimeoutError as error:
        return [*fake.faults, repr(error)]
