"""What the tests of sessions do to one: evict it, go on with it, and compare with a run that never moved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from offload.integrations.transformers import Session
from offload.integrations.transformers.residency import Residency
from offload.integrations.transformers.slots import Slots
from tests.integrations.tiny import (
    ATTENTION,
    CONFIGS,
    DTYPES,
    PAGE_SIZE,
    STATES,
    Rig,
    forward,
    ids,
    model,
)

PREFIX = 26  # Six and a half pages, and past Gemma's window.
CHUNKS = (1, 5, 1)
"""After the load. A single token first: Jamba's scan of a longer chunk starts from nothing."""

ALL = pytest.mark.parametrize("name", CONFIGS)
CROPPABLE = pytest.mark.parametrize("name", ATTENTION)
STATEFUL = pytest.mark.parametrize("name", STATES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))

Body = Callable[[], Awaitable[None]]
Logits = list[torch.Tensor]


async def evicted(r: Rig, *, seed: int = 1) -> Session:
    """Return a session with a prefix on the host, whose device memory others have written over."""
    session = r.sessions.open(max_tokens=80)
    await r.use(session, ids(PREFIX, seed=seed))
    await session.evict()
    other = r.sessions.open(max_tokens=r.device.num_pages * PAGE_SIZE)
    await r.use(other, ids(30, seed=9))
    r.poison_devices()
    other.close()
    return session


async def run_chunks(r: Rig, session: Session) -> Logits:
    """Run the chunks behind a session, and return all logits."""
    return [await r.use(session, ids(n, seed=20 + i)) for i, n in enumerate(CHUNKS)]


async def continued(r: Rig, session: Session) -> Logits:
    """Load the session, run the chunks behind it, and return all logits."""
    transfer = await session.load()
    logits = await run_chunks(r, session)
    await transfer
    return logits


@cache
def expected(name: str, dtype: torch.dtype) -> Logits:
    """Return the logits of the same chunks with transformers' own cache."""
    made = model(name, dtype)
    stock = DynamicCache(config=made.config)
    forward(made, stock, ids(PREFIX, seed=1))
    return [forward(made, stock, ids(n, seed=20 + i)) for i, n in enumerate(CHUNKS)]


def same_bits(one: Logits, other: Logits) -> bool:
    """Compare logits as bytes."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def tear(patch: pytest.MonkeyPatch, layer: int, *, nth: int = 1) -> None:
    """Make a forward raise when it asks for a layer's slots for the `nth` time."""
    reach = Residency.reach
    left = [nth]

    def torn(residency: Residency, reached: int) -> Slots:
        if reached == layer:
            left[0] -= 1
            if not left[0]:
                raise ArithmeticError
        return reach(residency, reached)

    patch.setattr(Residency, "reach", torn)


def free_pages(r: Rig) -> list[int]:
    """Return how many pages each pool can hand out."""
    return [
        pool.pages.num_free for member in r.pools.members for pool in (member.device, member.host)
    ]


async def lose(r: Rig, session: Session) -> None:
    """Run a forward in a block that raises behind it."""
    with session.use() as cache:
        await r.logits(cache, ids(1, seed=8))
        raise ArithmeticError
