"""`offload report`: how much of the forward was spent waiting, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.cli import COMMANDS, Subparsers
from offload.trace.read import timeline
from offload.trace.report import Report


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("report", help=COMMANDS["report"][1])
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument("--rank", type=int, metavar="N", help="one of several; default: the lowest")
    parser.add_argument("--json", action="store_true", help="all numbers, for machines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report of a trace file."""
    report = Report.of(timeline(arguments.file, arguments.rank))
    print(report.to_json() if arguments.json else report)
    return 0
