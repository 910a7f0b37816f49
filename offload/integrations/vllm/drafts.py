"""A step's jobs on the scheduler side: in the making, and under way."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from offload.integrations.vllm.messages import MAX_NAMES, Job


@attrs.define(eq=False)
class Open:
    """A job that some rank has not ended yet."""

    job: Job
    keys: tuple[bytes, ...]
    store: bool
    missing: int
    """Ranks that have said nothing yet."""
    good: bool = True


@attrs.define(eq=False)
class Draft:
    """A job in the making."""

    device_pages: list[int] = attrs.field(factory=list)
    host_pages: list[int] = attrs.field(factory=list)
    keys: list[bytes] = attrs.field(factory=list)
    requests: list[str] = attrs.field(factory=list)

    def add(
        self, request: str, device: Sequence[int], host: Sequence[int], keys: Sequence[bytes]
    ) -> None:
        """Add what one request moves."""
        self.device_pages += device
        self.host_pages += host
        self.keys += keys
        self.requests.append(request)

    def job(self, number: int) -> Job:
        """Return the job under this number."""
        return Job(
            number,
            tuple(self.device_pages),
            tuple(self.host_pages),
            tuple(self.requests[:MAX_NAMES]),
            len(self.requests),
        )
