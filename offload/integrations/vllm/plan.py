"""The scheduler side's decisions: what a step loads and stores, and what outcomes mean. Pure.

A load runs under the forward of its step, or *ahead* of its request: vLLM then gives the request its blocks, and
schedules it when all ranks have said that the load is over. Its blocks are in nobody's prefix cache until then,
so that nobody else reads them.

Four rules keep blocks whole:

1. A block with a job under way is held, whatever its request does: preempted, aborted or finished. Its
   hold ends when every rank has said that the job has ended.
2. A stored block is offered to others only after that, and never when a load failed meanwhile: what a
   forward computed over missing bytes must not be found under a good hash.
3. A block is known by its hash, so it is final: the hash exists only once all its tokens do.
4. When a load fails, everybody who reads its blocks computes them again, and vLLM's own prefix cache forgets
   them and all behind them (`readers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import attrs

from offload.integrations.vllm.drafts import Draft, Open
from offload.integrations.vllm.index import HostIndex
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.readers import Readers


class Asking(Protocol):
    """A request, as vLLM's scheduler knows it."""

    num_computed_tokens: int
    """Tokens whose KV is there before this step."""

    @property
    def request_id(self) -> str:
        """vLLM's id."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for each full block of tokens that are known."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the prompt."""


class Holds(Protocol):
    """vLLM's block pool: a held block is not handed out."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being reused."""

    def release(self, blocks: Sequence[int]) -> None:
        """Take back one hold of each."""

    def alone(self, blocks: Iterable[int]) -> bool:
        """Return whether one of these would be free but for our hold."""

    def forget(self, blocks: Collection[int]) -> None:
        """Have vLLM's own prefix cache find these no more, whoever uses them."""


@attrs.define(eq=False)
class _Followed:
    """A request that was admitted and has not finished."""

    request: Asking
    decided: int = 0
    """Blocks, from the first, about whose store was decided."""


@attrs.frozen
class _Asked:
    """What vLLM was last answered about a request that it has not admitted."""

    num_computed_tokens: int = 0
    ahead: bool = False


@attrs.define
class Tally:
    """What was decided since it was last taken."""

    loaded_blocks: int = 0
    stored_blocks: int = 0
    """Stores that were begun."""
    no_room_blocks: int = 0
    """Blocks that were not stored because every host page was busy."""
    tainted_blocks: int = 0
    """Stored blocks that were thrown away because a load had failed."""


@attrs.define(eq=False)
class Planner:
    """Decides; told of requests by vLLM's scheduler, of outcomes by the workers."""

    index: HostIndex
    holds: Holds
    block_size: int
    """Tokens per block."""
    num_ranks: int = 1
    store: Literal["all", "prompt", "none"] = "all"
    """Which full blocks are backed up."""
    null_block: int = 0
    """The id that stands for a block that a sliding window has left."""
    async_load_tokens: int | None = None
    """Loads of more tokens than this run ahead of their requests."""
    tally: Tally = attrs.field(init=False, factory=Tally)

    _asked: dict[str, _Asked] = attrs.field(init=False, factory=dict)
    _followed: dict[str, _Followed] = attrs.field(init=False, factory=dict)
    _open: dict[int, Open] = attrs.field(init=False, factory=dict)
    _loads: Draft = attrs.field(init=False, factory=Draft)
    """The load of the next step, which gets the next number."""
    _ahead: list[Draft] = attrs.field(init=False, factory=list)
    """Those of the next step that run ahead of their requests."""
    _readers: Readers = attrs.field(init=False, factory=Readers)
    _next: int = attrs.field(init=False, default=0)

    # What vLLM's scheduler asks ------------------------------------------------------------------------

    def matched(self, request: Asking, num_computed_tokens: int) -> int:
        """Return how many tokens beyond those computed the host has. Changes nothing that others see.

        The last token is always left to compute: a forward needs one.
        """
        count = self._matched(request, num_computed_tokens)
        ahead = self.async_load_tokens is not None and count > self.async_load_tokens
        self._asked[request.request_id] = _Asked(num_computed_tokens, ahead)
        return count

    def loads_ahead(self, request_id: str) -> bool:
        """Return whether the load that was last offered runs ahead of its request."""
        return self._asked[request_id].ahead

    def admitted(self, request: Asking, blocks: Sequence[int], num_external_tokens: int) -> None:
        """Take a request that got its blocks, and note the load that it was promised."""
        self._followed[request.request_id] = _Followed(request)
        asked = self._asked.pop(request.request_id, _Asked())
        if num_external_tokens:
            self._promised(request, blocks, asked, num_external_tokens)
        self._readers.admitted(request, blocks)

    def plan(
        self,
        num_scheduled_tokens: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[int] | None],
    ) -> StepPlan:
        """Return what this step moves.

        Args:
            num_scheduled_tokens: By request, the tokens that its forward computes now.
            blocks_of: The block table of a request; asked only where there is something to store, or a load
                is under way.
        """
        self._readers.computing(num_scheduled_tokens, blocks_of)
        loads, self._loads = self._loads, Draft()
        stores = Draft()
        for name, count in num_scheduled_tokens.items():
            followed = self._followed.get(name)
            if followed is not None:
                self._store(followed, count, blocks_of, stores)
        load = self._begin(loads, store=False) if loads.device_pages else None
        store = self._begin(stores, store=True) if stores.device_pages else None
        drafts, self._ahead = self._ahead, []
        # Also one without blocks, where a window has left them all: its request waits to hear of it.
        return StepPlan(load, store, tuple(self._begin(each, store=False) for each in drafts))

    def finished(self, request_id: str) -> None:
        """Forget a request. What it holds for jobs under way stays held."""
        self._asked.pop(request_id, None)
        self._followed.pop(request_id, None)

    def clear(self) -> None:
        """Forget what the host has, and store everything anew."""
        self.index.clear()
        self._look_again()

    @property
    def busy(self) -> bool:
        """Whether some job has not ended."""
        return bool(self._open)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a job gives vLLM a block back."""
        return any(self.holds.alone(each.job.device_pages) for each in self._open.values())

    # What the workers say --------------------------------------------------------------------------------

    def heard(self, outcomes: Outcomes, *, bad_blocks: Collection[int] = ()) -> None:
        """Take outcomes of some ranks, after vLLM has done with the step's output what it does.

        Args:
            bad_blocks: Those that any connector reported as not loaded.
        """
        if bad_blocks or any(not self._open[n].store for n in outcomes.failed if n in self._open):
            self._taint()
            self._cut_back(outcomes, bad_blocks)
        for number, count in outcomes.failed.items():
            self._ended(number, count, good=False)
        for number, count in outcomes.landed.items():
            self._ended(number, count, good=True)

    # Inside ----------------------------------------------------------------------------------------------

    def _matched(self, request: Asking, num_computed_tokens: int) -> int:
        if num_computed_tokens % self.block_size:
            return 0
        first = num_computed_tokens // self.block_size
        last = (request.num_tokens - 1) // self.block_size
        if last <= first:
            return 0
        return self.index.match(request.block_hashes[first:last]) * self.block_size

    def _promised(
        self, request: Asking, blocks: Sequence[int], asked: _Asked, num_external_tokens: int
    ) -> None:
        first = asked.num_computed_tokens // self.block_size
        end = first + -(-num_external_tokens // self.block_size)
        wanted = [i for i in range(first, end) if blocks[i] != self.null_block]
        keys = [request.block_hashes[i] for i in wanted]
        device = [blocks[i] for i in wanted]
        self.index.touch(request.block_hashes[:end])
        host = self.index.read(keys)
        self.holds.hold(device)
        if asked.ahead:
            self._ahead.append(Draft())
            self._ahead[-1].add(request.request_id, device, host, keys)
        else:
            self._loads.add(request.request_id, device, host, keys)
            self._readers.expect(self._next, device)
        self.tally.loaded_blocks += len(device)

    def _store(
        self,
        followed: _Followed,
        count: int,
        blocks_of: Callable[[str], Sequence[int] | None],
        stores: Draft,
    ) -> None:
        request = followed.request
        hashes = request.block_hashes
        full = min(self._storable(request, count) // self.block_size, len(hashes))
        first, followed.decided = followed.decided, max(full, followed.decided)
        new = [i for i in range(first, full) if hashes[i] not in self.index]
        blocks = blocks_of(request.request_id) if new else None
        if blocks is None:
            return
        new = [i for i in new if blocks[i] != self.null_block]
        host = self.index.write([hashes[i] for i in new], keep=hashes[:full])
        self.index.touch(hashes[:full])
        self.tally.no_room_blocks += len(new) - len(host)
        new = new[: len(host)]
        if not new:
            return
        device = [blocks[i] for i in new]
        self.holds.hold(device)
        stores.add(request.request_id, device, host, [hashes[i] for i in new])
        self.tally.stored_blocks += len(device)

    def _storable(self, request: Asking, count: int) -> int:
        """Return how many tokens, from the first, may be stored when this step's forward is over."""
        if self.store == "none":
            return 0
        computed = request.num_computed_tokens + count
        return min(computed, request.num_prompt_tokens) if self.store == "prompt" else computed

    def _begin(self, draft: Draft, *, store: bool) -> Job:
        job = draft.job(self._next)
        self._next += 1
        self._open[job.number] = Open(job, tuple(draft.keys), store, self.num_ranks)
        return job

    def _ended(self, number: int, ranks: int, *, good: bool) -> None:
        opened = self._open[number]
        opened.missing -= ranks
        opened.good = opened.good and good
        if opened.missing > 0:
            return
        del self._open[number]
        self._readers.landed(number)
        self.index.done(opened.keys, opened.job.host_pages, keep=opened.good)
        self.holds.release(opened.job.device_pages)

    def _taint(self) -> None:
        """Trust no store that is under way: its forward may have read what was not loaded."""
        for opened in self._open.values():
            if opened.store and opened.good:
                opened.good = False
                self.index.forget(opened.keys, opened.job.host_pages)
                self.tally.tainted_blocks += len(opened.keys)
        self._look_again()

    def _cut_back(self, outcomes: Outcomes, bad_blocks: Collection[int]) -> None:
        """Have nobody go on from blocks that were not loaded, and nobody find what was computed behind them."""
        for reader in self._readers.broken(outcomes.failed, bad_blocks):
            whole = reader.first * self.block_size
            reader.request.num_computed_tokens = min(reader.request.num_computed_tokens, whole)
            self.holds.forget(reader.blocks)

    def _look_again(self) -> None:
        for followed in self._followed.values():
            followed.decided = 0
