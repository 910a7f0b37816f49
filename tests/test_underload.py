"""Eight forwards at once with streaming backups cost hardly more than the busiest of link and compute."""

from __future__ import annotations

import anyio
import pytest

from bench.underload import simulate

BUSY = {
    "compute": (2e-4, 1e-4, 1e-4),
    "loads": (1e-4, 2e-4, 1e-4),
    "backups": (1e-4, 1e-4, 2e-4),
    "all three": (1e-4, 1e-4, 1e-4),
}
"""Seconds of one layer of one forward: to compute, to load, to back up."""


CASES = [*((busy, False) for busy in BUSY), ("all three", True)]


@pytest.mark.parametrize(("busy", "same"), CASES)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_little_is_lost_to_waiting(busy: str, backend: str, same: bool) -> None:
    """On the virtual clock the total is at most 1.1 times what the busiest resource takes alone."""
    ratio = anyio.run(simulate, *BUSY[busy], same, backend=backend)
    assert 1.0 <= ratio <= 1.1
