"""What vLLM's log line and its Prometheus endpoint show of us."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import models
from tests.vllm.connect import ours
from tests.vllm.rig import engine

pytestmark = pytest.mark.vllm

BLOCK_BYTES = models.LAYERS * 2 * models.HEADS * models.HEAD_DIM * 32 * 4
"""Keys and values of a block of 32 tokens, in fp32."""


def metrics() -> dict[str, float]:
    """Return our metrics by name, without labels."""
    from prometheus_client import REGISTRY

    return {
        sample.name.removeprefix("vllm:offload_"): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:offload_") and not sample.name.endswith("_created")
    }


def test_metrics_count_blocks_and_bytes(folder: Path) -> None:
    """Everything is there from the start, at zero; a store and a load of six blocks show with their bytes."""
    model = models.save("llama", folder / "stats")
    prompt = models.prompt(200, 1)
    with engine(model, ours(host_blocks=8), disable_log_stats=False) as made:
        before = metrics()
        assert set(before.values()) == {0}
        made.ask([prompt])
        made.forget()
        made.ask([prompt])
        made.ask([[1]], count=2)
        after = metrics()
    assert {name for name in after if name.startswith("wait")} == {
        "waits_total",
        "wait_seconds_total",
    }
    assert {name: after[name] for name in after if after[name] and "wait" not in name} == {
        "stores_total": 1,
        "store_blocks_total": 6,
        "store_bytes_total": 6 * BLOCK_BYTES,
        "stored_blocks_total": 6,
        "loads_total": 1,
        "load_blocks_total": 6,
        "load_bytes_total": 6 * BLOCK_BYTES,
        "loaded_blocks_total": 6,
        "host_blocks": 8,
        "host_blocks_used": 6,
    }


def test_intervals_and_ranks_add_up_and_levels_do_not() -> None:
    """A gauge is what was said last; the log line shows what happened."""
    from offload.integrations.vllm.moving import Moved
    from offload.integrations.vllm.plan import Tally
    from offload.integrations.vllm.stats import OffloadStats

    assert OffloadStats.of_worker(Moved()) is None
    assert OffloadStats.of_scheduler(Tally(), evictions=0, num_used=3, num_blocks=4) is None
    total = OffloadStats.of_worker(Moved(loads=1, wait_seconds=0.25))
    rank = OffloadStats.of_worker(Moved(loads=2, wait_seconds=0.5))
    said = OffloadStats.of_scheduler(Tally(stored_blocks=2), evictions=1, num_used=3, num_blocks=4)
    assert total is not None
    assert rank is not None
    assert said is not None
    total.aggregate(rank).aggregate(said).aggregate(said)
    assert total.reduce() == {
        "loads": 3,
        "wait_seconds": 0.75,
        "stored_blocks": 4,
        "evictions": 2,
        "host_blocks": 4,
        "host_blocks_used": 3,
    }
    total.reset()
    assert total.is_empty()
