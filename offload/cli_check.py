"""`offload check`: what readers of a trace would drop or refuse."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offload.cli import COMMANDS, Subparsers
from offload.trace.check import check, summary


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("check", help=COMMANDS["check"][1])
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the problems of a trace file; 1 when there are any."""
    problems = check(arguments.file)
    if problems:
        print(summary(problems), file=sys.stderr)
        return 1
    print(f"{arguments.file}: nothing that a reader would drop")
    return 0
