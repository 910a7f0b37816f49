"""Other models and settings: a second pass is reloaded, and answers as without a connector, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.vllm import models
from tests.vllm.connect import ours, spec
from tests.vllm.rig import engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

PROMPTS = [models.prompt(200, 1), models.prompt(100, 2)]


@attrs.frozen
class Kind:
    """What differs from the small Llama."""

    model: str = "llama"
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    cached: tuple[int, int] = (192, 96)
    """Prompt tokens that come from host memory."""

    connector: Callable[[Path], dict[str, Any]] = lambda folder: ours()


def beside_another(folder: Path) -> dict[str, Any]:
    """Return ours first, then vLLM's example connector, under its MultiConnector."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours(), example]},
    }


KINDS: Mapping[str, Kind] = {
    "sliding window": Kind("mistral"),
    # Without a connector that carries groups, vLLM treats every layer of such a model as full attention.
    "sliding and full layers": Kind("gemma3"),
    "fp8 KV in blocks of 64": Kind(
        settings={"kv_cache_dtype": "fp8", "block_size": 64}, cached=(192, 64)
    ),
    "chunks of 64 tokens, no prefix cache of vLLM's own": Kind(
        settings={"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    ),
    "scheduling by priority, beside another connector": Kind(
        settings={"scheduling_policy": "priority"}, connector=beside_another
    ),
    "the second door": Kind(connector=lambda folder: spec(cpu_bytes_to_use=64 << 20)),
}


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_is_reloaded(folder: Path, tmp_path: Path, name: str) -> None:
    """vllm#48412, vllm#46888, vllm#44577: windows, 8-bit KV and other blocks come back whole."""
    kind = KINDS[name]
    model = models.save(kind.model, folder / f"kinds-{kind.model}")
    with engine(model, **kind.settings) as bare:
        cold, warm = bare.ask(PROMPTS), bare.ask(PROMPTS)
    with engine(model, kind.connector(tmp_path), **kind.settings) as made:
        TALLY.same(made.ask(PROMPTS), cold)
        made.forget()
        resting = made.free_blocks
        again = made.ask(PROMPTS)
        assert tuple(answer.cached for answer in again) == kind.cached
        # Computed in the same pieces as from vLLM's own cache, where it has one.
        TALLY.same(again, warm)
        made.forget()
        assert made.free_blocks == resting
