"""What the tests of core/ have in common."""

from __future__ import annotations

import pytest

from offload.core.geometry import pair_runs


@pytest.fixture(scope="session", autouse=True)
def forgetful() -> None:
    """Begin without cached answers: `make mutants` forks after a run, and they would hide what a change does."""
    pair_runs.cache_clear()
