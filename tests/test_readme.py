"""The README tells the truth: its matrix is the table's, its Python runs, its paths exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def matrix() -> str:
    """Return what the command prints."""
    command = [sys.executable, "-m", "offload", "matrix"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    return run.stdout.strip()


def between_markers() -> str:
    """Return what stands between the two markers, without the code fence around it."""
    inside = README.split(BEGIN)[1].split(END)[0].strip()
    return inside.removeprefix("```text\n").removesuffix("```").strip()


def test_support_matrix_is_what_the_command_prints() -> None:
    """The matrix in the README equals the output of `python -m offload matrix` (`make readme`)."""
    assert between_markers() == matrix()


def told() -> dict[tuple[str, str, str, str], str]:
    """Return what the README says of each (kind, layout, io backend, direction): strategy or reason."""
    notes = dict(re.findall(r"^\[(\d+)\] (.*)$", between_markers(), re.MULTILINE))
    found: dict[tuple[str, str, str, str], str] = {}
    kind, ways, names = "", [""], [""]
    for line in between_markers().splitlines():
        if title := re.match(r"(\w+), ([\w ]+) \(", line):
            kind, ways = title[1], title[2].split(" and ")
        elif line.startswith("  "):
            layout, _, *cells = (str(each) for each in re.split(r" {2,}", line.strip()))
            if layout == "layout":
                names = cells
                continue
            for way in ways:
                for name, cell in zip(names, cells, strict=True):
                    found[kind, layout, name, way] = notes.get(cell.strip("[]"), cell.split()[0])
    return found


def test_support_matrix_is_what_the_json_says() -> None:
    """Cell by cell, strategies and reasons in the README are those of `matrix --json`."""
    command = [sys.executable, "-m", "offload", "matrix", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    cells = json.loads(run.stdout)
    said = {
        (cell["kind"], cell["layout"], cell["io_backend"], cell["direction"]): cell["strategy"]
        if cell["supported"]
        else cell["reason"]
        for cell in cells
    }
    assert len(said) == len(cells) == 240
    assert told() == said


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0][:40])
def test_python_block_runs(code: str, tmp_path: Path) -> None:
    """A Python block of the README runs as it stands, in a process of its own."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 0, run.stderr


def test_there_is_a_python_block() -> None:
    """The README shows at least one Python example."""
    assert BLOCKS


def test_paths_exist() -> None:
    """Every path that the README gives in its tree, or between backticks, is in the repository."""
    tree = README.split("<!-- tree: begin -->")[1].split("<!-- tree: end -->")[0]
    paths = re.findall(r"`((?:offload|tests|bench|examples)/[\w./]*)`", README)
    folder = ""
    for line in tree.splitlines():
        if found := re.match(r"(\w+/)", line):
            folder = found[1]
            paths.append(folder)
        elif found := re.match(r"  ([\w/]+(?:\.\w+)?)", line):
            paths.append(folder + found[1])
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("target", re.findall(r"`?make ([a-z]+)", README))
def test_make_targets_exist(target: str) -> None:
    """Every `make` target that the README names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


if __name__ == "__main__":
    before, rest = README.split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n```text\n{matrix()}\n```\n{END}{after}"
    (ROOT / "README.md").write_text(text, encoding="utf-8")
