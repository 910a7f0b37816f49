"""A KV connector for vLLM: prefixes come back from host memory layer by layer, under the running forward.

`kv_connector="OffloadConnector"` with `kv_connector_module_path="offload.integrations.vllm"` loads
`connector.py`; `spec_name="OffloadSpec"` with `spec_module_path="offload.integrations.vllm"` loads `spec.py`,
which puts our copies under vLLM's own scheduling of whole loads.

vLLM runs a connector twice: a scheduler side that decides (`scheduler_side.py`, over `plan.py` and
`index.py`) and one worker side per rank that copies (`worker.py`, over `adopt.py`). They may be processes
apart. What crosses is in `messages.py`: a `StepPlan` per step one way, the outcomes of its jobs the other.

Only `connector.py`, `spec.py`, `checks.py`, `needs.py`, `needs_spec.py`, `stats.py` and `wire.py` import vLLM. Another
vLLM than `versions.py` names is refused when an engine starts: by an import that fails, or by `probe.py`, which looks
at all that the two lists of needs name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.integrations.vllm.connector import OffloadConnector
    from offload.integrations.vllm.spec import OffloadSpec

_HOMES = {
    "OffloadConnector": "offload.integrations.vllm.connector",
    "OffloadSpec": "offload.integrations.vllm.spec",
}

__all__ = ["OffloadConnector", "OffloadSpec"]


def __getattr__(name: str) -> object:
    """Import a class when it is asked for: the pure parts work without vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
