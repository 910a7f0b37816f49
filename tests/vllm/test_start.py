"""What cannot be served is refused when the engine starts, by one error that says what to set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import offload
from tests.vllm import models
from tests.vllm.connect import ours
from tests.vllm.rig import engine

pytestmark = pytest.mark.vllm


@attrs.frozen
class Refusal:
    """A configuration, and what is said of it."""

    connector: Mapping[str, Any]
    error: type[Exception]
    says: str
    """A regular expression: what is wrong, and what to set."""


REFUSALS: Mapping[str, Refusal] = {
    "no host size": Refusal(
        ours(host_blocks=None), offload.RequestError, "needs the size.*'host_gib'.*'host_blocks'"
    ),
    "two host sizes": Refusal(ours(host_gib=1), offload.RequestError, "one of them. Got"),
    "no blocks": Refusal(ours(host_blocks=0), offload.RequestError, "a whole number from 1 up"),
    "less than a block": Refusal(
        ours(host_blocks=None, host_gib=1e-7), offload.RequestError, "holds no block.*Set host_gib"
    ),
    "more than the machine has": Refusal(
        ours(host_blocks=None, host_gib=1e6), offload.RequestError, "Set a smaller host_gib"
    ),
    "a misspelt key": Refusal(
        ours(host_block=3), offload.UnknownNameError, "did you mean 'host_blocks'"
    ),
    "an unknown layout": Refusal(ours(kv_cache_layout="XYZ"), ValueError, "'XYZ'.*LBHNC"),
    "an unknown io backend": Refusal(
        ours(io_backend="kernal"), offload.UnknownNameError, "did you mean 'kernel'"
    ),
    "an io backend of another device": Refusal(
        ours(io_backend="kernel"), offload.UnsupportedPairError, "needs a GPU.*'direct' or 'cpu'"
    ),
    "a driver of another device": Refusal(
        ours(driver="cuda"), offload.RequestError, "Use driver='threads'"
    ),
    "another role": Refusal(
        ours() | {"kv_role": "kv_producer"}, offload.RequestError, "Set kv_role='kv_both'"
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_configuration_is_refused_at_start(folder: Path, name: str) -> None:
    """The engine does not start, and nobody has to read past the first line."""
    refusal = REFUSALS[name]
    model = models.save("llama", folder / "start")
    with pytest.raises(refusal.error, match=refusal.says), engine(model, refusal.connector):
        pass


def test_an_engine_starts_after_a_refused_one(folder: Path) -> None:
    """What was refused leaves nothing behind: the same process starts one that works."""
    with engine(models.save("llama", folder / "start"), ours()) as made:
        assert made.ask([models.prompt(40, 1)])[0].tokens


def test_a_model_whose_attention_reads_no_prefix_is_refused(folder: Path) -> None:
    """vLLM computes latent attention whole on a CPU: what was loaded would be ignored, and answers wrong."""
    model = models.save("deepseek_v2", folder / "latent")
    with (
        pytest.raises(offload.RequestError, match="leave out the connector"),
        engine(model, ours()),
    ):
        pass


def test_a_model_of_windows_is_not_computed_again(folder: Path) -> None:
    """vLLM gives up blocks behind the window, and would go on over their absence when a load has broken."""
    model = models.save("mistral", folder / "windows")
    with (
        pytest.raises(offload.RequestError, match=r"all layers.*Set kv_load_failure_policy='fail'"),
        engine(model, ours(policy="recompute")),
    ):
        pass


@pytest.mark.parametrize(
    ("extra", "pieces"),
    [({}, True), ({"async_load_tokens": 4096}, True), ({"async_load_tokens": 0}, False)],
    ids=["under", "long ahead", "ahead"],
)
def test_full_cuda_graphs_are_kept_where_no_forward_waits(
    extra: Mapping[str, Any], pieces: bool
) -> None:
    """A graph replays no wait, so a load under the forward needs its layers apart; a store does not."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(**ours(**extra))
    made = KVConnectorFactory.get_connector_class(config)
    assert made.requires_piecewise_for_cudagraph(config.kv_connector_extra_config) is pieces


def test_recurrent_models_are_refused() -> None:
    """Recurrent states are no blocks of tokens. vLLM's CPU build runs no such model, so its spec is asked about."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from offload.integrations.vllm.checks import check

    states = MambaSpec(block_size=32, shapes=((4, 16),), dtypes=(torch.float32,))
    caches = KVCacheConfig(8, [], [KVCacheGroupSpec(["layers.0.mixer"], states)])
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"host_blocks": 8},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=None,
        parallel_config=SimpleNamespace(),
        speculative_config=None,
    )
    with pytest.raises(offload.RequestError, match=r"of class MambaSpec\. Leave out the connector"):
        check(config, caches)


@pytest.mark.parametrize(
    ("policy", "batches", "limit", "refused"),
    [
        ("recompute", 2, None, True),
        ("recompute", 2, 64, True),
        ("recompute", 2, 0, False),
        ("recompute", 1, None, False),
        ("fail", 2, None, False),
    ],
)
def test_computing_again_and_planning_ahead_exclude_each_other(
    policy: str, batches: int, limit: int | None, refused: bool
) -> None:
    """vLLM keeps what a step has computed that it planned before it heard of a broken load, and no CPU build does; a
    request whose load runs ahead of it is in no such step.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from offload.integrations.vllm.checks import check

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"host_blocks": 8, "async_load_tokens": limit},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=None,
        parallel_config=SimpleNamespace(),
        speculative_config=None,
        max_concurrent_batches=batches,
    )
    # Else the next thing that is wrong.
    says = r"Set async_load_tokens=0.*--no-async-scheduling" if refused else "this model has 0"
    with pytest.raises(offload.RequestError, match=says):
        check(config, KVCacheConfig(8, [], []))
