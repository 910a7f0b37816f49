"""Every example runs as a reader would run it, and stays short."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    """An example exits 0 on a machine without a GPU, prints something and warns of nothing."""
    if path.stem.startswith("vllm_"):
        pytest.skip("needs vLLM: `make vllm` runs it")
    command = [sys.executable, "-W", "error::ResourceWarning", str(path)]
    quiet = {**os.environ, "KINETO_LOG_LEVEL": "99"}  # torch's profiler greets on stderr
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False, env=quiet
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert run.stderr == ""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here: `make vllm` runs it")
def test_vllm_example_without_vllm() -> None:
    """It says what to do, in one line, and exits 1."""
    (path,) = (path for path in EXAMPLES if path.stem.startswith("vllm_"))
    command = [sys.executable, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "make vllm" in run.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    """An example teaches one lesson in at most 60 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
