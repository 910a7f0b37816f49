"""How much sooner does a turn's first token come when its prefix is loaded instead of recomputed?

SmolLM2-135M in fp32, one compute thread, a cached prefix and a turn of 24 tokens. Time to first token
(TTFT) runs from the question to the token on the host; loading, its submit and the hop to the worker
thread are inside. One round runs every way once, so that noise hits all alike; a figure is the
median over rounds of the ratio within a round, except that the recomputed TTFT is the best of its few.

* `ttft_ratio_N`: recomputed / loaded, prefix of N tokens.
* `ttft_vs_resident_1000`: loaded / a session whose KV never left the device.
* `ttft_vs_resident_throttled`: the same with the link so slow that the load takes 0.8 of the resident
  TTFT; `ttft_serial_throttled` beside it: load first, then run.
* `ttft_vs_offloading_manager`: loaded / transformers' continuous-batching swap. Theirs is its restore of
  the same tokens followed by *our* resident forward, which flatters it: its own paged forward is slower.
  It needs pinned memory, which a CPU has not; the bench lets it allocate plain memory instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import anyio.to_thread
import attrs
import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedModel

import offload
from bench.common import finish, options
from bench.swap import Swap
from offload.demo import prompt, weights
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers import Session, SessionPools, Sessions, session_pools

TURN = 24
PAGE_SIZE = 16
LOAD_SHARE = 0.8
"""Of the resident TTFT, what a throttled load takes."""

Seconds = dict[str, list[float]]
"""By way of serving, its TTFT in each round."""


def first_token(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> int:
    """Run the chunk and return the greedy token. Blocks."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


@attrs.define(eq=False)
class Bench:
    """One model and one prefix length."""

    model: PreTrainedModel
    ids: torch.Tensor
    """Prefix and turn, [1, N + TURN]."""

    rounds: int

    @property
    def prefix(self) -> int:
        """N."""
        return self.ids.shape[1] - TURN

    async def timed(self, cache: Cache, ids: torch.Tensor, started: float) -> float:
        """Return the seconds from `started` to the first token, computed in a worker thread."""
        await anyio.to_thread.run_sync(partial(first_token, self.model, cache, ids))
        return time.perf_counter() - started

    async def recomputed(self) -> float:
        """Return the TTFT of a run over the whole prefix."""
        started = time.perf_counter()
        return await self.timed(DynamicCache(config=self.model.config), self.ids, started)

    async def resident(self, session: Session) -> float:
        """Return the TTFT of a turn whose prefix is on the device; the turn is forgotten again."""
        with session.use() as cache:
            seconds = await self.timed(cache, self.ids[:, self.prefix :], time.perf_counter())
            cache.crop(-TURN)
        return seconds

    async def loaded(self, session: Session, *, first: bool) -> float:
        """Return the TTFT of a turn whose prefix is on the host, and evict the session again.

        Args:
            first: Wait for the whole load before the forward starts.
        """
        started = time.perf_counter()
        transfer = await session.load()
        if first:
            await transfer
        with session.use() as cache:
            seconds = await self.timed(cache, self.ids[:, self.prefix :], started)
            cache.crop(-TURN)
        await transfer
        await session.evict()
        return seconds

    def pools(self) -> SessionPools:
        """Return pools for two sessions, one of which is on the host at times."""
        pages = -(-self.ids.shape[1] // PAGE_SIZE)
        return session_pools(
            self.model,
            page_size=PAGE_SIZE,
            num_pages=2 * pages,
            num_host_pages=pages + 1,
            layout="page_first_direct",
        )

    @asynccontextmanager
    async def sessions(self, link: float | None) -> AsyncIterator[tuple[Session, Session]]:
        """Yield a resident session and an evicted one, with the same prefix cached."""
        driver = ThreadsDriver(link)
        async with offload.open_scheduler(self.pools(), driver=driver) as scheduler:
            sessions = Sessions(scheduler)
            both = [sessions.open(max_tokens=self.ids.shape[1]) for _ in range(2)]
            for session in both:
                with session.use() as cache:
                    await self.timed(cache, self.ids[:, : self.prefix], 0.0)
            await both[1].evict()
            yield both[0], both[1]

    async def free_link(self) -> Seconds:
        """Return TTFTs with copies as quick as memory is."""
        swap = Swap(self.model, self.prefix)
        seconds: Seconds = {"resident": [], "loaded": [], "swap": []}
        async with self.sessions(None) as (here, there):
            for _ in range(self.rounds):
                seconds["resident"].append(await self.resident(here))
                seconds["loaded"].append(await self.loaded(there, first=False))
                swap.out()
                started = time.perf_counter()
                swap.back()
                took = time.perf_counter() - started
                seconds["swap"].append(took + await self.resident(here))
        return seconds

    async def throttled(self, resident: float) -> Seconds:
        """Return TTFTs with a link on which the load takes `LOAD_SHARE` of `resident` seconds."""
        nbytes = -(-self.prefix // PAGE_SIZE) * self.pools().page_bytes
        seconds: Seconds = {"resident": [], "loaded": [], "serial": []}
        async with self.sessions(nbytes / (LOAD_SHARE * resident)) as (here, there):
            for _ in range(self.rounds):
                seconds["resident"].append(await self.resident(here))
                seconds["loaded"].append(await self.loaded(there, first=False))
                seconds["serial"].append(await self.loaded(there, first=True))
        return seconds


def ratio(seconds: Seconds, one: str, other: str) -> float:
    """Return the median over rounds of one way's TTFT over another's."""
    return median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def prefix_ids(tokenizer: transformers.PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """Return so many tokens of the demo's texts, and a turn."""
    text = " ".join(each.text for each in prompt.built_in())
    ids = tokenizer.encode(text)
    while len(ids) < tokens + TURN:
        ids = ids + ids
    return torch.tensor([ids[: tokens + TURN]])


def main() -> None:
    """Measure, print, write."""
    given = options(__doc__)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = weights.load(weights.converted(weights.gguf_file()))
    figures: dict[str, float] = {}
    rounds = 5 if given.quick else 15
    for prefix in (1000,) if given.quick else (1000, 4000):
        bench = Bench(model, prefix_ids(tokenizer, prefix), rounds)
        figures |= anyio.run(measured, bench)
    finish("serving", figures, given)


async def measured(bench: Bench) -> dict[str, float]:
    """Return the figures of one prefix length."""
    prefix = bench.prefix
    seconds = await bench.free_link()
    recomputed = min([await bench.recomputed() for _ in range(2 if prefix <= 1000 else 1)])
    loaded = median(seconds["loaded"])
    print(
        f"prefix {prefix}: recomputed {recomputed:.3f} s, loaded {loaded:.3f} s, "
        f"resident {median(seconds['resident']):.3f} s",
        flush=True,
    )
    figures = {f"ttft_ratio_{prefix}": recomputed / loaded}
    if prefix != 1000:
        return figures
    figures["ttft_vs_resident_1000"] = ratio(seconds, "loaded", "resident")
    figures["ttft_vs_offloading_manager"] = ratio(seconds, "loaded", "swap")
    slow = await bench.throttled(median(seconds["resident"]))
    figures["ttft_vs_resident_throttled"] = ratio(slow, "loaded", "resident")
    figures["ttft_serial_throttled"] = ratio(slow, "serial", "resident")
    return figures


if __name__ == "__main__":
    main()
