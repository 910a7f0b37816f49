"""Numbers for vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from offload.integrations.vllm.moving import Moved
from offload.integrations.vllm.plan import Tally
from offload.integrations.vllm.versions import needed

with needed():
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Mapping[str, str] = {
    "loads": "Loads that have landed, over all ranks.",
    "load_blocks": "Blocks that loads brought to the device, over all ranks.",
    "load_bytes": "Bytes that loads brought to the device, over all ranks.",
    "stores": "Stores that have landed, over all ranks.",
    "store_blocks": "Blocks that stores brought to the host, over all ranks.",
    "store_bytes": "Bytes that stores brought to the host, over all ranks.",
    "failed_loads": "Loads that failed or ran into their deadline; their blocks were computed again.",
    "failed_stores": "Stores that failed or ran into their deadline.",
    "waits": "Layers of a forward that had to wait for a load.",
    "wait_seconds": "Seconds that forwards waited for layers of loads.",
    "loaded_blocks": "Blocks of prefixes that the host had and the device had not.",
    "stored_blocks": "Blocks whose store was begun.",
    "no_room_blocks": "Blocks that were not stored because every host page was busy.",
    "tainted_blocks": "Stored blocks that were thrown away because a load had failed meanwhile.",
    "evictions": "Host pages that were taken from one block for another.",
}
"""What is counted, by name; on Prometheus `vllm:offload_<name>_total`."""

GAUGES: Mapping[str, str] = {
    "host_blocks": "Host pages on each rank.",
    "host_blocks_used": "Host pages that hold a block, or will.",
}
"""What has a level; on Prometheus `vllm:offload_<name>`."""


class OffloadStats(KVConnectorStats):
    """One interval's numbers, by the names of `COUNTERS` and `GAUGES`. Nothing happened: empty."""

    @classmethod
    def of_worker(cls, moved: Moved) -> OffloadStats | None:
        """Return what a rank has moved, or None."""
        return cls._made(attrs.asdict(moved))

    @classmethod
    def of_scheduler(
        cls, tally: Tally, *, evictions: int, num_used: int, num_blocks: int
    ) -> OffloadStats | None:
        """Return what was decided, or None."""
        made = cls._made(attrs.asdict(tally) | {"evictions": evictions})
        if made is not None:
            made.data |= {"host_blocks": num_blocks, "host_blocks_used": num_used}
        return made

    @classmethod
    def _made(cls, numbers: Mapping[str, float]) -> OffloadStats | None:
        data = {name: number for name, number in numbers.items() if number}
        return cls(data=data) if data else None

    def reset(self) -> None:
        """Forget the interval."""
        self.data: dict[str, int | float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return this, with another rank's or interval's numbers in it."""
        for name, number in other.data.items():
            self.data[name] = number if name in GAUGES else self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers as the log line shows them."""
        return {name: round(number, 4) for name, number in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not self.data


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The same numbers as Prometheus metrics, one set per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        families: dict[str, Any] = {
            name: self._counter_cls(
                name=f"vllm:offload_{name}_total", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        for name, text in GAUGES.items():
            families[name] = self._gauge_cls(
                name=f"vllm:offload_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
        self._children = {
            (engine, name): family.labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for name, family in families.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's numbers."""
        for name, number in transfer_stats_data.items():
            child = self._children[engine_idx, name]
            if name in GAUGES:
                child.set(number)
            else:
                child.inc(number)
