"""Settings of every test: one compute thread, no network, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Generator

# Before anything imports a hub client: it reads these once, when imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# One thread computes, the other core copies; with two, torch's own team fights the copy workers.
torch.set_num_threads(1)

SKIPPED_GPU_TESTS = pytest.StashKey[int]()
"""How many collected tests are skipped because there is no CUDA device."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA, and count them."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = not torch.cuda.is_available()
    config.stash[SKIPPED_GPU_TESTS] = len(gpu) if missing else 0
    if missing:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--forbid-skips`, for runs whose point is that everything is installed."""
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where skips are forbidden; GPU tests may still be skipped."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.config.getoption("forbid_skips") and "gpu" not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped, and --forbid-skips was given: {call.excinfo}"
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many GPU tests did not run, so that all green is never taken for 'ran on a GPU'."""
    skipped = config.stash.get(SKIPPED_GPU_TESTS, 0)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    terminalreporter.write_line(f"GPU: {device}; GPU tests skipped: {skipped}")
