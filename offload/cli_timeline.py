"""`offload timeline`: a static picture of a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.cli import COMMANDS, Subparsers, output
from offload.trace.picture import write
from offload.trace.read import timeline


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("timeline", help=COMMANDS["timeline"][1])
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument("--rank", type=int, metavar="N", help="one of several; default: the lowest")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="default: FILE's name, .svg"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        help="the last N passes up to one that loads; default: all",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the picture and say where."""
    name = arguments.file.name.removesuffix(".gz").removesuffix(".json")
    beside = arguments.file.with_name(f"{name}.svg")
    path = output(arguments.output, (".svg",), "a picture") if arguments.output else beside
    print(write(timeline(arguments.file, arguments.rank), path, steps=arguments.steps))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
