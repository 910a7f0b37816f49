"""The example runs as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.rig import ENVIRONMENT

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_layerwise.py"


def test_the_example_reloads_and_answers_the_same(tmp_path: Path) -> None:
    """Three equal answers, the last from host memory, and a timeline that the report reads."""
    settings = os.environ | {
        name: ENVIRONMENT[name] for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    }
    run = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    reloaded = re.findall(r"(\d+) of 1500 tokens reloaded", run.stdout)
    assert reloaded == ["0", "0", "1472"]
    assert len(set(re.findall(r"answer (\[.*\])", run.stdout))) == 1
    command = [sys.executable, "-m", "offload", "report", "vllm.trace.json.gz"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "12.1 MB" in report.stdout
