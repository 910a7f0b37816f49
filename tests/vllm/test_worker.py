"""One rank's side on real tensors and worker threads: what it waits for, what it starts, what it says."""

# Axes: L layers, B blocks, H head slots, N tokens, C content.

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import pytest
import torch

from offload import CudaError, RequestError, Transfer, TransferFailed, layerwise
from offload.integrations.vllm.adopt import adopt
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.settings import Settings
from offload.integrations.vllm.worker import WorkerSide
from offload.testing import Hooks
from tests.vllm.connect import driver

LAYERS, BLOCKS = 3, 8
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
LONG = 10.0

FAULTS = (
    RequestError("the stream captures a graph"),
    CudaError("cudaStreamWaitEvent", 900, "operation not permitted"),
    RuntimeError("CUDA error: out of memory"),
)
"""What a call of ours may say on a GPU instead of doing what it was asked."""


@attrs.define(eq=False)
class Rank:
    """A worker side, vLLM's caches, and the hooks of the driver under it."""

    side: WorkerSide
    caches: list[torch.Tensor]
    hooks: Hooks

    def step(self, plan: StepPlan, *, value: int | None = None) -> set[int]:
        """Run a whole step: load, write each layer's new blocks with a value, and end; return bad blocks."""
        self.side.begin(plan)
        self.side.load()
        for layer, name in enumerate(NAMES):
            self.side.before(name)
            if value is not None and plan.store is not None:
                self.caches[layer][list(plan.store.device_pages)] = value + layer
            self.side.after(name)
        self.side.end()
        return self.side.bad_blocks()

    def all_ended(self) -> Outcomes:
        """Wait until every job has ended; return all outcomes."""
        total = Outcomes()
        for moving in [*self.side._loads, *self.side._stores]:
            if moving.transfer is not None:
                moving.transfer.wait_source_reusable(LONG)
        return total + self.side.ended()


def started(timeout_s: float = LONG, **extra: object) -> Iterator[Rank]:
    """Start a rank, close it afterwards."""
    hooks = Hooks()
    caches = [torch.zeros(BLOCKS, 2, 4, 6) for _ in NAMES]
    settings = Settings.read(
        {
            "host_blocks": 4,
            "timeout_s": timeout_s,
            "driver": driver(hooks=hooks),
            "stream_mib": 0,
            **extra,
        }
    )
    adopted = adopt(dict(zip(NAMES, caches, strict=True)), BLOCKS)
    side = WorkerSide.start(settings, adopted, 4)
    try:
        yield Rank(side, caches, hooks)
    finally:
        side.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank whose host pages 0 and 1 hold tens, layer by layer: 10, 11, 12."""
    for made in started():
        made.step(StepPlan(store=Job(0, (1, 2), (0, 1))), value=10)
        assert made.all_ended() == Outcomes({0: 1})
        made.hooks.ops.clear()
        yield made


def values(cache: torch.Tensor) -> list[float]:
    """Return the different numbers in a cache, sorted."""
    return sorted(set(cache.flatten().tolist()))


def copied(rank: Rank, stream: str) -> list[int]:
    """Return the layers that were copied, in order."""
    return [op.layer for op in rank.hooks.ops if op.stream == stream]


def test_a_load_is_waited_for_layer_by_layer(rank: Rank) -> None:
    """Layer 0 computes while layer 1 has not landed."""
    gate = rank.hooks.gate(stream="load", layer=1)
    rank.side.begin(StepPlan(load=Job(1, (5, 6), (1, 0))))
    rank.side.load()
    rank.side.before(NAMES[0])
    assert values(rank.caches[0][5:7]) == [10]
    assert values(rank.caches[1][5]) == [0]
    waiting = threading.Thread(target=rank.side.before, args=(NAMES[1],))
    waiting.start()
    assert waiting.is_alive()
    gate.open()
    waiting.join(LONG)
    assert values(rank.caches[1][5:7]) == [11]
    rank.side.before(NAMES[2])
    rank.side.end()
    assert rank.all_ended() == Outcomes({1: 1})


@pytest.mark.parametrize(
    "order",
    [[2, 0, 1], [0, 0, 1, 2, 2], [2], [], [0, 2]],
    ids=["any order", "repeated", "one", "none", "skipped"],
)
def test_layers_may_be_asked_for_in_any_way(rank: Rank, order: list[int]) -> None:
    """LMCache#2453: names, not positions; no count of calls is wrong."""
    rank.side.begin(StepPlan(load=Job(1, (5,), (0,)), store=Job(2, (3,), (2,))))
    rank.side.load()
    for layer in order:
        rank.side.before(NAMES[layer])
        assert values(rank.caches[layer][5]) == [10 + layer]
        rank.side.after(NAMES[layer])
    rank.side.end()
    assert rank.side.bad_blocks() == set()
    assert rank.all_ended() == Outcomes({1: 1, 2: 1})
    assert sorted(copied(rank, "backup")) == [0, 1, 2]


def test_names_that_hold_no_pages_are_passed_over(rank: Rank) -> None:
    """An encoder's layer, or one whose cache another layer has, calls the same hooks."""
    rank.side.begin(StepPlan(load=Job(1, (5,), (0,)), store=Job(2, (3,), (2,))))
    rank.side.load()
    rank.side.before("vision.layers.0.attn")
    rank.side.after("vision.layers.0.attn")
    rank.side.end()
    assert rank.all_ended() == Outcomes({1: 1, 2: 1})


def test_a_load_that_no_forward_waited_for_is_waited_for_by_the_next(rank: Rank) -> None:
    """A forward that skipped a layer leaves its load under watch."""
    gate = rank.hooks.gate(stream="load", layer=2)
    rank.side.begin(StepPlan(load=Job(1, (5,), (0,))))
    rank.side.load()
    rank.side.before(NAMES[0])
    rank.side.end()
    assert rank.side.bad_blocks() == set()
    assert rank.side.ended() == Outcomes()
    rank.side.begin(StepPlan())
    waiting = threading.Thread(target=rank.side.before, args=(NAMES[2],))
    waiting.start()
    gate.open()
    waiting.join(LONG)
    assert values(rank.caches[2][5]) == [12]


def test_a_load_ahead_of_its_request_is_waited_for_by_no_forward(rank: Rank) -> None:
    """Decodes of a batch go on while it is under way; its end is said once, in the step that finds it."""
    gate = rank.hooks.gate(stream="load", layer=1)
    assert rank.step(StepPlan(ahead=(Job(1, (5, 6), (1, 0), ("long",), 1),))) == set()
    assert rank.side.arrived() == set()
    assert rank.side.ended() == Outcomes()
    gate.open()
    (load,) = rank.side._ahead
    assert load.transfer is not None
    load.transfer.wait_source_reusable(LONG)
    rank.step(StepPlan())
    assert rank.side.arrived() == {"long"}
    assert rank.side.bad_blocks() == set()
    assert rank.side.ended() == Outcomes({1: 1})
    assert [values(cache[5:7]) for cache in rank.caches] == [[10], [11], [12]]
    assert rank.side.arrived() == set()


def test_a_load_ahead_that_breaks_arrives_with_bad_blocks(rank: Rank) -> None:
    """vLLM must hear of the blocks no later than of the end."""
    rank.hooks.fail(OSError("no such device"), stream="load", layer=1)
    rank.side.begin(StepPlan(ahead=(Job(1, (5, 6), (1, 0), ("long",), 1),)))
    rank.side.load()
    (load,) = rank.side._ahead
    assert load.transfer is not None
    load.transfer.wait_source_reusable(LONG)
    assert rank.side.arrived() == {"long"}
    assert rank.side.bad_blocks() == {5, 6}
    assert rank.side.ended() == Outcomes({}, {1: 1})


@pytest.mark.parametrize(
    "job",
    [Job(1, (5,), (99,), ("long",), 1), Job(1, (), (), ("long",), 1)],
    ids=["refused", "empty"],
)
def test_a_load_ahead_that_moves_nothing_arrives(rank: Rank, job: Job) -> None:
    """Its request waits for the end, whatever becomes of the job."""
    rank.step(StepPlan(ahead=(job,)))
    for load in rank.side._ahead:
        if load.transfer is not None:
            load.transfer.result(LONG)
    assert rank.side.arrived() == {"long"}
    assert rank.side.bad_blocks() == set(job.device_pages)


def test_a_forward_that_raised_before_its_loads_ahead_says_so(rank: Rank) -> None:
    """They were never submitted: their requests hear of them in the next step."""
    rank.side.begin(StepPlan(ahead=(Job(1, (5,), (1,), ("long",), 1),)))
    rank.side.begin(StepPlan())
    assert rank.side.arrived() == {"long"}
    assert rank.side.bad_blocks() == {5}
    assert rank.side.ended() == Outcomes({}, {1: 1})


def test_nothing_is_stored_before_it_is_written(rank: Rank) -> None:
    """LMCache#1068: a layer's copy starts when the forward has written it, and the forward goes on."""
    job = Job(2, (3,), (2,))
    rank.side.begin(StepPlan(store=job))
    rank.side.before(NAMES[0])
    rank.caches[0][3] = 20
    rank.side.after(NAMES[0])
    (store,) = rank.side._stores
    assert store.transfer is not None
    store.transfer.wait_layer(0, LONG)
    assert copied(rank, "backup") == [0]
    for layer in (1, 2):
        rank.caches[layer][3] = 20 + layer
        rank.side.after(NAMES[layer])
    rank.side.end()
    assert rank.all_ended() == Outcomes({2: 1})
    assert rank.step(StepPlan(load=Job(3, (7,), (2,)))) == set()
    assert [values(cache[7]) for cache in rank.caches] == [[20], [21], [22]]


def test_the_end_of_a_step_waits_for_no_copy(rank: Rank) -> None:
    """A store that stands still holds up nobody, and its job stays open."""
    gate = rank.hooks.gate(stream="backup")
    rank.step(StepPlan(store=Job(2, (3,), (2,))), value=20)
    assert rank.side.ended() == Outcomes()
    rank.step(StepPlan(load=Job(3, (5,), (0,))))
    assert rank.side.ended() == Outcomes({3: 1})
    gate.open()
    assert rank.all_ended() == Outcomes({2: 1})


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_broken_load_is_reported_and_breaks_no_forward(rank: Rank, layer: int) -> None:
    """vllm#39732: all its blocks are to be computed again, and this is said once."""
    rank.hooks.fail(OSError("no such device"), stream="load", layer=layer)
    assert rank.step(StepPlan(load=Job(1, (5, 6), (0, 1)))) == {5, 6}
    assert rank.side.bad_blocks() == set()
    assert rank.side.ended() == Outcomes({}, {1: 1})
    assert rank.side.take().failed_loads == 1


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_wait_that_cannot_be_made_breaks_the_load_alone(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A stream that captures, or CUDA's own error: what it would have waited for is computed again."""

    def refuse(*_: object) -> bool:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(layerwise, "fence", refuse)
        assert rank.step(StepPlan(load=Job(1, (5, 6), (0, 1)))) == {5, 6}
    assert rank.side.ended() == Outcomes({}, {1: 1})
    assert rank.step(StepPlan(load=Job(2, (5, 6), (0, 1)))) == set()
    assert rank.side.ended() == Outcomes({2: 1})


def test_a_fault_of_our_own_is_no_broken_load(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in this code must not look like one of a copy."""
    monkeypatch.setattr(layerwise, "fence", None)
    with pytest.raises(TypeError):
        rank.step(StepPlan(load=Job(1, (5, 6), (0, 1))))


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_submit_that_cannot_be_made_breaks_the_job_alone(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Nothing was queued, whoever says that it could not be: both jobs are outcomes, and the next step works."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    plan = StepPlan(load=Job(1, (5,), (0,)), store=Job(2, (3,), (2,)))
    with monkeypatch.context() as patched:
        for name in ("load", "backup"):
            patched.setattr(type(rank.side.mover.scheduler), name, refuse)
        assert rank.step(plan) == {5}
    assert rank.side.ended() == Outcomes({}, {1: 1, 2: 1})
    assert rank.step(StepPlan(load=Job(3, (5,), (0,)))) == set()


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_layer_that_cannot_be_stored_breaks_its_store_alone(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The forward goes on, and its blocks are not stored."""

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "layer_written", refuse)
        assert rank.step(StepPlan(store=Job(2, (3,), (2,))), value=20) == set()
    assert rank.all_ended() == Outcomes({}, {2: 1})


def test_a_broken_load_of_a_layer_that_nobody_asked_for_is_reported(rank: Rank) -> None:
    """Its pages are wrong all the same."""
    rank.hooks.fail(OSError("no such device"), stream="load", layer=2)
    rank.side.begin(StepPlan(load=Job(1, (5,), (0,))))
    rank.side.load()
    rank.side.end()
    (load,) = rank.side._loads
    assert load.transfer is not None
    load.transfer.wait_source_reusable(LONG)
    assert rank.side.bad_blocks() == {5}


def test_a_broken_store_is_an_outcome(rank: Rank) -> None:
    """Nobody waits for it; the scheduler side forgets its pages."""
    rank.hooks.fail(OSError("no such device"), stream="backup", layer=1)
    assert rank.step(StepPlan(store=Job(2, (3,), (2,))), value=20) == set()
    assert rank.all_ended() == Outcomes({}, {2: 1})


def test_pages_that_do_not_exist_break_the_job_alone(rank: Rank) -> None:
    """What cannot be submitted is an outcome like any other."""
    assert rank.step(StepPlan(load=Job(1, (5,), (99,)), store=Job(2, (99,), (2,)))) == {5}
    assert rank.side.ended() == Outcomes({}, {1: 1, 2: 1})


def test_a_load_that_hangs_ends_by_its_deadline() -> None:
    """vllm#49829: the forward goes on, and blocks are reported only when no late byte can reach them."""
    for rank in started(timeout_s=0.05):
        rank.step(StepPlan(store=Job(0, (1,), (0,))), value=10)
        assert rank.all_ended() == Outcomes({0: 1})
        rank.hooks.delay(0.09, stream="load", layer=0)
        assert rank.step(StepPlan(load=Job(1, (5,), (0,)))) == {5}
        late = rank.caches[0][5].clone()
        assert rank.side.ended() == Outcomes({}, {1: 1})
        assert torch.equal(rank.caches[0][5], late)


def test_a_copy_that_never_comes_back_ends_the_engine() -> None:
    """Its blocks can be given to nobody, so going on would be worse: the error says what hangs."""
    for rank in started(timeout_s=0.05):
        rank.step(StepPlan(store=Job(0, (1,), (0,))), value=10)
        rank.all_ended()
        gate = rank.hooks.gate(stream="load", layer=0)
        with pytest.raises(TimeoutError, match="waiting for its pages"):
            rank.step(StepPlan(load=Job(1, (5,), (0,))))
        gate.open()


def test_a_forward_that_raised_leaves_no_store_behind(rank: Rank) -> None:
    """The next step starts clean; layers that were never written are never copied."""
    rank.side.begin(StepPlan(store=Job(2, (3,), (2,))))
    rank.side.after(NAMES[0])
    rank.step(StepPlan())
    assert rank.all_ended() == Outcomes({}, {2: 1})
    assert copied(rank, "backup") in ([0], [])


def test_a_small_store_leaves_as_a_whole_behind_the_forward() -> None:
    """Starting each layer apart costs more than its copies; nothing moves before the last is written."""
    for rank in started(stream_mib=1):
        rank.side.begin(StepPlan(store=Job(2, (3,), (2,))))
        for layer, name in enumerate(NAMES):
            rank.side.before(name)
            rank.caches[layer][3] = 20 + layer
            rank.side.after(name)
        assert rank.hooks.ops == []
        rank.side.end()
        assert rank.all_ended() == Outcomes({2: 1})
        assert rank.step(StepPlan(load=Job(3, (7,), (2,)))) == set()
        assert [values(cache[7]) for cache in rank.caches] == [[20], [21], [22]]


@pytest.mark.parametrize("stream_mib", [0, 1], ids=["streaming", "whole"])
def test_a_forward_that_raised_stores_nothing(stream_mib: float) -> None:
    """Neither kind of store outlives it, and a load that was never begun is reported."""
    for rank in started(stream_mib=stream_mib):
        rank.side.begin(StepPlan(load=Job(1, (5,), (0,)), store=Job(2, (3,), (2,))))
        assert rank.step(StepPlan()) == {5}
        assert rank.all_ended() == Outcomes({}, {1: 1, 2: 1})
        assert rank.hooks.ops == []


def test_a_store_whose_deadline_passes_inside_the_forward_goes_quietly() -> None:
    """A long forward may still write its layers; the job is over, and the forward does not hear of it."""
    for rank in started(timeout_s=0.05):
        gate = rank.hooks.gate(stream="backup", layer=0)
        rank.side.begin(StepPlan(store=Job(2, (3,), (2,))))
        rank.side.after(NAMES[0])
        (store,) = rank.side._stores
        assert store.transfer is not None
        with pytest.raises(TransferFailed):
            store.transfer.result(LONG)
        gate.open()
        rank.side.after(NAMES[1])
        rank.side.end()
        assert rank.all_ended() == Outcomes({}, {2: 1})


def test_a_step_without_work_costs_no_transfer(rank: Rank) -> None:
    """Most decode steps move nothing."""
    rank.step(StepPlan())
    assert rank.hooks.ops == []
    assert rank.side.ended() == Outcomes()


def test_what_was_moved_is_counted(rank: Rank) -> None:
    """Blocks and bytes of this rank, in jobs that landed; asked again, nothing is new."""
    rank.side.take()
    rank.step(StepPlan(load=Job(1, (5, 6), (0, 1)), store=Job(2, (3,), (2,))), value=20)
    rank.all_ended()
    moved = rank.side.take()
    block = LAYERS * 2 * 4 * 6 * 4
    assert (moved.loads, moved.load_blocks, moved.load_bytes) == (1, 2, 2 * block)
    assert (moved.stores, moved.store_blocks, moved.store_bytes) == (1, 1, block)
    assert rank.side.take().loads == 0


def test_the_timeline_names_requests_and_shows_layers() -> None:
    """vllm#52859: which request's bytes moved when, beside the layers of the forward that read them."""
    for traced in started(trace="unused.json"):
        traced.step(StepPlan(store=Job(0, (1,), (0,), ("cmpl-7",), 1)), value=10)
        traced.all_ended()
        traced.step(StepPlan(load=Job(1, (5,), (0,), ("cmpl-8", "cmpl-9"), 2)))
        traced.all_ended()
        assert traced.side.tracer is not None
        timeline = traced.side.tracer.timeline()
        tags = {dict(request.tags or {}).get("requests") for request in timeline.requests}
        assert tags == {"cmpl-7", "cmpl-8,cmpl-9"}
        assert [layer.layer for layer in timeline.layers] == [0, 1, 2, 0, 1, 2]
        assert len(timeline.steps) == 2
