"""Run random programs and say what they found: python -m tests.soak [--seeds N] [--threads N] [--seed S] [--plants]."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from tests.soak.plants import MOST_SEEDS, PLANTS, first_find
from tests.soak.run import Outcome, play, shrink
from tests.soak.steps import program


def main() -> int:
    """Read the command line and run; exit 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000, help="programs on the simulator")
    parser.add_argument("--threads", type=int, default=None, help="programs on threads; a tenth")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one program and tell its story")
    parser.add_argument("--steps", help="with --seed, only these of its steps: 0,4,9")
    parser.add_argument("--real", action="store_true", help="with --seed, on threads")
    parser.add_argument(
        "--plants", action="store_true", help="plant each fault; say which seed finds it"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    _quiet()
    if given.seed is not None:
        return _one(given.seed, given.steps, threads=given.real)
    if given.plants:
        return _plants(given.jobs)
    count = given.seeds // 10 if given.threads is None else given.threads
    found = _many(range(given.first, given.first + given.seeds), given.jobs, threads=False)
    found += _many(range(given.first, given.first + count), given.jobs, threads=True)
    return 1 if found else 0


def _one(seed: int, only: str | None, *, threads: bool) -> int:
    steps = program(seed)
    if only is not None:
        steps = [steps[int(index)] for index in only.split(",")]
    outcome = play(seed, steps, threads=threads)
    if outcome.error is not None and only is None and not threads:
        outcome, kept = shrink(outcome)
        print(f"steps that are needed: --steps {','.join(map(str, kept))}")
    _tell(outcome)
    return 0 if outcome.error is None else 1


def _tell(outcome: Outcome) -> None:
    print(*outcome.story, sep="\n")
    if outcome.error is not None:
        traceback.print_exception(outcome.error)


def _many(seeds: range, jobs: int, *, threads: bool) -> int:
    start = time.monotonic()
    steps = operations = faults = 0
    failed = []
    with ProcessPoolExecutor(jobs, initializer=_quiet) as pool:
        for outcome in pool.map(partial(_told, threads=threads), seeds, chunksize=16):
            steps += outcome.steps
            operations += outcome.operations
            faults += outcome.faults
            if outcome.error is not None:
                failed.append(outcome.seed)
                if len(failed) <= 20:
                    print(f"seed {outcome.seed}: {type(outcome.error).__name__}: {outcome.error}")
    place = "threads" if threads else "the simulator"
    print(
        f"{len(seeds)} programs on {place}: {steps} steps, {operations} layer copies, "
        f"{faults} faults injected, {time.monotonic() - start:.0f} s, {len(failed)} failed"
    )
    if failed:
        way = " --real" if threads else ""
        print(f"replay: python -m tests.soak --seed {failed[0]}{way}")
    return len(failed)


def _plants(jobs: int) -> int:
    """Plant each fault in turn; say how many programs find it."""
    missed = 0
    with ProcessPoolExecutor(jobs, initializer=_quiet) as pool:
        for name, told in zip(PLANTS, pool.map(_hunt, PLANTS), strict=True):
            missed += not told
            print(f"{name}: {told or f'NOT FOUND by {MOST_SEEDS} programs'}")
    return 1 if missed else 0


def _hunt(name: str) -> str:
    outcome = first_find(name)
    if outcome is None:
        return ""
    text = str(outcome.error).split("\n")[0][:120]
    return f"found by seed {outcome.seed}: {type(outcome.error).__name__}: {text}"


def _quiet() -> None:
    """Compute on one thread; say nothing of the failures that a program plants."""
    torch.set_num_threads(1)
    logging.getLogger("offload").setLevel(logging.ERROR)


def _told(seed: int, *, threads: bool) -> Outcome:
    """Run one program; send home what can be sent."""
    outcome = play(seed, threads=threads)
    if outcome.error is None:
        return Outcome(seed, outcome.steps, outcome.operations, outcome.faults, None, ())
    text = f"{type(outcome.error).__name__}: {str(outcome.error)[:300]}"
    return Outcome(seed, outcome.steps, outcome.operations, outcome.faults, RuntimeError(text), ())


if __name__ == "__main__":
    sys.exit(main())
