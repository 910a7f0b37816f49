"""The command `demo`: its arguments, and its run from weights to files."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from offload import registry
from offload.cli import COMMANDS, REJECTED, Subparsers
from offload.errors import UnknownNameError

CHATS = 4
TURNS = 3
NEW_TOKENS = 24
QUICK_WORDS = 130
QUICK_NEW_TOKENS = 6


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help=COMMANDS["demo"][1],
        description="Serve chats on a device pool that holds fewer than there are: loaded from the "
        "host layer by layer, resident on the device, and recomputed. Compares all three.",
    )
    parser.add_argument(
        "--prompt-file", type=Path, action="append", default=[], metavar="FILE",
        help="a text of your own; its lines that begin with '>>>' are questions, one per turn "
        "(may be given several times; built-in texts fill up to --chats)",
    )  # fmt: skip
    parser.add_argument(
        "--link-gib-s",
        type=_positive,
        metavar="X",
        help="throttle host and device copies to X GiB/s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short texts and answers: under a minute"
    )
    parser.add_argument("--chats", type=_count, default=CHATS, help=f"default: {CHATS}")
    parser.add_argument(
        "--turns", type=_count, default=TURNS, help=f"of each chat; default: {TURNS}"
    )
    parser.add_argument(
        "--layout",
        type=_layout,
        default="page_first_direct",
        help="of the host pool; default: page_first_direct",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. 0: loaded equals resident in every bit; 1: it does not; 2: it cannot run here."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        print(
            f"offload demo: {', '.join(missing)} not installed. From a clone, `make demo` sets up everything; "
            "elsewhere the extra 'demo' has them.",
            file=sys.stderr,
        )
        return REJECTED
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Everything is here: nothing asks a network.
    from offload.demo.main import Options, main

    link = arguments.link_gib_s
    return main(
        Options(
            prompt_files=tuple(arguments.prompt_file),
            chats=arguments.chats,
            turns=arguments.turns,
            words=QUICK_WORDS if arguments.quick else None,
            max_new_tokens=QUICK_NEW_TOKENS if arguments.quick else NEW_TOKENS,
            layout=arguments.layout,
            link_bytes_per_second=None if link is None else link * (1 << 30),
            out=arguments.out,
        )
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _layout(text: str) -> str:
    try:
        registry.layout(text)
    except UnknownNameError as unknown:
        raise argparse.ArgumentTypeError(str(unknown)) from None
    return text


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return value
