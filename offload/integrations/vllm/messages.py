"""What crosses between the scheduler side and the worker sides. Plain values that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

MAX_NAMES = 8
"""Request ids that a job carries for the trace: enough to find one, and no longer than a line."""


@attrs.frozen
class Job:
    """One transfer of a step, over all requests that need one in its direction."""

    number: int
    """Counts up over loads and stores alike; what an outcome is known by."""

    device_pages: tuple[int, ...]
    """vLLM's block ids."""

    host_pages: tuple[int, ...]
    """Pages of every rank's host pool; row `i` belongs to row `i` of `device_pages`."""

    requests: tuple[str, ...] = ()
    """vLLM's ids of the requests that it serves, at most `MAX_NAMES`."""

    num_requests: int = 0
    """How many there are."""

    @property
    def tag(self) -> str:
        """The ids as one line, as traces show them."""
        more = self.num_requests - len(self.requests)
        return ",".join(self.requests) + (f",+{more}" if more > 0 else "")


@attrs.frozen
class StepPlan:
    """What one step moves. Nothing: both are None."""

    load: Job | None = None
    """Lands layer by layer under this step's forward."""

    store: Job | None = None
    """Leaves layer by layer behind this step's forward."""

    ahead: tuple[Job, ...] = ()
    """Loads that are over before their requests are scheduled: of one request each. No forward waits for them."""


@attrs.frozen
class Outcomes:
    """Jobs that have ended on some ranks: nothing of them touches memory any more."""

    landed: Mapping[int, int] = attrs.field(factory=dict)
    """By job, on how many ranks it has landed."""

    failed: Mapping[int, int] = attrs.field(factory=dict)
    """By job, on how many ranks it has failed, and drained."""

    def __add__(self, other: Outcomes) -> Outcomes:
        """Return the outcomes of both."""
        return Outcomes(_sum(self.landed, other.landed), _sum(self.failed, other.failed))

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.landed or self.failed)


def _sum(left: Mapping[int, int], right: Mapping[int, int]) -> dict[int, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}
