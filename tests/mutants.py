"""Say how many changes of core/ its tests notice: python -m tests.mutants, after `mutmut export-cicd-stats`."""

from __future__ import annotations

import json
from pathlib import Path

STATS = Path("mutants/mutmut-cicd-stats.json")
LEAST = 0.9
"""What has to be noticed of all changes."""


def verdict(counts: dict[str, int]) -> tuple[str, bool]:
    """Return a sentence about a run, and whether it is enough.

    A change that makes tests run into their time limit is noticed; one that no test runs is not.
    """
    total, late = counts["total"], counts["timeout"]
    noticed = counts["killed"] + late + counts["segfault"]
    untold = total - noticed - counts["survived"] - counts["no_tests"]
    text = (
        f"{total} mutants: {noticed} noticed ({noticed / total:.1%}), {late} of them by the time limit; "
        f"{counts['survived']} survived, {counts['no_tests']} that no test runs, {untold} without a verdict"
    )
    return text, noticed >= LEAST * total


def main() -> int:
    """Read the counts of the last run; exit 1 when too few were noticed."""
    text, enough = verdict(json.loads(STATS.read_text()))
    print(text if enough else f"{text}. At least {LEAST:.0%} are to be noticed.")
    return 0 if enough else 1


if __name__ == "__main__":
    raise SystemExit(main())
