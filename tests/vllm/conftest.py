"""Skips what needs vLLM where it is not installed, and says at the end what was shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.vllm.tally import TALLY

SKIPPED = pytest.StashKey[int]()
"""How many collected tests are skipped because vLLM is not installed."""

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that start vLLM's engine."""
    config.addinivalue_line("markers", "vllm: needs vLLM's CPU build; `make vllm` installs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip and count tests marked `vllm` where it is missing; warnings are errors if they are ours."""
    engines = [item for item in items if item.get_closest_marker("vllm")]
    config.stash[SKIPPED] = 0 if INSTALLED else len(engines)
    for item in engines:
        if INSTALLED:
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::offload"))
            # An engine starts in about 3 seconds, the first after 15 more; on two busy cores in four times that.
            item.add_marker(pytest.mark.timeout(300))
        else:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: `make vllm` installs and runs it"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many tests did not run, or what those that ran have shown."""
    if not INSTALLED:
        skipped = config.stash.get(SKIPPED, 0)
        terminalreporter.write_line(f"vLLM: not installed; tests skipped: {skipped}")
        return
    for line in TALLY.lines():
        terminalreporter.write_line(f"vLLM: {line}")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for models."""
    return tmp_path_factory.mktemp("models")
