"""Scheduler side and worker side apart: in processes that share nothing but messages, and with several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offload.trace.read import timeline
from tests.vllm import models
from tests.vllm.connect import ours
from tests.vllm.rig import engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

PROMPTS = [[*models.prompt(130, 1), *models.prompt(tail, 2 + tail)] for tail in (40, 90)]
RELOADED = [160, 192]

WAYS: Mapping[str, dict[str, Any]] = {
    "engine core apart": {},
    # Pipeline stages are not among these: vLLM's CPU runner fails on them by itself.
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two tensor-parallel ranks, loads ahead": {"tensor_parallel_size": 2},
    "guessed tokens": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
        }
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_apart(folder: Path, tmp_path: Path, way: str) -> None:
    """What is busy, what has landed and how much room there is travels in messages alone."""
    model = models.save("llama", folder / "processes")
    with engine(model) as bare:
        cold, warm = bare.ask(PROMPTS), bare.ask(PROMPTS)
    file = tmp_path / "{rank}.trace.json"
    connector = ours(
        trace=str(file), stream_mib=0.0, async_load_tokens=0 if "ahead" in way else None
    )
    with engine(model, connector, processes=True, **WAYS[way]) as made:
        first = made.ask(PROMPTS)
        made.forget()
        again = made.ask(PROMPTS)
    cached = [answer.cached for answer in again]
    assert cached == RELOADED
    if WAYS[way]:
        TALLY.near(first, cold)
        TALLY.near(again, warm)
    else:
        TALLY.same(first, cold)
        TALLY.same(again, warm)
    ranks = 2 if "two" in way else 1
    for rank in range(ranks):
        trace = timeline(tmp_path / f"{rank}.trace.json")
        directions = [request.direction for request in trace.requests]
        assert sorted(set(directions)) == ["backup", "load"]
