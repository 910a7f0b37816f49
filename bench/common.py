"""What every benchmark shares: its command line, timing, and the JSON that it writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs


@attrs.frozen
class Options:
    """The command line of a benchmark."""

    json: Path | None
    """Where to write the figures, besides printing them."""

    quick: bool
    """Fewer repetitions and smaller sizes: the figures are rough."""


def options(description: str | None) -> Options:
    """Read `--json FILE` and `--quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="rough figures in a few seconds")
    given = parser.parse_args()
    return Options(json=given.json, quick=given.quick)


def best(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def alternate(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the seconds of the fastest run of each, taken in turns so that noise hits all alike."""
    times: dict[str, float] = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            times[name] = min(times[name], best(run, 1))
    return times


def machine() -> dict[str, object]:
    """Return what the figures depend on."""
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def finish(name: str, figures: Mapping[str, float], given: Options) -> None:
    """Print the figures, and write them where `--json` said."""
    for key, value in figures.items():
        print(f"{key:32} {value:.4g}")
    if given.json is not None:
        command = " ".join(["python", "-m", f"bench.{name}", *sys.argv[1:]])
        text = {"name": name, "command": command, "machine": machine(), "figures": dict(figures)}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(text, indent=2) + "\n")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
