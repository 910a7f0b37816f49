"""The scheduler side's decisions, event by event."""

from __future__ import annotations

import random

import attrs
import pytest

from offload.integrations.vllm.index import HostIndex
from offload.integrations.vllm.messages import Job, Outcomes, StepPlan
from offload.integrations.vllm.plan import Planner
from offload.integrations.vllm.scheduler_side import PoolHolds
from tests.vllm.symbolic import BLOCK, Engine, Pool, Request


@attrs.define(eq=False)
class Desk:
    """A planner, a pool of device blocks, and shorthands for what vLLM's scheduler does."""

    num_ranks: int = 1
    num_host_pages: int = 8
    store: str = "all"
    pool: Pool = attrs.field(init=False)
    planner: Planner = attrs.field(init=False)
    tables: dict[str, list[int]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.pool = Pool.of(32)
        self.planner = Planner(
            HostIndex(self.num_host_pages),
            PoolHolds(self.pool),
            BLOCK,
            self.num_ranks,
            self.store,  # type: ignore[arg-type]
        )

    def admit(self, request: Request, local: int = 0) -> int:
        """Admit a request that has so many blocks on the device; return the tokens that it loads."""
        external = self.planner.matched(request, local * BLOCK)
        blocks = self.pool.take(-(-request.num_tokens // BLOCK))
        assert blocks is not None
        request.blocks = blocks
        self.tables[request.request_id] = [block.block_id for block in blocks]
        request.num_computed_tokens = local * BLOCK + external
        self.planner.admitted(request, self.tables[request.request_id], external)
        return external

    def step(self, *computing: tuple[Request, int]) -> StepPlan:
        """Plan a step in which requests compute so many tokens, and count those as computed."""
        counts = {request.request_id: count for request, count in computing}
        plan = self.planner.plan(counts, self.tables.get)
        for request, count in computing:
            request.num_computed_tokens += count
        return plan

    def land(self, *jobs: Job | None) -> None:
        """Say for every rank that jobs have landed."""
        self.planner.heard(Outcomes({job.number: self.num_ranks for job in jobs if job}))

    def free(self, request: Request) -> None:
        """Give the request's own references back, as vLLM does at its end or preemption."""
        self.pool.free_blocks(reversed(request.blocks))

    def held(self, job: Job | None) -> list[int]:
        """Return which of a job's device blocks are not free."""
        assert job is not None
        return [page for page in job.device_pages if self.pool.blocks[page].ref_cnt]


def request(tokens: str, name: str = "a") -> Request:
    """Return a request; a block is four letters."""
    return Request(name, tokens, len(tokens))


def stored(desk: Desk, tokens: str) -> None:
    """Have the host hold the full blocks of a prompt, and the device nothing."""
    first = request(tokens, "first")
    desk.admit(first)
    desk.land(desk.step((first, len(tokens))).store)
    desk.planner.finished("first")
    desk.free(first)


def test_a_step_stores_the_blocks_that_it_fills() -> None:
    """One job for all requests; a block that is not full yet waits for the step that fills it."""
    desk = Desk()
    one, two = request("aaaabbbbcc", "one"), request("ddddee", "two")
    desk.admit(one)
    desk.admit(two)
    plan = desk.step((one, 6), (two, 6))
    assert plan.load is None
    assert plan.store is not None
    assert plan.store.device_pages == (desk.tables["one"][0], desk.tables["two"][0])
    assert plan.store.requests == ("one", "two")
    assert desk.step((one, 4)).store == Job(1, (desk.tables["one"][1],), (2,), ("one",), 1)
    assert desk.step((two, 1)) == StepPlan()


def test_a_block_whose_last_token_is_unknown_has_no_hash_and_is_not_stored() -> None:
    """vllm#33881: under asynchronous scheduling a token is computed before it is known here."""
    desk = Desk()
    one = request("aaa")
    desk.admit(one)
    assert desk.step((one, 4)).store is None
    one.tokens += "b"
    assert desk.step((one, 1)).store is not None


def test_a_prefix_is_loaded_up_to_the_last_token() -> None:
    """A forward needs a token to compute: the block of the last one is not loaded, even if it is full."""
    desk = Desk()
    stored(desk, "aaaabbbb")
    two = request("aaaabbbb", "two")
    assert desk.admit(two) == BLOCK
    plan = desk.step((two, 4))
    assert plan.load is not None
    assert plan.load.device_pages == (desk.tables["two"][0],)
    assert plan.store is None, "the host has both blocks"


def test_what_the_device_has_is_not_loaded() -> None:
    """vllm#2671 of LMCache: blocks that others may be reading are not written."""
    desk = Desk()
    stored(desk, "aaaabbbbcccc")
    two = request("aaaabbbbccccd", "two")
    assert desk.admit(two, local=2) == BLOCK
    load = desk.step((two, 1)).load
    assert load is not None
    assert load.device_pages == (desk.tables["two"][2],)


def test_a_question_changes_nothing() -> None:
    """vLLM may ask again and again, and never admit."""
    desk = Desk()
    stored(desk, "aaaabbbb")
    two = request("aaaabbbbc", "two")
    assert [desk.planner.matched(two, 0) for _ in range(3)] == [8, 8, 8]
    desk.planner.finished("two")
    assert not desk.planner.busy
    assert desk.step() == StepPlan()


def test_a_local_hit_inside_a_block_asks_for_nothing() -> None:
    """Whole blocks are moved; a prefix that ends inside one is the device's own matter."""
    desk = Desk()
    stored(desk, "aaaabbbb")
    assert desk.planner.matched(request("aaaabbbbc"), 3) == 0


def test_blocks_that_a_window_has_left_are_neither_loaded_nor_stored() -> None:
    """vLLM's null block stands for them; it holds nothing."""
    desk = Desk()
    stored(desk, "aaaabbbb")
    two = request("aaaabbbbccccd", "two")
    external = desk.planner.matched(two, 0)
    desk.tables["two"] = [0, 7, 8, 9]
    two.num_computed_tokens = external
    desk.planner.admitted(two, desk.tables["two"], external)
    desk.tables["two"] = [0, 7, 0, 9]
    plan = desk.step((two, 5))
    assert plan.load is not None
    assert plan.load.device_pages == (7,)
    assert plan.store is None


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_blocks_stay_until_every_rank_is_done(kind: str, end: str) -> None:
    """vllm#29870, vllm-ascend#13501: whatever becomes of the request, a block under a copy is not reused."""
    desk = Desk(num_ranks=2)
    if kind == "load":
        stored(desk, "aaaabbbb")
    one = request("aaaabbbbc")
    desk.admit(one)
    plan = desk.step((one, one.num_tokens - one.num_computed_tokens))
    job = plan.load if kind == "load" else plan.store
    assert job is not None
    if end == "finished":
        desk.planner.finished("a")
    desk.free(one)
    assert desk.held(job) == list(job.device_pages)
    assert desk.planner.frees_blocks
    desk.planner.heard(Outcomes({job.number: 1}))
    assert desk.held(job) == list(job.device_pages)
    desk.planner.heard(Outcomes({job.number: 1}))
    assert desk.held(job) == []
    assert not desk.planner.busy


def test_waiting_for_a_copy_frees_nothing_that_requests_still_use() -> None:
    """vLLM preempts at once where no end of a copy would give it a block."""
    desk = Desk()
    one = request("aaaab")
    desk.admit(one)
    desk.step((one, 5))
    assert desk.planner.busy
    assert not desk.planner.frees_blocks


def test_a_request_that_was_preempted_loads_what_it_had_stored() -> None:
    """vllm#46014: coming back while its own store is under way is a state like any other."""
    desk = Desk()
    one = request("aaaabbbbc")
    desk.admit(one)
    store = desk.step((one, 9)).store
    desk.free(one)
    assert desk.admit(one) == 0, "not landed yet"
    assert desk.step((one, 9)).store is None, "under way: not stored twice"
    desk.land(store)
    desk.free(one)
    assert desk.admit(one) == 8


@pytest.mark.parametrize("failing", ["store", "one rank of it"])
def test_a_store_that_failed_is_not_offered(failing: str) -> None:
    """A page is right on all ranks or on none."""
    desk = Desk(num_ranks=2)
    one = request("aaaab")
    desk.admit(one)
    store = desk.step((one, 5)).store
    assert store is not None
    good = 1 if failing == "one rank of it" else 0
    desk.planner.heard(Outcomes({store.number: good} if good else {}, {store.number: 2 - good}))
    assert not desk.planner.busy
    assert desk.planner.matched(request("aaaab", "two"), 0) == 0


@pytest.mark.parametrize("heard", ["outcome", "blocks of another connector"])
def test_what_was_computed_over_a_failed_load_is_not_offered(heard: str) -> None:
    """The forward went on over missing bytes: its blocks must not be found under their hashes."""
    desk = Desk()
    stored(desk, "aaaa")
    two = request("aaaabbbbc", "two")
    desk.admit(two)
    plan = desk.step((two, 5))
    assert plan.load is not None
    assert plan.store is not None
    later = request("ddddd", "later")
    desk.admit(later)
    next_store = desk.step((later, 5)).store
    assert next_store is not None
    if heard == "outcome":
        desk.planner.heard(Outcomes({plan.store.number: 1}, {plan.load.number: 1}))
    else:
        desk.planner.heard(
            Outcomes({plan.load.number: 1, plan.store.number: 1}),
            bad_blocks={plan.load.device_pages[0]},
        )
    desk.land(next_store)
    for tokens in ("aaaabbbbc", "ddddd"):
        assert desk.planner.matched(request(tokens, "three"), 0) <= (
            BLOCK if heard != "outcome" and tokens[0] == "a" else 0
        )
    two.num_computed_tokens = 0
    again = desk.step((two, 9)).store
    assert again is not None, "computed again, they are stored again"
    desk.land(again)
    assert desk.planner.matched(request("aaaabbbbc", "three"), 0) == 8


def test_what_is_thrown_away_is_stored_anew_before_its_first_store_has_ended() -> None:
    """A slow store that a failed load has made worthless keeps nobody from storing the same blocks, elsewhere."""
    desk = Desk()
    stored(desk, "aaaa")
    two = request("aaaabbbbc", "two")
    desk.admit(two)
    plan = desk.step((two, 5))
    assert plan.load is not None
    assert plan.store is not None
    desk.planner.heard(Outcomes({}, {plan.load.number: 1}))
    two.num_computed_tokens = 0
    again = desk.step((two, 9)).store
    assert again is not None
    assert set(plan.store.device_pages) <= set(again.device_pages)
    assert not set(plan.store.host_pages) & set(again.host_pages), "that page is still written"
    desk.land(again)
    desk.land(plan.store)
    assert desk.planner.matched(request("aaaabbbbc", "three"), 0) == 8
    assert not desk.planner.busy


def test_an_outcome_may_come_rank_by_rank_over_several_steps() -> None:
    """Ranks run ahead of each other; a failure of one is kept until the last has spoken."""
    desk = Desk(num_ranks=3)
    one = request("aaaab")
    desk.admit(one)
    store = desk.step((one, 5)).store
    assert store is not None
    for outcomes in (
        Outcomes({store.number: 1}),
        Outcomes({}, {store.number: 1}),
        Outcomes({store.number: 1}),
    ):
        assert desk.planner.busy
        desk.planner.heard(outcomes)
    assert not desk.planner.busy
    assert desk.planner.matched(request("aaaab", "two"), 0) == 0


def test_a_full_host_stores_the_head_of_a_prompt() -> None:
    """vllm#54914: eviction never takes what is busy, and what has no room is counted."""
    desk = Desk(num_host_pages=2)
    one = request("aaaabbbbccccdddde")
    desk.admit(one)
    store = desk.step((one, 17)).store
    assert store is not None
    assert len(store.device_pages) == 2
    assert desk.planner.tally.no_room_blocks == 2
    desk.land(store)
    assert desk.planner.matched(request("aaaabbbbccccdddde", "two"), 0) == 8


@pytest.mark.parametrize(("store", "pages"), [("all", 3), ("prompt", 2), ("none", 0)])
def test_users_choose_what_is_stored(store: str, pages: int) -> None:
    """Answers are worth storing where the next turn repeats them."""
    desk = Desk(store=store)
    one = request("aaaabbbb")
    desk.admit(one)
    one.tokens += "cccc"
    desk.tables["a"].append(9)
    job = desk.step((one, 12)).store
    assert (len(job.device_pages) if job else 0) == pages


def test_clear_forgets_and_stores_anew() -> None:
    """After new weights nothing old is found, and running requests are stored again."""
    desk = Desk()
    one = request("aaaab")
    desk.admit(one)
    store = desk.step((one, 5)).store
    desk.planner.clear()
    desk.land(store)
    assert desk.planner.matched(request("aaaab", "two"), 0) == 0
    assert desk.step((one, 0)).store is not None


def test_an_abort_before_any_step_leaves_nothing() -> None:
    """vllm#49118: a request that was queued, or just admitted, can go at any time."""
    desk = Desk()
    stored(desk, "aaaa")
    desk.planner.finished("unheard of")
    two = request("aaaab", "two")
    desk.admit(two)
    desk.planner.finished("two")
    desk.free(two)
    load = desk.step().load
    assert desk.held(load), "promised to a forward that may still run"
    desk.land(load)
    assert desk.held(load) == []


def test_whoever_reads_a_block_that_was_not_loaded_computes_it_again() -> None:
    """One loads, another found its blocks cached in the same step; neither goes on, and nobody finds more of it."""
    desk = Desk()
    stored(desk, "aaaabbbb")
    one, two = request("aaaabbbbccccd", "one"), request("aaaabbbbdddde", "two")
    assert desk.admit(one) == 2 * BLOCK
    desk.planner.matched(two, 2 * BLOCK)
    fresh = desk.pool.take(2)
    assert fresh is not None
    desk.tables["two"] = desk.tables["one"][:2] + [block.block_id for block in fresh]
    two.num_computed_tokens = 2 * BLOCK
    desk.planner.admitted(two, desk.tables["two"], 0)
    plan = desk.step((one, 5), (two, 5))
    assert plan.load is not None
    used = {block for name in ("one", "two") for block in desk.tables[name]}
    desk.pool.cached = {b"%d" % block.block_id: block for block in desk.pool.blocks}
    desk.planner.heard(Outcomes({}, {plan.load.number: 1}), bad_blocks=plan.load.device_pages)
    assert (one.num_computed_tokens, two.num_computed_tokens) == (0, 0)
    assert {block.block_id for block in desk.pool.cached.values()}.isdisjoint(used)
    assert len(desk.pool.cached) == len(desk.pool.blocks) - len(used)


# Loads ahead of their requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "ahead"), [(None, False), (0, True), (BLOCK, True), (2 * BLOCK, False)], ids=str
)
def test_long_loads_run_ahead_of_their_request(limit: int | None, ahead: bool) -> None:
    """One of more tokens than the limit is offered as such, and is a job of its own."""
    desk = Desk()
    desk.planner.async_load_tokens = limit
    stored(desk, "aaaabbbb")
    two = request("aaaabbbbc", "two")
    assert desk.planner.matched(two, 0) == 2 * BLOCK
    assert desk.planner.loads_ahead("two") is ahead
    desk.admit(two)
    plan = desk.step()
    assert (plan.load is None, len(plan.ahead)) == (ahead, int(ahead))


def test_nothing_to_load_is_never_ahead() -> None:
    """vLLM would wait for it for ever."""
    desk = Desk()
    desk.planner.async_load_tokens = 0
    assert desk.planner.matched(request("aaaab"), 0) == 0
    assert not desk.planner.loads_ahead("a")


def test_a_load_ahead_has_a_number_a_request_and_holds_of_its_own() -> None:
    """Beside a load under the forward, whose readers are known by its number; both end apart."""
    desk = Desk()
    stored(desk, "aaaabbbbcccc")
    desk.planner.async_load_tokens = 2 * BLOCK
    long, short = request("aaaabbbbccccd", "long"), request("aaaabbbbd", "short")
    desk.admit(long)
    desk.admit(short)
    plan = desk.step((short, 1))
    assert plan.load is not None
    (ahead,) = plan.ahead
    assert (ahead.requests, plan.load.requests) == (("long",), ("short",))
    assert ahead.number != plan.load.number
    desk.planner.heard(Outcomes({}, {plan.load.number: 1}), bad_blocks=plan.load.device_pages)
    assert (short.num_computed_tokens, long.num_computed_tokens) == (0, 3 * BLOCK)
    desk.planner.finished("long")
    desk.free(long)
    assert desk.held(ahead), "it is still written"
    desk.land(ahead)
    assert desk.held(ahead) == []
    assert not desk.planner.busy


def test_a_request_whose_load_is_over_is_admitted_again() -> None:
    """vLLM tells of it a second time, with nothing to load: its blocks are stored from there on."""
    desk = Desk()
    desk.planner.async_load_tokens = 0
    stored(desk, "aaaa")
    two = request("aaaabbbbc", "two")
    desk.admit(two)
    desk.land(*desk.step().ahead)
    desk.planner.admitted(two, desk.tables["two"], 0)
    store = desk.step((two, 5)).store
    assert store is not None
    assert store.device_pages == (desk.tables["two"][1],)


def test_a_load_ahead_without_blocks_is_a_job_too() -> None:
    """Where a window has left all of them, its request still waits to hear that it is over."""
    desk = Desk()
    desk.planner.async_load_tokens = 0
    stored(desk, "aaaa")
    two = request("aaaab", "two")
    desk.planner.matched(two, 0)
    desk.planner.admitted(two, [0, 5], BLOCK)
    (ahead,) = desk.step().ahead
    assert (ahead.requests, ahead.device_pages) == (("two",), ())


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "async_load_tokens", [None, BLOCK, 0], ids=["under", "long ahead", "ahead"]
)
@pytest.mark.parametrize(
    ("failing", "lookahead", "ranks"),
    [(0.0, 1, 1), (0.0, 2, 2), (0.15, 1, 1), (0.15, 2, 1), (0.1, 2, 2)],
    ids=str,
)
def test_random_engines_never_find_wrong_bytes(
    seed: int, failing: float, lookahead: int, ranks: int, async_load_tokens: int | None
) -> None:
    """Preemption, aborts, reuse, failures and late ranks in any order: every offered block is what it says."""
    dice = random.Random(seed)
    engine = Engine(
        dice,
        failing=failing,
        lookahead=lookahead,
        num_ranks=ranks,
        async_load_tokens=async_load_tokens,
    )
    for _ in range(120):
        if dice.random() < 0.5:
            stem = dice.choice(["aaaabbbbcccc", "aaaadddd", "eeeeffffgggghhhh"])
            engine.ask(stem[: dice.randrange(1, len(stem) + 1)] + dice.choice(["", "z", "zzzzz"]))
        engine.step()
    engine.finish()
    assert bool(engine.loaded) is (async_load_tokens != 0)
    assert bool(engine.loaded_ahead) is (async_load_tokens is not None)
