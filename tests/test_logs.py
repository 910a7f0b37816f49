"""Logging: quiet by default, one line at the start, warnings in small numbers."""

from __future__ import annotations

import logging
import subprocess
import sys

import attrs
import pytest
import torch

import offload
from offload.counters import Counters
from offload.logs import WARN_EVERY_NS, Periodic, RateLimited


@attrs.define
class Clock:
    """A clock that stands."""

    now: int = 0

    def __call__(self) -> int:
        return self.now


def test_import_sets_nothing_up() -> None:
    """Importing installs a NullHandler on our logger, and touches neither the root logger nor any level."""
    code = (
        "import logging, offload; logger = logging.getLogger('offload');"
        "print([type(h).__name__ for h in logger.handlers], logger.level, logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['NullHandler'] 0 []\n"


def test_one_line_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Opening a scheduler logs its configuration once; a transfer logs nothing."""
    spec = offload.PoolSpec.mha(
        num_layers=2, page_size=2, num_kv_heads=1, head_dim=4, dtype=torch.float32
    )
    device = offload.DevicePool.allocate(spec, num_pages=4, device="cpu")
    host = offload.HostPool.like(device, num_pages=4, layout="page_first")
    with (
        caplog.at_level(logging.INFO, "offload"),
        offload.start_scheduler(device, host) as scheduler,
    ):
        scheduler.backup(device_pages=[0], host_pages=[0]).result(timeout=5)
    messages = [record.getMessage() for record in caplog.records if record.name == "offload"]
    assert len(messages) == 1
    assert "threads" in messages[0]


def test_warnings_are_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Of a thousand failures in ten seconds one is logged, and the next line counts the rest."""
    clock = Clock()
    failures = RateLimited(clock)
    for number in range(1000):
        failures.warning("transfer %d failed", number)
    clock.now += WARN_EVERY_NS
    failures.warning("transfer %d failed", 1000)
    assert [record.getMessage() for record in caplog.records] == [
        "transfer 0 failed",
        "transfer 1000 failed (999 more since the last such line)",
    ]


def test_periodic_line_claims_no_stall_where_streams_wait() -> None:
    """What a compute stream waited is not on the host's clock, and a small share would be untrue."""
    counters = Counters()
    line = Periodic(counters)
    counters.load.moved(0, 4_000_000, 151_000_000, 1, 1)
    counters.load.fenced()
    counters.forwarded(1_000_000)
    assert line.text() == "load 151.0 MB 37.8 GB/s, 1 wait left to compute streams"


def test_periodic_line(caplog: pytest.LogCaptureFixture) -> None:
    """The line tells what happened since the line before, and nothing when nothing did."""
    counters = Counters()
    line = Periodic(counters)
    counters.load.moved(0, 4_000_000, 151_000_000, 1, 1)
    counters.load.waited(155_000)
    counters.forwarded(1_000_000)
    with caplog.at_level(logging.INFO, "offload"):
        line.log()
        line.log()
    assert [record.getMessage() for record in caplog.records] == [
        "load 151.0 MB 37.8 GB/s, stalled 15.5 %"
    ]
