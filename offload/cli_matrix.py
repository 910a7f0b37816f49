"""`offload matrix`: the whole strategy table, for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

from offload.cli import COMMANDS, Subparsers
from offload.core.kinds import Direction, PoolKind, parse
from offload.verdict import DEVICES, NOMINAL, Verdict, cells

_SIZES = {
    PoolKind.MHA: "64 tokens, 8 heads, dim 128, 2 bytes",
    PoolKind.MLA: "64 tokens, rows of 576 elements (64 of them rope), 2 bytes",
    PoolKind.ROWS: "rows of 37440 bytes",
    PoolKind.STATE: "rows of 32768 and 3072 bytes",
}
assert set(_SIZES) == set(NOMINAL)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("matrix", help=COMMANDS["matrix"][1])
    parser.add_argument("--kind", metavar="K", help=f"one of {', '.join(PoolKind)}; default: all")
    parser.add_argument("--device", metavar="D", help=f"only what runs there: {', '.join(DEVICES)}")
    parser.add_argument("--json", action="store_true", help="a list of cells, with their reasons")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    kind = None if arguments.kind is None else parse(PoolKind, arguments.kind)
    verdicts = list(cells(kind, device=arguments.device))
    if arguments.json:
        print(json.dumps([as_json(verdict) for verdict in verdicts], indent=1))
    else:
        print("\n".join(lines(verdicts)))
    return 0


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return one cell: its key, and a strategy or a reason."""
    outcome: tuple[str, object] = ("reason", verdict.reason)
    if verdict.supported:
        outcome = ("strategy", verdict.strategy)
    return {
        "kind": verdict.kind,
        "layout": verdict.layout,
        "io_backend": verdict.io_backend,
        "direction": verdict.direction,
        "supported": verdict.supported,
        outcome[0]: outcome[1],
        "runs": verdict.runs,
        "run_bytes": verdict.run_bytes,
    }


def lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the table as text: one matrix per kind, directions together where they agree."""
    footnotes: dict[str, int] = {}
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        ways = [
            (way.value, [verdict for verdict in of_kind if verdict.direction == way])
            for way in Direction
        ]
        if _same(ways[0][1], ways[1][1]):
            ways = [("load and backup", ways[0][1])]
        for title, group in ways:
            yield f"{kind}, {title} ({_SIZES[PoolKind(kind)]})"
            yield from _matrix(group, footnotes)
            yield ""
    for reason, number in footnotes.items():
        yield f"[{number}] {reason}"


def _same(loads: Sequence[Verdict], backups: Sequence[Verdict]) -> bool:
    return [(v.strategy, v.reason) for v in loads] == [(v.strategy, v.reason) for v in backups]


def _matrix(verdicts: Sequence[Verdict], footnotes: dict[str, int]) -> Iterator[str]:
    names = list(dict.fromkeys(verdict.io_backend for verdict in verdicts))
    rows = [["layout", "runs x bytes", *names]]
    for layout in dict.fromkeys(verdict.layout for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.layout == layout]
        rows.append([layout, f"{found[0].runs} x {found[0].run_bytes}"])
        for verdict in found:
            why = verdict.reason or verdict.note
            number = "" if why is None else f"[{footnotes.setdefault(why, len(footnotes) + 1)}]"
            rows[-1].append(f"{verdict.strategy or ''} {number}".strip())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
