"""Our messages in the envelopes that vLLM carries between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.integrations.vllm.messages import Outcomes, StepPlan
from offload.integrations.vllm.versions import needed

with needed():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )


@dataclass
class OffloadMetadata(KVConnectorMetadata):
    """Scheduler side to every rank, once a step."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Every rank to the scheduler side, where something has ended."""

    outcomes: Outcomes

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadWorkerMetadata:
        """Return the outcomes of both ranks."""
        assert isinstance(other, OffloadWorkerMetadata)
        return OffloadWorkerMetadata(self.outcomes + other.outcomes)


@dataclass
class OffloadHandshake(KVConnectorHandshakeMetadata):
    """Every rank to the scheduler side, once, before serving."""

    num_host_blocks: int
