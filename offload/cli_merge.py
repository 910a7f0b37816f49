"""`offload merge`: two traces in one file, on one clock."""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.cli import COMMANDS, Subparsers, output
from offload.trace.overlay import merge_files


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("merge", help=COMMANDS["merge"][1])
    parser.add_argument(
        "first", type=Path, metavar="FIRST", help="its clock is kept: torch.profiler's"
    )
    parser.add_argument(
        "second", type=Path, metavar="SECOND", help="its events are moved and added"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT", help=".json or .json.gz"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write both traces into one and say where."""
    path = output(arguments.output, (".json", ".json.gz"), "a trace")
    print(merge_files(arguments.first, arguments.second, path))
    return 0
