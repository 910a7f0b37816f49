"""Random walks of a whole scheduler on the CUDA that executes: no race, and the bytes of running one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest
import torch

from offload import BlockingScheduler, DevicePool, HostPool, Tracer, Transfer, start_scheduler
from offload.driver.cuda import CudaDriver
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import store
from tests.driver.test_cuda_scheduler import SPEC, page, pools

PATIENCE = 20.0
PAGES, ACTS = 8, 30
PARTS = [(part, layer) for layer in range(SPEC.num_layers) for part in ("k", "v")]

Bytes = list[torch.Tensor]


def bytes_of(pool: DevicePool | HostPool, index: int) -> Bytes:
    """Return a copy of a page, by layer and part."""
    found = [pool.view(part, layer)[index].contiguous() for part, layer in PARTS]
    return [one.reshape(-1).view(torch.uint8).clone() for one in found]


@attrs.define
class Walk:
    """What has been done so far, and what every page must hold; None: half of something that was cancelled."""

    rng: random.Random
    fake: FakeCuda
    device: DevicePool
    host: HostPool
    scheduler: BlockingScheduler
    holds: dict[tuple[str, int], Bytes | None] = attrs.field(factory=dict)
    transfers: list[Transfer] = attrs.field(factory=list)
    users: dict[int, list[Transfer]] = attrs.field(factory=dict)
    cancelled: list[Transfer] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        for name, pool in (("device", self.device), ("host", self.host)):
            for index in range(PAGES):
                self.holds[name, index] = bytes_of(pool, index)

    def move(self) -> None:
        """Submit a load or a backup of a page whose bytes are known; cancel a few at once."""
        load = self.rng.random() < 0.5
        source, target = ("host", "device") if load else ("device", "host")
        known = [i for i in range(PAGES) if self.holds[source, i] is not None]
        start, end = self.rng.choice(known), self.rng.randrange(PAGES)
        if load:
            transfer = self.scheduler.load(host_pages=[start], device_pages=[end])
        else:
            transfer = self.scheduler.backup(host_pages=[end], device_pages=[start])
        self.transfers.append(transfer)
        self.users.setdefault(end if load else start, []).append(transfer)
        self.holds[target, end] = self.holds[source, start]
        if self.rng.random() < 0.2:
            transfer.cancel()
            self.cancelled.append(transfer)
            self.holds[target, end] = None

    def compute(self) -> None:
        """Queue kernels that overwrite a page, layer by layer, each behind a fence on all who use it."""
        index = self.rng.randrange(PAGES)
        made = [torch.full_like(self.at(index, *one), self.rng.randrange(256)) for one in PARTS]
        for (part, layer), value in zip(PARTS, made, strict=True):
            for transfer in self.users.get(index, ()):
                self.order(transfer, layer)
            target = self.at(index, part, layer)
            self.fake.compute(lambda to=target, new=value: store(to, new), writes=[target])  # type: ignore[misc]
        self.holds["device", index] = made

    def at(self, index: int, part: str, layer: int) -> torch.Tensor:
        return page(self.device, part, layer, index)

    def order(self, transfer: Transfer, layer: int) -> None:
        """Let compute come after a layer; after the last byte of what was cancelled."""
        if transfer in self.cancelled:
            transfer.wait_source_reusable(timeout=PATIENCE)
        else:
            transfer.wait_issued(layer, timeout=PATIENCE)
            transfer.fence(layer)

    def finish(self) -> None:
        """Wait for everything."""
        for transfer in self.transfers:
            if transfer in self.cancelled:
                transfer.wait_source_reusable(timeout=PATIENCE)
            else:
                transfer.result(timeout=PATIENCE)
        self.fake.drained(PATIENCE)

    def wrong(self) -> list[str]:
        """Return the pages that hold something else."""
        pool: dict[str, DevicePool | HostPool] = {"device": self.device, "host": self.host}
        return [
            f"{name} page {index}"
            for (name, index), expected in self.holds.items()
            if expected is not None
            and not all(map(torch.equal, bytes_of(pool[name], index), expected))
        ]


def walk(seed: int, fake: FakeCuda, tracer: Tracer | None = None) -> list[str]:
    """Do a random walk; return what went wrong."""
    rng = random.Random(seed)
    driver = CudaDriver(0, calls=fake)
    device, host = pools()
    raw = [driver.stream(name).raw for name in ("load", "backup")]  # type: ignore[attr-defined]
    opened = start_scheduler(device, host, io_backend="direct", driver=driver, tracer=tracer)
    with fake.using(fake.new_stream()), fake.running(), opened as scheduler:
        walked = Walk(rng, fake, device, host, scheduler)
        for _ in range(ACTS):
            with fake.holding(*rng.sample(raw, rng.randrange(3))):
                for _ in range(rng.randrange(1, 4)):
                    walked.move()
            if rng.random() < 0.4:
                walked.compute()
        walked.finish()
    return [*fake.faults, *walked.wrong()]


@pytest.mark.parametrize("seed", range(10))
def test_walks_are_clean(seed: int) -> None:
    """Submits, cancels, fences and kernels in any order move the right bytes, recorded or not."""
    assert walk(seed, FakeCuda(seed), Tracer() if seed % 2 else None) == []


CONTROLS: dict[str, tuple[object, Callable[..., object]]] = {
    "wait": (FakeCuda, lambda *_: None),
    "marks": (CudaDriver, lambda _: ()),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_walk_without_its_edges_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without any wait on a stream, or without compute's marks, some walk of ten goes wrong."""
    where, instead = CONTROLS[name]
    monkeypatch.setattr(where, name, instead)
    assert any(walk(seed, FakeCuda(seed)) for seed in range(10))
