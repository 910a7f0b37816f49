"""The command line: the printed table, one pair explained, and how refusals leave the process."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

import offload
from offload.cli import COMMANDS, main
from offload.core.kinds import Direction, IoBackend, Layout, PoolKind

GOLDEN = Path(__file__).parent / "core" / "matrix.txt"
EXPLAIN = ["explain", "--kind", "mha", "--direction", "load"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version`, `offload.__version__` and the package's metadata say the same."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"offload {offload.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["version"] == offload.__version__


def test_matrix_is_the_golden_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed table changes only knowingly: `python -m offload matrix > tests/core/matrix.txt`."""
    assert main(["matrix"]) == 0
    assert capsys.readouterr().out.splitlines() == GOLDEN.read_text("utf-8").splitlines()


def test_matrix_as_json_has_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON is a list of all cells, each with a strategy or a reason."""
    assert main(["matrix", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    keys = {(c["kind"], c["layout"], c["io_backend"], c["direction"]) for c in cells}
    assert keys == {tuple(map(str, key)) for key in product(PoolKind, Layout, IoBackend, Direction)}
    assert len(cells) == len(keys)
    for cell in cells:
        assert cell["supported"] == ("strategy" in cell) == ("reason" not in cell)


def test_matrix_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """`--kind` prints that kind alone."""
    assert main(["matrix", "--kind", "mla"]) == 0
    assert capsys.readouterr().out.startswith("mla, load and backup")


def test_a_rejected_pair_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A rejected pair is one paragraph on stderr that names what works, and exit code 2."""
    assert main([*EXPLAIN, "--layout", "page_head", "--io-backend", "direct"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "'cpu'" in err
    assert "'page_first_direct'" in err


def test_a_supported_pair_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    """A supported pair prints its strategy, its runs and what else works."""
    assert main([*EXPLAIN, "--layout", "layer_first", "--io-backend", "direct"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("io_backend 'direct' loads layout 'layer_first' (mha) by 'page_runs'")
    assert "1 x 131072 bytes" in out


@pytest.mark.parametrize("kind", PoolKind)
def test_sizes_can_be_given(kind: PoolKind, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes on the command line reach the geometry."""
    sizes = {
        "mha": (["--tokens", "4", "--heads", "2", "--dim", "8"], "1 x 128 bytes"),
        "mla": (["--tokens", "4", "--dim", "20", "--rope-dim", "4"], "1 x 160 bytes"),
        "rows": (["--row-bytes", "1155"], "1 x 1155 bytes"),
        "state": (["--row-bytes", "99"], "1 x 99 bytes"),
    }
    arguments, shown = sizes[kind]
    assert main(["explain", "--kind", kind, "--layout", "layer_first", *arguments]) == 0
    assert shown in capsys.readouterr().out


WRONG = {
    "kind": (["explain", "--kind", "mhaa", "--layout", "page_head"], "did you mean 'mha'?"),
    "layout": ([*EXPLAIN, "--layout", "page_hed"], "did you mean 'page_head'?"),
    "io backend": (
        [*EXPLAIN, "--layout", "page_head", "--io-backend", "kernal"],
        "did you mean 'kernel'?",
    ),
    "direction": (
        ["explain", "--kind", "mha", "--layout", "page_head", "--direction", "lode"],
        "did you mean 'load'?",
    ),
    "size": (
        [*EXPLAIN, "--layout", "page_head", "--heads", "0"],
        "heads is 0, expected at least 1",
    ),
    "rope": (
        ["explain", "--kind", "mla", "--layout", "page_first", "--dim", "64"],
        "latent_without_rope is 0",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG.keys())
def test_bad_arguments_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad name or size is one line on stderr with a way out, and exit code 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


MISUSED = {
    "no command": (
        [],
        "offload: the following arguments are required: command. See offload --help.",
    ),
    "option": (
        ["matrix", "--kindd"],
        "offload matrix: unrecognized arguments: --kindd. See offload matrix --help.",
    ),
    "nothing asked": (
        ["explain"],
        (
            "offload explain: the following arguments are required: --kind, --layout. See offload "
            "explain --help."
        ),
    ),
    "no number": (
        [*EXPLAIN, "--heads", "x"],
        "offload explain: argument --heads: invalid int value: 'x'. See offload explain --help.",
    ),
    "command": (
        ["matrixx"],
        (
            "offload: unknown command 'matrixx'; did you mean 'matrix'? Choices: 'matrix', 'explain', "
            "'demo', 'report', 'timeline', 'merge', 'check', 'view'."
        ),
    ),
    "device": (
        ["matrix", "--device", "tpu0"],
        "offload matrix: unknown device 'tpu0'. Choices: 'cpu', 'cuda'.",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), MISUSED.values(), ids=MISUSED.keys())
def test_misuse_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever finds the mistake, argparse or the library: one paragraph with a way out, and exit code 2."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"{said}\n")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names all commands without importing their modules."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in out] == []


QUICK = {
    "help": ["--help"],
    "matrix": ["matrix"],
    "explain": [*EXPLAIN, "--layout", "page_head"],
    "report": ["report", "TRACE", "--json"],
    "timeline": ["timeline", "TRACE", "-o", "OUT"],
    "check": ["check", "TRACE"],
    "merge": ["merge", "TRACE", "TRACE", "-o", "MERGED"],
    "view": ["view", "--help"],
    "misuse": ["matrixx"],
}


@pytest.mark.parametrize("arguments", QUICK.values(), ids=QUICK.keys())
def test_a_command_loads_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """Whoever asks a question waits for the answer, not for torch and an event loop to be imported."""
    trace = tmp_path / "empty.json"
    trace.write_text('{"traceEvents": []}', "utf-8")
    paths = {
        "TRACE": str(trace),
        "OUT": str(tmp_path / "picture.svg"),
        "MERGED": str(tmp_path / "merged.json"),
    }
    code = (
        "import sys\n"
        "from offload.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print({'torch', 'anyio'} & set(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *(paths.get(word, word) for word in arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.stderr.splitlines()[-1] == "set()"


def test_verdicts_hold_without_asserts() -> None:
    """`python -O` gives the same verdict and the same exit code."""
    command = [sys.executable, "-O", "-m", "offload", *EXPLAIN, "--layout", "page_head"]
    run = subprocess.run(
        [*command, "--io-backend", "direct"],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("io_backend 'direct' cannot load layout 'page_head' (mha): ")


def test_auto_gives_the_reason_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing copies a pair, `auto` says why, and which layouts it would copy."""
    assert main(["explain", "--kind", "mla", "--layout", "page_head"]) == 2
    assert capsys.readouterr().err == (
        "io_backend 'auto' cannot load layout 'page_head' (mla): page_head splits token rows by head, "
        "and an mla row has no heads. Use layout 'layer_first', 'page_first', "
        "'page_first_direct' or 'page_first_kv_split'.\n"
    )


def test_a_bad_size_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's name stands once in front, and sizes that were not given are not blamed."""
    assert main([*EXPLAIN, "--layout", "page_head", "--dim", "-3"]) == 2
    assert (
        capsys.readouterr().err == "offload explain: kind 'mha': dim is -3, expected at least 1.\n"
    )


@pytest.mark.parametrize("command", ["check", "report", "timeline"])
def test_a_missing_file_is_told_in_one_wording(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads a trace ends the same way when there is no such file."""
    nothere = tmp_path / "nothere.json"
    assert main([command, str(nothere)]) == 2
    assert capsys.readouterr().err == f"offload {command}: {nothere}: no such file\n"
