"""How long does it take to find the runs in a million page pairs, and how does that grow?

The bound is the way engines do it: `argsort` the source, gather both sides, difference both.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.common import alternate, best, finish, options
from offload.core.plan import Scratch, coalesce

Pages = NDArray[np.int64]


def by_argsort(source: Pages, destination: Pages) -> tuple[Pages, Pages, Pages]:
    """Return the runs found by sorting positions instead of values."""
    order = np.argsort(source)
    source, destination = source[order], destination[order]
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    return source[starts], destination[starts], np.diff(starts, append=len(source))


def cases(n: int) -> dict[str, tuple[Pages, Pages]]:
    """Return page pairs in random order, in shuffled runs of 16, and sorted."""
    draw = np.random.default_rng(0)
    sixteen = (draw.permutation(n // 16)[:, None] * 16 + np.arange(16)).ravel()
    return {
        "random": (draw.permutation(n), draw.permutation(n)),
        "runs_of_16": (sixteen, sixteen[::-1].reshape(-1, 16)[:, ::-1].ravel().copy()),
        "sorted": (np.arange(n), np.arange(n)),
    }


def main() -> None:
    """Measure and print."""
    given = options(__doc__)
    repeats = 3 if given.quick else 11
    scratch = Scratch()
    figures: dict[str, float] = {}
    ratios, times = [], []
    for name, (source, destination) in cases(1_000_000).items():
        coalesce(source, destination, scratch)
        took = alternate(
            {
                "ours": partial(coalesce, source, destination, scratch),
                "argsort": partial(by_argsort, source, destination),
            },
            repeats,
        )
        figures[f"{name}_ms"] = took["ours"] * 1e3
        figures[f"{name}_argsort_ms"] = took["argsort"] * 1e3
        ratios.append(took["ours"] / took["argsort"])
        times.append(took["ours"] * 1e3)
    slowest = times.index(max(times))
    figures["coalesce_vs_argsort"] = ratios[slowest]
    figures["coalesce_1m_ms"] = times[slowest]
    for exponent in (3, 4, 5, 6):
        source, destination = cases(10**exponent)["random"]
        seconds = best(partial(coalesce, source, destination, scratch), repeats * 3)
        figures[f"random_1e{exponent}_us"] = seconds * 1e6
    finish("plan", figures, given)


if __name__ == "__main__":
    main()
