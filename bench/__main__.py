"""Run every script of this folder and print one table: python -m bench [--quick] [NAME ...].

A script asks one question, takes `--quick` and `--json FILE`, and writes
`{"name", "command", "machine", "figures": {...}}`. Its own output goes to `out/bench/NAME.txt`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
OUT = Path("out/bench")


def scripts() -> dict[str, Path]:
    """Return the scripts by name: the modules of this folder that can be run, in this environment."""
    found = sorted(FOLDER.glob("[!_]*.py"))
    if importlib.util.find_spec("vllm") is None:  # `make vllm-bench` has an environment with it
        found = [path for path in found if not path.stem.startswith("vllm_")]
    return {path.stem: path for path in found if '"__main__"' in path.read_text(encoding="utf-8")}


def run(name: str, *, quick: bool) -> dict[str, object] | None:
    """Run one script; return what it measured, or None when it failed. Its output is kept."""
    result, log = OUT / f"{name}.json", OUT / f"{name}.txt"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(result)]
    command += ["--quick"] if quick else []
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    print(
        f"{name}: {'ok' if code == 0 else f'FAILED ({code}), see {log}'}, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    if code != 0:
        return None
    measured: dict[str, object] = json.loads(result.read_text(encoding="utf-8"))
    return measured


def rows(measured: dict[str, object]) -> list[tuple[str, str, str]]:
    """Return (script, figure, value) lines of one script's result."""
    figures = measured["figures"]
    assert isinstance(figures, dict)
    return [
        (str(measured["name"]), key, f"{value:.4g}" if isinstance(value, float) else str(value))
        for key, value in figures.items()
    ]


def main() -> int:
    """Run what was asked for; exit 1 when a script failed."""
    known = scripts()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no script {sorted(unknown)}; there are {sorted(known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, quick=options.quick) for name in options.names or known}
    lines = [row for measured in results.values() if measured for row in rows(measured)]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(3)]
    print()
    for line in lines:
        print(f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]:>{widths[2]}}")
    machine = next((m["machine"] for m in results.values() if m), None)
    print(f"\nmachine: {machine}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
