"""The second door's transfers: whole jobs by number, over opaque pages and chunks of several blocks."""

# Axes: B blocks, k blocks per chunk.

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import attrs
import numpy as np
import pytest
import torch

from offload import RequestError, start_scheduler
from offload.integrations.vllm.jobs import Jobs, opaque_group, sub_pages
from offload.testing import Hooks, ThreadsDriver

LONG = 10.0


@attrs.define(eq=False)
class Rank:
    """Jobs over two tensors of opaque pages, of different length."""

    jobs: Jobs
    tensors: list[torch.Tensor]
    hooks: Hooks


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Pages step further than they are long in the second tensor, as padded ones do."""
    tensors = [
        torch.arange(8 * 16, dtype=torch.int8).view(8, 16),
        torch.arange(8 * 12, dtype=torch.int8).view(8, 12)[:, :10],
    ]
    hooks = Hooks()
    scheduler = start_scheduler(opaque_group(tensors, 8), driver=ThreadsDriver(hooks=hooks))
    jobs = Jobs(scheduler, LONG)
    yield Rank(jobs, tensors, hooks)
    jobs.close()


def pages(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return page ids as vLLM's specs hold them."""
    return np.array(ids, np.int64)


@pytest.mark.parametrize(("k", "first", "count"), list(product([1, 2, 3], range(5), range(1, 6))))
def test_a_chunk_is_as_many_pages_as_it_has_blocks(k: int, first: int, count: int) -> None:
    """Block by block: the chunk that holds it, and its place there; a job may start inside a chunk."""
    last = first + count - 1
    chunks = [7 - number for number in range(last // k - first // k + 1)]
    expected = [
        chunks[block // k - first // k] * k + block % k for block in range(first, first + count)
    ]
    assert sub_pages(chunks, count, first=first, blocks_per_chunk=k).tolist() == expected


def test_chunks_that_do_not_hold_the_blocks_are_refused() -> None:
    """A job that does not fit would copy other pages than vLLM means."""
    with pytest.raises(RequestError, match="5 blocks from block 1 on do not fit into 2 chunks"):
        sub_pages([0, 1], 5, first=1, blocks_per_chunk=2)


def test_a_job_comes_back_as_it_was(rank: Rank) -> None:
    """Both tensors move together, and pages not named stay."""
    before = [tensor.clone() for tensor in rank.tensors]
    rank.jobs.store(1, pages(2, 5), pages(6, 0))
    rank.jobs.wait({1})
    for tensor in rank.tensors:
        tensor[[2, 5]] = 0
    rank.jobs.load(2, pages(0, 6), pages(5, 2))
    rank.jobs.wait([2, 99])
    for tensor, old in zip(rank.tensors, before, strict=True):
        assert torch.equal(tensor, old)
    ended = rank.jobs.ended()
    assert [(each.number, each.good, each.nbytes) for each in ended] == [
        (1, True, 52),
        (2, True, 52),
    ]
    assert rank.jobs.ended() == []


def test_a_job_that_failed_has_ended_badly(rank: Rank) -> None:
    """Waiting for it raises nothing: its pages are free, and its outcome is asked for apart."""
    rank.hooks.fail(OSError("no such device"), stream="load")
    rank.jobs.load(3, pages(0), pages(1))
    rank.jobs.wait({3})
    (ended,) = rank.jobs.ended()
    assert (ended.number, ended.good) == (3, False)


def test_a_job_under_way_has_not_ended(rank: Rank) -> None:
    """Asking does not wait."""
    gate = rank.hooks.gate(stream="backup")
    rank.jobs.store(1, pages(2), pages(0))
    assert rank.jobs.ended() == []
    gate.open()
    rank.jobs.wait({1})
    assert [each.number for each in rank.jobs.ended()] == [1]
