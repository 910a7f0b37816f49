"""What the three ways of serving came to: per turn, in total, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import attrs

from offload.demo.serve import Turn
from offload.trace.write import replacing


@attrs.frozen
class Row:
    """One turn, served three ways."""

    chat: str
    turn: int
    prefix_tokens: int
    """Tokens that the turn found cached."""

    ttft_recomputed_s: float
    ttft_resident_s: float
    ttft_loaded_s: float
    identical_text: bool
    """Loaded equals resident: text, and the logits of every step, bit for bit."""

    recomputed_text_equal: bool
    bytes_loaded: int
    stall_s: float

    @property
    def speedup(self) -> float:
        """How much sooner the first token came than without a cache."""
        return self.ttft_recomputed_s / self.ttft_loaded_s


@attrs.frozen
class Totals:
    """Sums over all turns; medians over those that found something cached."""

    turns: int
    ttft_recomputed_s: float
    ttft_resident_s: float
    ttft_loaded_s: float
    bytes_loaded: int
    stall_s: float
    recomputed_text_equal: int
    """Turns whose recomputed text is the same."""

    median_speedup: float
    median_loaded_vs_resident: float


@attrs.frozen
class Results:
    """The whole run."""

    identical_text: bool
    turns: tuple[Row, ...]
    totals: Totals
    longest_loop_gap_s: float

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        with replacing(path) as stream:
            stream.write(f"{json.dumps(attrs.asdict(self), indent=2)}\n".encode())


def combine(
    *,
    loaded: list[Turn],
    resident: list[Turn],
    recomputed: list[Turn],
    stalls: Mapping[int, float],
    longest_loop_gap_s: float,
) -> Results:
    """Return the results of three runs of one plan, compared turn by turn.

    Args:
        stalls: By load, the seconds that forwards waited for it.
    """
    rows = [_row(*three, stalls) for three in zip(loaded, resident, recomputed, strict=True)]
    return Results(
        identical_text=all(row.identical_text for row in rows),
        turns=tuple(rows),
        totals=_totals(rows),
        longest_loop_gap_s=longest_loop_gap_s,
    )


def _row(loaded: Turn, resident: Turn, recomputed: Turn, stalls: Mapping[int, float]) -> Row:
    same = loaded.answer.tokens == resident.answer.tokens
    return Row(
        chat=loaded.chat,
        turn=loaded.turn,
        prefix_tokens=loaded.prefix_tokens,
        ttft_recomputed_s=recomputed.ttft_s,
        ttft_resident_s=resident.ttft_s,
        ttft_loaded_s=loaded.ttft_s,
        identical_text=same and loaded.answer.logits == resident.answer.logits,
        recomputed_text_equal=loaded.answer.tokens == recomputed.answer.tokens,
        bytes_loaded=loaded.bytes_loaded,
        stall_s=0.0 if loaded.request is None else stalls.get(loaded.request, 0.0),
    )


def _totals(rows: list[Row]) -> Totals:
    later = [row for row in rows if row.bytes_loaded] or rows
    return Totals(
        turns=len(rows),
        ttft_recomputed_s=sum(row.ttft_recomputed_s for row in rows),
        ttft_resident_s=sum(row.ttft_resident_s for row in rows),
        ttft_loaded_s=sum(row.ttft_loaded_s for row in rows),
        bytes_loaded=sum(row.bytes_loaded for row in rows),
        stall_s=sum(row.stall_s for row in rows),
        recomputed_text_equal=sum(row.recomputed_text_equal for row in rows),
        median_speedup=median(row.speedup for row in later),
        median_loaded_vs_resident=median(r.ttft_loaded_s / r.ttft_resident_s for r in later),
    )
