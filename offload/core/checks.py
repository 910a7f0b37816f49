"""What sizes forbid: per io backend, a check of the runs in which host and device step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offload.core.geometry import ComponentGeometry, Runs, pair_alignment, pair_runs
from offload.core.kinds import IoBackend
from offload.errors import counted

Pairs = tuple[tuple[ComponentGeometry, ComponentGeometry], ...]

SHORTEST_WORD = 4
"""Bytes. GPU threads load and store words; a 2-byte path would move an eighth of a 16-byte one's bytes."""


def worst_runs(pairs: Pairs) -> tuple[ComponentGeometry, Runs]:
    """Return the component whose layer of a page is cut into the most, and then shortest, runs."""
    found = [(host, pair_runs(host, device)) for host, device in pairs]
    return max(found, key=lambda each: (each[1].count, -each[1].nbytes))


def _cut(runs: Runs, host: ComponentGeometry) -> str:
    why = "" if runs.count == host.runs.count else " in which host and device step together"
    return f"one layer of one page is {runs.count} runs of {counted(runs.nbytes, 'byte')}{why}"


def _one_run(pairs: Pairs, name: str) -> str | None:
    host, runs = worst_runs(pairs)
    return f"{_cut(runs, host)}, and {name!r} copies one run" if runs.count > 1 else None


def _run_per_token(pairs: Pairs, name: str) -> str | None:
    for host, device in pairs:
        runs, tokens = pair_runs(host, device), host.component.tokens
        if runs.count > tokens:
            most = f"{name!r} takes at most one run per token ({tokens})"
            return f"{_cut(runs, host)}, and {most}"
    return None


def _whole_words(pairs: Pairs, name: str) -> str | None:
    for host, device in pairs:
        runs = pair_runs(host, device)
        moves = f"{name!r} moves words of at least {SHORTEST_WORD}"
        if runs.nbytes % SHORTEST_WORD:
            what = "row" if runs.count == 1 else "run"
            return f"a {what} is {counted(runs.nbytes, 'byte')}, and {moves}"
        if pair_alignment(host, device) < SHORTEST_WORD:
            apart = pair_alignment(host, device)
            return f"runs start at multiples of {counted(apart, 'byte')}, and {moves}"
    return None


CHECKS: Mapping[IoBackend, Callable[[Pairs, str], str | None]] = {
    IoBackend.DIRECT: _one_run,
    IoBackend.MEMCPY_BATCH: _run_per_token,
    IoBackend.KERNEL: _whole_words,
    IoBackend.STAGED: _whole_words,
}
"""Per io backend, why these sizes cannot be copied, or None. No entry: it takes everything."""
