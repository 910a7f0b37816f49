"""Random walks of a whole scheduler on the CUDA that executes: no race, and the bytes of running one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import attrs
import pytest
import torch

from offload import BlockingScheduler, DevicePool, HostPool, Tracer, Transfer, start_scheduler
from offload.driver.cuda import CudaDriver
from offload.driver.cuda_after import Marks
from offload.driver.cuda_calls import RawEvent, RawStream
from offload.driver.cuda_event import CudaEvent
from offload.testing_cuda import FakeCuda
from tests.driver.test_cuda import store
from tests.driver.test_cuda_scheduler import SPEC, page, pools

PATIENCE = 20.0
PAGES, ACTS = 8, 30
DEVICE = 1  # that of the pools; the current one of the thread that walks is 0, or this
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
    event: RawEvent = attrs.field(init=False)
    """The caller's, recorded again and again."""
    other: RawStream = attrs.field(init=False)
    idle: RawStream = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.other, self.idle = user_stream(self.fake), user_stream(self.fake)
        self.event = self.fake.new_event(timing=False)
        for name, pool in (("device", self.device), ("host", self.host)):
            for index in range(PAGES):
                self.holds[name, index] = bytes_of(pool, index)

    def move(self) -> None:
        """Submit a load or a backup of a page whose bytes are known; cancel a few at once."""
        load = self.rng.random() < 0.5
        after = self.after()
        source, target = ("host", "device") if load else ("device", "host")
        known = [i for i in range(PAGES) if self.holds[source, i] is not None]
        start, end = self.rng.choice(known), self.rng.randrange(PAGES)
        if load:
            transfer = self.scheduler.load(host_pages=[start], device_pages=[end], after=after)
        else:
            transfer = self.scheduler.backup(host_pages=[end], device_pages=[start], after=after)
        if self.rng.random() < 0.5:  # the caller's event says something else by now
            self.fake.record(self.event, self.other)
        self.transfers.append(transfer)
        self.users.setdefault(end if load else start, []).append(transfer)
        self.holds[target, end] = self.holds[source, start]
        if self.rng.random() < 0.2:
            transfer.cancel()
            self.cancelled.append(transfer)
            self.holds[target, end] = None

    def after(self) -> object:
        """Return what stands for all that compute has queued: the word, its stream, or an event used again."""
        stream = self.fake.current_stream(DEVICE)
        self.fake.record(self.event, stream)
        return self.rng.choice(["compute", stream, self.event, [self.event, self.idle]])

    def compute(self) -> None:
        """Queue kernels that overwrite a page, layer by layer, each behind a fence on all who use it."""
        index = self.rng.randrange(PAGES)
        made = [torch.full_like(self.at(index, *one), self.rng.randrange(256)) for one in PARTS]
        for (part, layer), value in zip(PARTS, made, strict=True):
            for transfer in self.users.get(index, ()):
                self.order(transfer, layer)
            target = self.at(index, part, layer)
            self.fake.compute(
                lambda to=target, new=value: store(to, new),  # type: ignore[misc]
                writes=[target],
                device=DEVICE,
            )
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


def user_stream(fake: FakeCuda) -> RawStream:
    """Return a stream of the pools' device that a caller has made."""
    with fake.using(fake.current_stream(DEVICE)):
        return fake.new_stream()


def walk(seed: int, fake: FakeCuda, tracer: Tracer | None = None) -> list[str]:
    """Do a random walk; return what went wrong."""
    rng = random.Random(seed)
    driver = CudaDriver(DEVICE, calls=fake)
    device, host = pools()
    mine = fake.using(user_stream(fake)) if rng.random() < 0.5 else nullcontext()
    raw = [driver.stream(name).raw for name in ("load", "backup")]  # type: ignore[attr-defined]
    opened = start_scheduler(device, host, io_backend="direct", driver=driver, tracer=tracer)
    with mine, fake.running(), opened as scheduler:
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


def adopted(marks: Marks, theirs: RawEvent) -> tuple[CudaEvent, ...]:
    """Watch a caller's own event, as if he never recorded it again."""
    made = CudaEvent(marks._hub, theirs, marks._new_waiter("adopted"), 0, (DEVICE, False))
    return (made,)


CONTROLS: dict[str, tuple[object, Callable[..., object]]] = {
    "wait": (FakeCuda, lambda *_: None),
    "marks": (CudaDriver, lambda _: ()),
    "of_event": (Marks, adopted),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_walk_without_its_edges_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without waits on streams, compute's marks, or snapshots of events, some walk of ten goes wrong."""
    where, instead = CONTROLS[name]
    monkeypatch.setattr(where, name, instead)
    assert any(walk(seed, FakeCuda(seed)) for seed in range(10))
