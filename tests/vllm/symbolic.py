"""An engine without tensors: vLLM's scheduler in miniature, and ranks that copy late, in any order, or not at all.

A block's content is the key that its bytes would have, or `GARBAGE`. A store reads its device blocks at some
moment between the end of its step and the moment at which its ranks report it: if anybody had written them
meanwhile, the host would hold other content than its key says, and the next load would find out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import attrs

from offload.integrations.vllm.index import HostIndex
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.plan import Planner
from offload.integrations.vllm.scheduler_side import PoolHolds

BLOCK = 4
"""Tokens per block."""

GARBAGE = b"garbage"


@attrs.define(eq=False)
class Block:
    """A device block."""

    block_id: int
    ref_cnt: int = 0
    content: bytes = b""


@attrs.define(eq=False)
class Pool:
    """vLLM's block pool: reference counts, a free list and a prefix cache."""

    blocks: list[Block]
    free: list[Block]
    cached: dict[bytes, Block] = attrs.field(factory=dict)

    @classmethod
    def of(cls, num_blocks: int) -> Pool:
        """Return a pool whose block 0 is the null block."""
        blocks = [Block(number) for number in range(num_blocks)]
        blocks[0].ref_cnt = 1
        return cls(blocks, blocks[1:])

    @property
    def null_block(self) -> Block:
        """The block that stands for none."""
        return self.blocks[0]

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count one more user of each."""
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Count one fewer."""
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block)

    def take(self, count: int) -> list[Block] | None:
        """Return fresh blocks, or None where there are too few."""
        if count > len(self.free):
            return None
        taken, self.free[:count] = self.free[:count], []
        self.evict_blocks({block.block_id for block in taken})
        for block in taken:
            block.ref_cnt, block.content = 1, GARBAGE
        return taken

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Have the prefix cache find these no more."""
        self.cached = {k: b for k, b in self.cached.items() if b.block_id not in block_ids}


@attrs.define(eq=False)
class Request:
    """A request with its tokens, named by the letters of its prompt."""

    request_id: str
    tokens: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    blocks: list[Block] = attrs.field(factory=list)
    hashed: int = 0
    """Blocks, from the first, that the prefix cache was given."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """The prefix that each full block ends."""
        full = len(self.tokens) // BLOCK
        return [self.tokens[: (i + 1) * BLOCK].encode() for i in range(full)]


@attrs.define(eq=False)
class Running:
    """A job on one rank."""

    job: Job
    store: bool
    read: dict[int, bytes] | None = None
    """What a store has read, by host page; None: not yet."""


@attrs.define(eq=False)
class Rank:
    """Copies of one rank: its host pages, and jobs that are under way. Device blocks are alike on all ranks."""

    dice: random.Random
    pool: Pool
    failing: float
    host: dict[int, bytes] = attrs.field(factory=dict)
    running: list[Running] = attrs.field(factory=list)

    def load(self, job: Job) -> bool:
        """Load under a step's forward, or fail; return whether it landed."""
        good = self.dice.random() >= self.failing
        self._arrive(job, good=good)
        return good

    def store(self, job: Job) -> None:
        """Begin a store; its bytes are read later."""
        self.running.append(Running(job, store=True))

    def report(self, *, everything: bool) -> Outcomes:
        """Let some stores read, and some of those that have read end; return the ends."""
        landed: dict[int, int] = {}
        failed: dict[int, int] = {}
        for running in self.running[:]:
            if everything or self.dice.random() < 0.5:
                self._read(running)
            if running.read is None or not (everything or self.dice.random() < 0.5):
                continue
            self.running.remove(running)
            bad = self.dice.random() < self.failing
            (failed if bad else landed)[running.job.number] = 1
            if not running.store:
                self._arrive(running.job, good=not bad)
            elif not bad:
                self.host.update(running.read)
        return Outcomes(landed, failed)

    def load_ahead(self, job: Job) -> None:
        """Begin a load that no forward waits for; its bytes arrive when it ends."""
        self.running.append(Running(job, store=False))

    def _arrive(self, job: Job, *, good: bool) -> None:
        for device, page in zip(job.device_pages, job.host_pages, strict=True):
            self.pool.blocks[device].content = self.host[page] if good else GARBAGE

    def _read(self, running: Running) -> None:
        if running.read is None:
            pairs = zip(running.job.host_pages, running.job.device_pages, strict=True)
            running.read = {page: self.pool.blocks[device].content for page, device in pairs}


@attrs.define(eq=False)
class Engine:
    """Admits, preempts, aborts and finishes requests at random, and checks every load."""

    dice: random.Random
    failing: float = 0.0
    num_ranks: int = 1
    num_blocks: int = 24
    num_host_pages: int = 12
    lookahead: int = 1
    """Steps that are planned before the first of them is heard of: 2 is asynchronous scheduling."""

    async_load_tokens: int | None = None
    """Loads of more tokens run ahead of their requests."""

    pool: Pool = attrs.field(init=False)
    planner: Planner = attrs.field(init=False)
    ranks: list[Rank] = attrs.field(init=False)
    loading: dict[str, Request] = attrs.field(init=False, factory=dict)
    """Requests that have blocks and wait until they are loaded, aborted ones too."""
    loaded_ahead: int = attrs.field(init=False, default=0)
    _missing: dict[int, int] = attrs.field(init=False, factory=dict)
    """By number of a load ahead of its request, the ranks that have not ended it."""
    _jobs: dict[int, Job] = attrs.field(init=False, factory=dict)
    running: list[Request] = attrs.field(init=False, factory=list)
    waiting: list[Request] = attrs.field(init=False, factory=list)
    loaded: int = attrs.field(init=False, default=0)
    _flying: list[tuple[set[str], Outcomes, set[int]]] = attrs.field(init=False, factory=list)
    _made: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.pool = Pool.of(self.num_blocks)
        self.planner = Planner(
            HostIndex(self.num_host_pages),
            PoolHolds(self.pool),
            BLOCK,
            self.num_ranks,
            async_load_tokens=self.async_load_tokens,
        )
        self.ranks = [Rank(self.dice, self.pool, self.failing) for _ in range(self.num_ranks)]

    def ask(self, tokens: str) -> None:
        """Queue a request."""
        self._made += 1
        self.waiting.append(Request(f"r{self._made}", tokens, len(tokens)))

    def step(self) -> None:
        """Plan one step, run it, and hear of the step `lookahead - 1` before."""
        self._shuffle()
        self._admit()
        scheduled = self._schedule()
        tables = {each.request_id: [b.block_id for b in each.blocks] for each in self.running}
        plan = self.planner.plan(scheduled, tables.get)
        self._run(plan, scheduled)
        if len(self._flying) >= self.lookahead:
            self._hear(*self._flying.pop(0))

    def finish(self) -> None:
        """End all requests and all jobs; check that nothing is held."""
        for request in self.running:
            self._release(request)
        self.running, self.waiting = [], []
        while self._flying:
            self._hear(*self._flying.pop(0))
        for rank in self.ranks:
            self.planner.heard(rank.report(everything=True))
        for request in [
            *self.loading.values(),
            *self.running,
        ]:  # and those whose load was over just now
            self._release(request)
        self.loading, self.running = {}, []
        assert not self.planner.busy
        assert all(block.ref_cnt == (block.block_id == 0) for block in self.pool.blocks)
        assert self.planner.index.num_used == len(self.planner.index._entries)

    # Inside ------------------------------------------------------------------------------------------------

    def _shuffle(self) -> None:
        """Abort or preempt somebody now and then, and forget the device's own prefixes."""
        if self.running and self.dice.random() < 0.15:
            victim = self.running.pop(self.dice.randrange(len(self.running)))
            abort = self.dice.random() < 0.5
            self._release(victim, abort=abort)
            if not abort:
                victim.num_computed_tokens = 0
                self.waiting.insert(0, victim)
        if self.loading and self.dice.random() < 0.1:
            self.planner.finished(self.dice.choice(sorted(self.loading)))
        if self.dice.random() < 0.3:
            self.pool.cached.clear()

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            local = self._local(request)
            external = self.planner.matched(request, len(local) * BLOCK)
            fresh = self._take(request, local)
            if fresh is None:
                return
            self.waiting.pop(0)
            self.pool.touch(local)
            request.blocks = local + fresh
            request.num_computed_tokens = len(local) * BLOCK + external
            ahead = self.planner.loads_ahead(request.request_id)
            self.planner.admitted(request, [b.block_id for b in request.blocks], external)
            if ahead:
                self.loading[request.request_id] = request
                continue
            self._cache(request, 0, request.num_computed_tokens)
            self.running.append(request)

    def _take(self, request: Request, local: Sequence[Block]) -> list[Block] | None:
        """Return blocks for all tokens beyond those that are cached."""
        needed = -(-request.num_tokens // BLOCK) - len(local)
        held = [block for block in local if not block.ref_cnt]
        if needed + len(held) > len(self.pool.free):
            return None
        self.pool.touch(held)
        fresh = self.pool.take(needed)
        self.pool.free_blocks(held)
        return fresh

    def _local(self, request: Request) -> list[Block]:
        found: list[Block] = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in self.pool.cached:
                break
            found.append(self.pool.cached[key])
        return found

    def _schedule(self) -> dict[str, int]:
        """Return how many tokens each request computes: a chunk of its prompt, or one."""
        scheduled: dict[str, int] = {}
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            count = min(left, self.dice.choice([1, BLOCK, 3 * BLOCK]))
            scheduled[request.request_id] = count
            start = request.num_computed_tokens
            self._cache(request, start, start + count)
        return {name: count for name, count in scheduled.items() if count}

    def _cache(self, request: Request, start: int, end: int) -> None:
        """Hash the blocks that these tokens fill, before they are loaded or computed, as vLLM does.

        A block that was hashed once keeps what has become of it: computed again, it is not hashed again.
        """
        request.hashed = max(request.hashed, start // BLOCK)
        for i in range(request.hashed, min(end // BLOCK, len(request.block_hashes))):
            self.pool.cached.setdefault(request.block_hashes[i], request.blocks[i])
            request.hashed = i + 1

    def _run(self, plan: StepPlan, scheduled: dict[str, int]) -> None:
        """Load, compute, begin to store; then let requests go on or finish."""
        bad: set[int] = set()
        outcomes = Outcomes()
        if plan.load is not None:
            for rank in self.ranks:
                good = rank.load(plan.load)
                outcomes += Outcomes(
                    {plan.load.number: 1} if good else {}, {} if good else {plan.load.number: 1}
                )
                bad |= set() if good else set(plan.load.device_pages)
            self.loaded += len(plan.load.device_pages)
        for request in self.running[:]:
            self._compute(request, scheduled.get(request.request_id, 0))
        if plan.store is not None:
            for rank in self.ranks:
                rank.store(plan.store)
        for job in plan.ahead:
            self._jobs[job.number], self._missing[job.number] = job, self.num_ranks
            self.loaded_ahead += len(job.device_pages)
            for rank in self.ranks:
                rank.load_ahead(job)
        arrived: set[str] = set()
        for rank in self.ranks:
            ended = rank.report(everything=False)
            outcomes += ended
            arrived |= self._arrived(ended, bad)
        self._flying.append((arrived, outcomes, bad))

    def _arrived(self, ended: Outcomes, bad: set[int]) -> set[str]:
        """Add the blocks of failed loads ahead of requests; return the requests of those that all ranks have ended."""
        names = set()
        for number in [*ended.landed, *ended.failed]:
            if number not in self._missing:
                continue
            bad |= set(self._jobs[number].device_pages) if number in ended.failed else set()
            self._missing[number] -= 1
            if not self._missing[number]:
                names.add(self._jobs[number].requests[0])
        return names

    def _compute(self, request: Request, count: int) -> None:
        """Write a block's content when its last token is computed: its key, if all before it is right."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        keys = request.block_hashes
        whole = all(
            b.content == key for b, key in zip(request.blocks[: start // BLOCK], keys, strict=False)
        )
        for i in range(start // BLOCK, end // BLOCK):
            request.blocks[i].content = keys[i] if whole else GARBAGE
        request.num_computed_tokens = end
        if end == request.num_tokens:
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """Sample a token, or finish."""
        room = request.num_tokens < len(request.blocks) * BLOCK or bool(self.pool.free)
        if self.dice.random() < 0.2 or not room:
            self.running.remove(request)
            self._release(request)
            return
        request.tokens += self.dice.choice("xy")
        if request.num_tokens > len(request.blocks) * BLOCK:
            fresh = self.pool.take(1)
            assert fresh is not None
            request.blocks += fresh

    def _release(self, request: Request, *, abort: bool = True) -> None:
        if abort:
            self.planner.finished(request.request_id)
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.hashed = [], 0

    def _hear(self, arrived: set[str], outcomes: Outcomes, bad: set[int]) -> None:
        """Take a step's output: cut back who is first to read a block that was not loaded, and trust it to compute
        the block for the others, as vLLM does; then tell the planner.
        """
        for readers in (self.loading.values(), self.running):
            marked: set[int] = set()
            for request in readers:
                ids = [block.block_id for block in request.blocks]
                first = next((i for i, b in enumerate(ids) if b in bad and b not in marked), None)
                if first is not None:
                    request.num_computed_tokens = min(request.num_computed_tokens, first * BLOCK)
                marked |= bad.intersection(ids)
        self.planner.heard(outcomes, bad_blocks=bad)
        for name in arrived:
            self._promote(self.loading.pop(name))
        self._check_host()
        self._check_device()

    def _promote(self, request: Request) -> None:
        """Have a request run whose load is over, or let go of it where it was aborted meanwhile."""
        if request.request_id not in self.planner._followed:
            self._release(request)
            return
        self._cache(request, 0, request.num_computed_tokens)
        self.planner.admitted(request, [b.block_id for b in request.blocks], 0)
        self.running.append(request)

    def _check_device(self) -> None:
        """Nobody goes on from garbage, and the prefix cache finds none, but for what steps under way compute."""
        if self._flying:
            return
        for request in self.running:
            whole = zip(request.blocks, request.block_hashes, strict=False)
            for block, key in list(whole)[: request.num_computed_tokens // BLOCK]:
                assert block.content == key
        assert all(block.content == key for key, block in self.pool.cached.items())

    def _check_host(self) -> None:
        """Every block that is offered holds what its key says, on every rank."""
        for key, entry in self.planner.index._entries.items():
            if entry.ready:
                assert [rank.host[entry.page] for rank in self.ranks] == [key] * self.num_ranks
