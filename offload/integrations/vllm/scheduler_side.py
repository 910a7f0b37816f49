"""The scheduler side: vLLM's requests, blocks and outputs as the planner's. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from offload import RequestError
from offload.integrations.vllm.index import HostIndex
from offload.integrations.vllm.messages import Outcomes, StepPlan
from offload.integrations.vllm.plan import Asking, Holds, Planner, Tally
from offload.integrations.vllm.settings import Settings


class Block(Protocol):
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int


B = TypeVar("B", bound=Block)


class BlockPool(Protocol[B]):
    """vLLM's pool of device blocks, as far as it is used here."""

    @property
    def blocks(self) -> Sequence[B]:
        """By id."""

    @property
    def null_block(self) -> B:
        """The block that stands for none."""

    def touch(self, blocks: Sequence[B]) -> None:
        """Count one more user of each."""

    def free_blocks(self, ordered_blocks: Iterable[B]) -> None:
        """Count one fewer; the first that is free is reused first."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the hashes of blocks, free or in use."""


@attrs.frozen(eq=False)
class PoolHolds(Generic[B]):
    """Holds as users in vLLM's own reference counts: a block is free when the last user is gone, whoever it is."""

    pool: BlockPool[B]

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being reused."""
        self.pool.touch([self.pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        """Take back one hold of each; the tail of a prefix is reused before its head."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])

    def alone(self, blocks: Iterable[int]) -> bool:
        """Return whether one of these would be free but for our hold."""
        return any(self.pool.blocks[block].ref_cnt == 1 for block in blocks)

    def forget(self, blocks: Collection[int]) -> None:
        """Have the prefix cache find these no more, whoever uses them."""
        self.pool.evict_blocks(set(blocks))


class Tables(Protocol):
    """`SchedulerOutput.kv_connector_block_state`: block tables, by request."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return the table of each group."""


@attrs.define(eq=False)
class SchedulerSide:
    """Decides for all ranks. One thread, the engine core's."""

    settings: Settings
    block_size: int
    num_ranks: int
    _holds: Holds | None = None
    _null_block: int = 0
    _num_blocks: int | None = None
    _planner: Planner | None = None
    _counted_evictions: int = 0

    # Before serving --------------------------------------------------------------------------------------

    def bind(self, pool: BlockPool[B]) -> None:
        """Take vLLM's block pool."""
        self._holds, self._null_block = PoolHolds(pool), pool.null_block.block_id

    def ranks_have(self, num_host_blocks: Iterable[int]) -> None:
        """Take the host size of every rank; the smallest counts, as a page is the same number on all."""
        self._num_blocks = min(num_host_blocks)

    @property
    def planner(self) -> Planner:
        """What decides, made at first use.

        Raises:
            RequestError: vLLM has not said what it needs to know.
        """
        if self._planner is None:
            if self._holds is None or self._num_blocks is None:
                raise RequestError(
                    "vLLM has given OffloadConnector no block pool or no host size before its first request. "
                    "It needs vLLM 0.32 or later, and workers that registered their KV caches."
                )
            self._planner = Planner(
                HostIndex(self._num_blocks),
                self._holds,
                self.block_size,
                self.num_ranks,
                self.settings.store,
                self._null_block,
                self.settings.async_load_tokens,
            )
        return self._planner

    @property
    def ready(self) -> bool:
        """Whether everything was said that is needed to decide."""
        return self._holds is not None and self._num_blocks is not None

    # Serving -------------------------------------------------------------------------------------------------

    def matched(self, request: Asking, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens the host has, and whether they are loaded before the request is scheduled."""
        count = self.planner.matched(request, num_computed_tokens)
        return count, self.planner.loads_ahead(request.request_id)

    def admitted(
        self, request: Asking, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Take a request that got its blocks."""
        self.planner.admitted(request, tables[0], num_external_tokens)

    def plan(self, num_scheduled_tokens: Mapping[str, int], tables: Tables | None) -> StepPlan:
        """Return what the step moves."""

        def blocks_of(name: str) -> Sequence[int] | None:
            found = None if tables is None else tables.get_block_ids(name)
            return None if found is None else found[0]

        return self.planner.plan(num_scheduled_tokens, blocks_of)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self.planner.finished(request_id)

    def heard(self, outcomes: Outcomes, *, bad_blocks: Collection[int]) -> None:
        """Take what ranks say."""
        self.planner.heard(outcomes, bad_blocks=bad_blocks)

    @property
    def busy(self) -> bool:
        """Whether jobs are under way, and the engine must go on stepping to hear of their end."""
        return self._planner is not None and self._planner.busy

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a job frees a block."""
        return self._planner is not None and self._planner.frees_blocks

    def clear(self) -> None:
        """Forget what the host has."""
        if self._planner is not None:
            self._planner.clear()

    # Numbers -------------------------------------------------------------------------------------------------

    def take(self) -> tuple[Tally, int]:
        """Return what was decided since the last call, and the evictions in between."""
        planner = self.planner
        tally, planner.tally = planner.tally, Tally()
        evictions, self._counted_evictions = (
            planner.index.evictions - self._counted_evictions,
            planner.index.evictions,
        )
        return tally, evictions
