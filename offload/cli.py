"""The command line: `python -m offload`. One module per command, imported when it is called.

A command's module has `add_parser(subparsers)`, which adds a parser and sets `run`, a function from the
parsed arguments to an exit code. What cannot be done, and arguments that do not parse, end as one
paragraph on stderr and exit code 2. Only `demo` needs torch: the others answer before it would be loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from offload import __version__

if TYPE_CHECKING:
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object

COMMANDS: dict[str, tuple[str, str]] = {
    "matrix": ("offload.cli_matrix", "print which pairs are copied, and how"),
    "explain": ("offload.cli_explain", "say whether one pair is copied, why not, and what works"),
    "demo": ("offload.demo.command", "serve a real model with its KV cache offloaded"),
    "report": ("offload.cli_report", "sum up a trace: stalls, bandwidth, layer by layer"),
    "timeline": ("offload.cli_timeline", "draw a trace as a picture"),
    "merge": (
        "offload.cli_merge",
        "put two traces, such as torch.profiler's and ours, on one clock",
    ),
    "check": ("offload.cli_check", "say what readers of a trace would drop or refuse"),
    "view": ("offload.cli_view", "open a trace in Perfetto"),
}
"""By command, its module and its line of help."""

PROG = "offload"

READERS = ("report", "timeline", "merge", "check")
"""Commands that read a trace. It may be anybody's file."""

MISREAD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises on JSON with the right keys and the wrong things behind them."""

REJECTED = 2
"""Exit code of a rejected pair and of bad arguments, as argparse has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), "")
    prog = f"{PROG} {command}" if command in COMMANDS else PROG
    try:
        code = _run(arguments, command, prog)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) left. Point stdout elsewhere, or the interpreter fails flushing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        told = _told(error, command)
        if told is None:
            raise
        print(f"{prog}: {told}", file=sys.stderr)
        return REJECTED
    return code


def _run(arguments: Sequence[str], command: str, prog: str) -> int:
    """Parse the arguments of a command, and do it."""
    parser = _parser(command)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.prog = prog
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def output(path: Path, suffixes: tuple[str, ...], what: str) -> Path:
    """Return where a command shall write, or refuse it before anything is read.

    Raises:
        RequestError: The suffix is another, or there is no such folder.
    """
    from offload.errors import RequestError

    if not path.name.endswith(suffixes):
        ends = " or ".join(suffixes)
        raise RequestError(f"cannot write {path}: {what} ends in {ends}.", value=path)
    if not path.parent.is_dir():
        raise RequestError(f"cannot write {path}: there is no folder {path.parent}.", value=path)
    return path


def _told(error: Exception, command: str) -> str | None:
    """Return an error as text, one of the file system without its number; None for a fault of ours."""
    from offload.errors import OffloadError

    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: no such file"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, (OffloadError, OSError)):
        return str(error)
    if command in READERS and isinstance(error, MISREAD):
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"this is JSON, and not a trace that can be read ({what})"
    return None


class _Parser(argparse.ArgumentParser):
    """One that tells what is wrong as every other error here is told: in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(REJECTED, f"{self.prog}: {message.rstrip('.')}. See {self.prog} --help.\n")


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser, with the full arguments of the one command that is called.

    Raises:
        UnknownNameError: There is no such command.
    """
    from offload.errors import UnknownNameError

    if command and command not in COMMANDS:
        raise UnknownNameError("command", command, COMMANDS)
    parser = _Parser(prog=PROG, description="Moves KV-cache pages between device and host memory.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, line) in COMMANDS.items():
        if name == command:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser
