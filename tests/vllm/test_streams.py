"""One rank's side on streams, over a CUDA that executes late and in every legal order."""

# Axes: B blocks, H head slots, N tokens, C content.

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import attrs
import pytest
import torch

import offload
from offload.driver.cuda import CudaDriver
from offload.integrations.vllm.adopt import adopt
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.settings import Settings
from offload.integrations.vllm.worker import WorkerSide
from offload.testing import FakeCuda

LAYERS, BLOCKS = 3, 8
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
LONG = 20.0

_names = count()


@attrs.define(eq=False)
class Rank:
    """A worker side whose device does nothing until it is told to."""

    fake: FakeCuda
    stream_mib: float = 0.0
    caches: list[torch.Tensor] = attrs.field(init=False)
    side: WorkerSide = attrs.field(init=False)
    seen: list[list[float]] = attrs.field(init=False, factory=list)
    """What each layer of a forward has read."""

    def __attrs_post_init__(self) -> None:
        self.caches = [torch.zeros(BLOCKS, 2, 4, 6) for _ in NAMES]
        name = f"test-streams-{next(_names)}"
        offload.register_driver(name, lambda **_: CudaDriver(0, calls=self.fake))
        settings = Settings.read(
            {
                "host_blocks": 4,
                "driver": name,
                "io_backend": "direct",
                "stream_mib": self.stream_mib,
            }
        )
        adopted = adopt(dict(zip(NAMES, self.caches, strict=True)), BLOCKS)
        self.side = WorkerSide.start(settings, adopted, 4)

    def fill(self, layer: int, block: int, value: float) -> None:
        """Queue a kernel that writes a block of a layer."""
        target = self.caches[layer][block]
        self.fake.compute(lambda: target.fill_(value), writes=[target])

    def look(self, layer: int, block: int) -> None:
        """Queue a kernel that reads a block of a layer."""
        source = self.caches[layer][block]
        self.fake.compute(
            lambda: self.seen.append(sorted(set(source.flatten().tolist()))), reads=[source]
        )

    def wait(self) -> Outcomes:
        """Let the device go on until every job has ended."""
        with nullcontext() if self.fake._running else self.fake.running():
            for moving in [*self.side._loads, *self.side._stores]:
                assert moving.transfer is not None
                moving.transfer.result(LONG)
        return self.side.ended()

    def close(self) -> None:
        """Stop; no race, no fault."""
        with self.fake.running():
            self.side.close()
        self.fake.check()


def store(rank: Rank) -> None:
    """Run a forward that writes block 1 and stores it in host page 2."""
    rank.side.begin(StepPlan(store=Job(0, (1,), (2,))))
    for layer, name in enumerate(NAMES):
        rank.side.before(name)
        rank.fill(layer, 1, 10 + layer)
        rank.side.after(name)
    rank.side.end()
    assert rank.side.bad_blocks() == set()


def load(rank: Rank) -> None:
    """Run a forward that reads block 5, which comes from host page 2."""
    rank.side.begin(StepPlan(load=Job(1, (5,), (2,))))
    rank.side.load()
    for layer, name in enumerate(NAMES):
        rank.side.before(name)
        rank.look(layer, 5)
        rank.side.after(name)
    rank.side.end()
    assert rank.side.bad_blocks() == set()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stream_mib", [0.0, 1.0], ids=["streaming", "whole"])
def test_a_block_goes_and_comes_back(seed: int, stream_mib: float) -> None:
    """vllm#31210: a store reads what the forward wrote and holds up nobody, a layer reads what was loaded."""
    rank = Rank(FakeCuda(seed), stream_mib)
    with rank.fake.using(rank.fake.new_stream()):
        store(rank)
        assert rank.side.ended() == Outcomes(), "the device has not moved yet, and the host went on"
        assert rank.wait() == Outcomes({0: 1})
        with rank.fake.running():
            load(rank)
            assert rank.wait() == Outcomes({1: 1})
        rank.fake.run()
    assert rank.seen == [[10.0], [11.0], [12.0]]
    rank.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_load_comes_after_what_the_stream_still_does_to_its_blocks(seed: int) -> None:
    """vllm#50696, vllm#47282: queued zeroing does not wipe what is loaded, and a queued reader sees what was there."""
    rank = Rank(FakeCuda(seed))
    with rank.fake.using(rank.fake.new_stream()):
        store(rank)
        assert rank.wait() == Outcomes({0: 1})
        with rank.fake.running():
            for layer in range(LAYERS):
                rank.fill(layer, 5, 0.0)
                rank.look(layer, 5)
            load(rank)
            assert rank.wait() == Outcomes({1: 1})
        rank.fake.run()
    assert rank.seen == [[0.0]] * LAYERS + [[10.0], [11.0], [12.0]]
    rank.close()


def test_a_copy_that_the_device_refuses_is_reported() -> None:
    """The forward goes on, its stream is ordered behind nothing that will never come, and the block is named."""
    fake = FakeCuda(5)
    rank = Rank(fake)
    with fake.using(fake.new_stream()), fake.running():
        fake.fail(2, name="copy", nth=2)
        rank.side.begin(StepPlan(load=Job(1, (5,), (2,))))
        rank.side.load()
        for layer, name in enumerate(NAMES):
            rank.side.before(name)
            rank.look(layer, 5)
            rank.side.after(name)
        rank.side.end()
        assert rank.side.bad_blocks() == {5}
        assert rank.side.ended() == Outcomes({}, {1: 1})
    with fake.running():
        rank.side.close()
