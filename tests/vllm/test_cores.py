"""Copies beside a model on the CPU run where its compute threads are not bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from offload.integrations.vllm.adopt import adopt
from offload.integrations.vllm.cores import on_spare_cores, spare_cores
from offload.integrations.vllm.messages import Job, StepPlan
from offload.integrations.vllm.settings import Settings
from offload.integrations.vllm.worker import WorkerSide

MINE = os.sched_getaffinity(0)

pytestmark = pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")


@pytest.fixture
def bound() -> Iterator[int]:
    """Bind this thread to one core, as vLLM binds the model's."""
    core = min(MINE)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, MINE)


def test_an_unbound_thread_has_no_spare_cores() -> None:
    """Where compute may run everywhere, copies may too."""
    assert spare_cores() == frozenset()
    with on_spare_cores():
        assert os.sched_getaffinity(0) == MINE


def test_spare_cores_are_those_that_compute_is_not_bound_to(bound: int) -> None:
    """Threads made in the block are on them; the thread itself is back where it was."""
    seen: list[set[int]] = []
    assert spare_cores() == MINE - {bound}
    with on_spare_cores():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [MINE - {bound}]
    assert os.sched_getaffinity(0) == {bound}


def test_every_thread_of_a_worker_side_is_on_spare_cores(bound: int) -> None:
    """The loop, and the streams that it starts when they are first used."""
    before = set(threading.enumerate())
    caches = {"model.layers.0.attn": torch.zeros(4, 2, 4, 6)}
    side = WorkerSide.start(Settings(host_blocks=2), adopt(caches, 4), 2)
    try:
        side.begin(StepPlan(store=Job(0, (1,), (0,))))
        side.end()
        side._stores[0].transfer.result(10)  # type: ignore[union-attr]
        side.begin(StepPlan(load=Job(1, (2,), (0,))))
        side.load()
        side._loads[0].transfer.result(10)  # type: ignore[union-attr]
        ours = set(threading.enumerate()) - before
        assert len(ours) >= 3
        for thread in ours:
            assert thread.native_id is not None
            assert os.sched_getaffinity(thread.native_id) == MINE - {bound}, thread.name
    finally:
        side.close()
