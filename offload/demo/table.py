"""What the demo prints: a progress line that lives, a row per turn, and the sums."""

from __future__ import annotations

import time
from typing import TextIO

import attrs

from offload.demo.results import Results, Row

MIB = 1 << 20

HEADER = (
    "chat       turn  prefix    recomputed   resident     loaded   speed-up     loaded     stall  same\n"
    "                 tokens       TTFT ms    TTFT ms    TTFT ms                   MiB        ms"
)


def row_line(row: Row) -> str:
    """Return one turn as a line under `HEADER`."""
    return (
        f"{row.chat[:10]:<10} {row.turn:>4} {row.prefix_tokens:>7}"
        f" {row.ttft_recomputed_s * 1e3:>13.0f} {row.ttft_resident_s * 1e3:>10.0f}"
        f" {row.ttft_loaded_s * 1e3:>10.0f} {_speedup(row):>10}"
        f" {row.bytes_loaded / MIB:>10.1f} {row.stall_s * 1e3:>9.1f}"
        f"  {'yes' if row.identical_text else 'NO'}"
    )


def _speedup(row: Row) -> str:
    # A first turn found nothing cached: there was nothing to be faster with.
    return f"{row.speedup:.1f}x" if row.bytes_loaded else "-"


def report(results: Results) -> str:
    """Return the table and the totals."""
    totals = results.totals
    verdict = (
        "Loaded equals resident bit for bit: text and logits of every step of every turn."
        if results.identical_text
        else "LOADED DIFFERS FROM RESIDENT: see the last column."
    )
    lines = [
        HEADER,
        *(row_line(row) for row in results.turns),
        "",
        (
            f"Time to first token, all turns: {totals.ttft_recomputed_s:.2f} s recomputed, "
            f"{totals.ttft_resident_s:.2f} s resident, {totals.ttft_loaded_s:.2f} s loaded."
        ),
        (
            f"Turns with a prefix, median: {totals.median_speedup:.1f}x sooner than recomputed; "
            f"loaded / resident {totals.median_loaded_vs_resident:.3f}."
        ),
        (
            f"Loaded {totals.bytes_loaded / MIB:.1f} MiB; forwards waited {totals.stall_s * 1e3:.1f} ms "
            f"for it in all. Longest gap of the event loop: {results.longest_loop_gap_s * 1e3:.1f} ms."
        ),
        verdict,
        (
            f"Recomputed text is the same in {totals.recomputed_text_equal} of {totals.turns} turns "
            "(other chunk shapes round differently)."
        ),
    ]
    return "\n".join(lines)


@attrs.define(eq=False)
class Progress:
    """One line that is written over on a terminal, and a line per finished turn elsewhere."""

    stream: TextIO
    way: str = ""
    """Which way of serving runs."""

    turns: int = 0
    _finished: int = 0
    _drawn: float = 0.0

    def begin(self, way: str, turns: int) -> None:
        """Start counting the turns of one way of serving."""
        self.way, self.turns, self._finished = way, turns, 0

    def told(self, chat: str, turn: int, tokens: int, limit: int) -> None:
        """Draw, at most every 0.1 s; called from the thread that computes."""
        line = f"{self.way:<10} {self._finished + 1:>2}/{self.turns}  {chat} turn {turn}  "
        if self.stream.isatty() and time.monotonic() - self._drawn > 0.1:
            self._drawn = time.monotonic()
            self.stream.write(f"\r\x1b[K{line}{tokens}/{limit} tokens")
            self.stream.flush()

    def finished(self, chat: str, turn: int, ttft_s: float, text: str) -> None:
        """Count a turn as finished."""
        self._finished += 1
        line = (
            f"{self.way:<10} {self._finished:>2}/{self.turns}  {chat} turn {turn}: "
            f"{ttft_s * 1e3:.0f} ms, {' '.join(text.split())[:60]!r}"
        )
        self.stream.write(f"\r\x1b[K{line}" if self.stream.isatty() else f"{line}\n")
        self.stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()
