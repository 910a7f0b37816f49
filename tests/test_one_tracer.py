"""One tracer records one scheduler at a time: numbers of two would be taken for each other's."""

from __future__ import annotations

import asyncio

import anyio
import pytest

import offload
from offload.errors import RequestError
from offload.testing import SimDriver
from tests.sched import pools

REFUSED = (
    r"this Tracer records a scheduler that is open\. Close that one first, or give each its own: "
    r"Tracer\(rank=1\) for the second; `offload merge` puts their traces on one clock\."
)


def test_a_second_scheduler_on_one_tracer_is_refused() -> None:
    """When it opens, before it has taken its pools; the first one goes on."""
    tracer = offload.Tracer()
    second = pools()
    with offload.start_scheduler(*pools(), tracer=tracer) as scheduler:
        with pytest.raises(RequestError, match=REFUSED):
            offload.start_scheduler(*second, tracer=tracer)
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=5)
    with offload.start_scheduler(*second, tracer=tracer) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=5)
    assert [one.outcome for one in tracer.timeline().requests] == ["done", "done"]


def test_one_that_could_not_open_leaves_the_tracer_free() -> None:
    """Pools that belong to another are no reason to keep the tracer."""
    shared, tracer = pools(), offload.Tracer()
    with offload.start_scheduler(*shared):
        with pytest.raises(RequestError, match="belongs to a scheduler that is open"):
            offload.start_scheduler(*shared, tracer=tracer)
        offload.start_scheduler(*pools(), tracer=tracer).close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_ended_under_its_scheduler_leaves_the_tracer_free(backend: str) -> None:
    """Nobody will ever close that one."""
    tracer = offload.Tracer()

    async def left_open() -> None:
        made = offload.open_scheduler(*pools(), driver=SimDriver(), tracer=tracer)
        await made.__aenter__()

    anyio.run(left_open, backend=backend)
    with offload.start_scheduler(*pools(), tracer=tracer) as scheduler:
        scheduler.load(host_pages=[0], device_pages=[0]).result(timeout=5)


def test_a_driver_that_fails_to_close_leaves_the_tracer_free() -> None:
    """The error is raised, and the tracer is nobody's all the same."""

    class Stuck(SimDriver):
        def close(self) -> None:
            raise OSError("stuck")

    tracer = offload.Tracer()

    async def body() -> None:
        with pytest.raises(OSError, match="stuck"):
            async with offload.open_scheduler(*pools(), driver=Stuck(), tracer=tracer):
                pass

    asyncio.run(body())
    offload.start_scheduler(*pools(), tracer=tracer).close()
