"""The scheduler side: what it must be told before it decides, and what it tells."""

from __future__ import annotations

import pytest

from offload import RequestError
from offload.integrations.vllm.messages import Outcomes
from offload.integrations.vllm.scheduler_side import PoolHolds, SchedulerSide
from offload.integrations.vllm.settings import Settings
from tests.vllm.symbolic import BLOCK, Pool, Request


class Tables:
    """vLLM's block tables of a step."""

    def __init__(self, **tables: list[int]) -> None:
        self.tables = tables

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return the table of the one group."""
        found = self.tables.get(req_id)
        return None if found is None else (found,)


def side() -> SchedulerSide:
    """Return a side that was told everything: two ranks, with 3 and 5 host pages."""
    made = SchedulerSide(Settings(host_blocks=5), BLOCK, 2)
    made.bind(Pool.of(16))
    made.ranks_have([5, 3])
    return made


def test_the_smallest_rank_counts() -> None:
    """vllm#50821: a page is the same number on every rank, so it must exist on every rank."""
    assert side().planner.index.num_pages == 3


@pytest.mark.parametrize("missing", ["pool", "ranks"])
def test_deciding_before_everything_is_known_is_refused(missing: str) -> None:
    """An engine that does not say what is needed gives one clear error, not a wrong answer."""
    made = SchedulerSide(Settings(host_blocks=5), BLOCK, 1)
    if missing == "ranks":
        made.bind(Pool.of(16))
    else:
        made.ranks_have([5])
    assert not made.ready
    with pytest.raises(RequestError, match=r"needs vLLM 0\.32 or later"):
        made.matched(Request("a", "aaaab", 5), 0)


def test_a_request_goes_through() -> None:
    """Admitted, stored, heard of, finished: nothing is busy, nothing held, and one block is offered."""
    made = side()
    request = Request("a", "aaaab", 5)
    assert made.matched(request, 0) == (0, False)
    made.admitted(request, [[3, 4]], 0)
    assert made.plan({"a": 5}, None).store is None
    request = Request("b", "aaaab", 5)
    made.admitted(request, [[3, 4]], 0)
    store = made.plan({"a": 5, "b": 5}, Tables(b=[3, 4])).store
    assert store is not None
    assert store.device_pages == (3,)
    assert made.busy
    made.heard(Outcomes({store.number: 2}), bad_blocks=())
    made.finished("b")
    assert not made.busy
    assert made.matched(Request("c", "aaaab", 5), 0) == (BLOCK, False)


def test_numbers_are_of_the_interval() -> None:
    """Asked again, nothing is new."""
    made = side()
    for name, letter in enumerate("abcde"):
        request = Request(str(name), letter * 5, 5)
        made.admitted(request, [[name + 1, 9]], 0)
        store = made.plan({str(name): 5}, Tables(**{str(name): [name + 1, 9]})).store
        assert store is not None
        made.heard(Outcomes({store.number: 2}), bad_blocks=())
    tally, evictions = made.take()
    assert (tally.stored_blocks, evictions) == (5, 2)
    tally, evictions = made.take()
    assert (tally.stored_blocks, evictions) == (0, 0)


def test_holds_are_users_among_others() -> None:
    """vllm#46951: whoever else uses a block, it is free when the last one is gone."""
    pool = Pool.of(8)
    holds = PoolHolds(pool)
    blocks = pool.take(2)
    assert blocks is not None
    ids = [block.block_id for block in blocks]
    holds.hold(ids)
    assert not holds.alone(ids)
    pool.free_blocks(blocks[:1])
    assert holds.alone(ids)
    holds.release(ids)
    assert [block.ref_cnt for block in blocks] == [0, 1]
    assert pool.free[-1] is blocks[0]
