"""Our connector's configuration, as users write it, and drivers that tests can hold, slow and break."""

from __future__ import annotations

from itertools import count
from typing import Any

import offload
from offload.testing import Hooks, ThreadsDriver

_names = count()


def ours(
    *, host_blocks: int | None = 256, policy: str | None = None, **extra: Any
) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`.

    Args:
        policy: What vLLM does about blocks that were not loaded: `recompute`, or `fail`, its default.
        extra: More keys of `kv_connector_extra_config`. Stores stream unless `stream_mib` says otherwise: those
            of tiny models are all small.
    """
    if host_blocks is not None:
        extra["host_blocks"] = host_blocks
    extra.setdefault("stream_mib", 0)
    config: dict[str, Any] = {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return config if policy is None else config | {"kv_load_failure_policy": policy}


def spec(**extra: Any) -> dict[str, Any]:
    """Return the configuration of the other door: vLLM's scheduling of whole loads over our copies."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadSpec",
            "spec_module_path": "offload.integrations.vllm",
        }
        | extra,
    }


def driver(*, hooks: Hooks | None = None, link_bytes_per_second: float | None = None) -> str:
    """Register a driver of worker threads under a new name; return the name, for `driver=`."""
    name = f"test-threads-{next(_names)}"
    offload.register_driver(name, lambda **_: ThreadsDriver(link_bytes_per_second, hooks=hooks))
    return name
