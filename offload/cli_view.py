"""`offload view`: open a trace in Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.cli import COMMANDS, Subparsers
from offload.trace.view import has_local, view


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("view", help=COMMANDS["view"][1])
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument(
        "--local",
        action="store_true",
        help="vizviewer, which needs no network; default where installed",
    )
    parser.add_argument("--online", action="store_true", help="the Perfetto UI on its own site")
    parser.add_argument("--no-browser", action="store_true", help="only serve")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a trace file until interrupted."""
    local = arguments.local or (has_local() and not arguments.online)
    view(arguments.file, print, local=local, browser=not arguments.no_browser)
    return 0
