"""Which room may import which: the table of allowed edges, compared with what the files do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).parents[1] / "offload"

IMPURE = {"torch", "anyio", "asyncio", "trio", "time", "threading", "logging", "random"}
"""What core/ may not import: it decides, and effects happen elsewhere."""

OPTIONAL = {
    "transformers": {"integrations", "demo"},
    "triton": {"backend"},
    "cuda": {"driver", "backend"},
    "vllm": {"integrations"},
    "prometheus_client": {"metrics"},
    "opentelemetry": {"metrics"},
}
"""Third-party packages that only some rooms may import; the rest of the package works without them."""

# Inner rooms, and what each may import beside itself. A room stands below everything that it imports.
EDGES: dict[str, set[str]] = {
    "errors": {"core"},  # core.kinds alone: a test below
    "core": {"errors"},
    "arguments": {"errors"},
    "counters": set(),
    "logs": {"counters", "errors"},
    "registry": {"arguments", "core", "errors"},
    "spec": {"arguments", "core", "errors"},
    "pinned": {"driver", "errors", "logs"},
    "pool": {"arguments", "core", "errors", "pinned", "registry", "spec"},
    "verdict": {"arguments", "core", "errors", "registry", "spec"},
    "group": {"arguments", "core", "errors", "pool", "spec"},
    "groups": {"arguments", "core", "errors", "group", "pool", "spec"},
    "rules": {"arguments", "core", "errors"},
    "backend": {"core", "errors", "pool", "registry", "driver"},
    "driver": {"core", "errors"},
    "loop": {"driver", "errors"},
    "trace": {"arguments", "core", "counters", "errors"},
    "metrics": {"counters", "statistics", "trace"},
    "route": {"backend", "core", "errors", "group", "pool", "registry"},
}
SCHEDULER: set[str] = {
    *("flight", "transfer", "submit", "statistics", "holding", "parking", "timer", "threadface"),
    *(
        "scheduler",
        "layerwise",
        "opening",
        "blocking",
        "shell",
        "commands",
        "asked",
        "admission",
        "entry",
        "waits",
        "actions",
        "ledger",
        "ownership",
        "closing",
        "vacancy",
    ),
}
"""Pieces of the scheduler: they may import any inner room and each other."""

OUTER: set[str] = {"testing", "cli", "demo", "api", "__main__", "__init__"}
"""Doors: they may import everything."""


def room(path: Path) -> str:
    """Return the room of a file: its folder under offload/, or its own name up to the first `_`."""
    relative = path.relative_to(ROOT)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return relative.stem if relative.stem.startswith("__") else relative.stem.split("_")[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def target_room(name: str) -> str:
    """Return the room that a dotted name below `offload` belongs to."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    first = parts[1]
    if (ROOT / first).is_dir():
        return first
    if (ROOT / f"{first}.py").exists():
        return room(ROOT / f"{first}.py")
    return "__init__"


FILES = sorted(ROOT.rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_follow_the_table(path: Path) -> None:
    """Every import inside the package is an edge of the table."""
    here = room(path)
    if here == "integrations":
        return
    rooms = {**EDGES}
    rooms |= dict.fromkeys(SCHEDULER, EDGES.keys() | SCHEDULER)
    rooms |= dict.fromkeys(OUTER, EDGES.keys() | SCHEDULER | OUTER | {"integrations"})
    assert here in rooms, f"offload/{path.relative_to(ROOT)}: give its room edges in EDGES"
    allowed = rooms[here] | {here}
    wrong = [
        f"line {line}: {here} -> {target_room(name)} ({name})"
        for line, name in imports(path)
        if name.split(".")[0] == "offload" and target_room(name) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_optional_packages_stay_in_their_rooms(path: Path) -> None:
    """A package from an extra is imported only by the rooms that the extra is for."""
    wrong = [
        f"line {line}: {name}"
        for line, name in imports(path)
        if room(path) not in OPTIONAL.get(name.split(".")[0], {room(path)})
    ]
    assert wrong == []


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_core_is_pure(path: Path) -> None:
    """core/ imports no torch, no event loop, no clock, no threads and no logging."""
    wrong = [f"line {line}: {name}" for line, name in imports(path) if name.split(".")[0] in IMPURE]
    assert wrong == []


def test_errors_know_only_the_words_of_core() -> None:
    """Errors import core.kinds at most, so that core can raise them."""
    paths = [path for path in FILES if room(path) == "errors"]
    names = {name for path in paths for _, name in imports(path) if name.startswith("offload")}
    assert {
        name for name in names if not name.startswith(("offload.core.kinds", "offload.errors"))
    } == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "integrations").rglob("*.py")), ids=lambda path: path.stem
)
def test_integrations_use_public_names_only(path: Path) -> None:
    """An integration uses nothing but `offload.__all__`, so the public surface is enough for one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "offload"
    }
    for _, name in imports(path):
        parts = name.split(".")
        if parts[0] == "offload" and len(parts) > 1 and parts[1] != "integrations":
            used.add(parts[1])
    assert used <= set(offload.__all__)


def test_integrations_are_leaves() -> None:
    """No other room imports an integration, except the demo and the command line."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if room(path) not in {"integrations", "demo", "cli"}
        for line, name in imports(path)
        if name.startswith("offload.integrations")
    ]
    assert wrong == []


def test_public_names_exist_once() -> None:
    """`offload.__all__` has no duplicates, and every name in it exists."""
    assert len(offload.__all__) == len(set(offload.__all__))
    assert [name for name in offload.__all__ if not hasattr(offload, name)] == []


def test_public_names_come_when_they_are_used() -> None:
    """Names, modules and `*` are found in a fresh interpreter, and a misspelt name is an AttributeError."""
    code = (
        "import sys, offload\n"
        "assert 'torch' not in sys.modules\n"
        "offload.errors.OffloadError, offload.testing.SimDriver\n"
        "assert isinstance(offload.explain, type(lambda: 0))\n"
        "assert dir(offload) == sorted(offload.__all__)\n"
        "from offload import *\n"
        "assert DevicePool is offload.DevicePool\n"
        "for name in ('DevicePol', '__wrapped__'):\n"
        "    assert not hasattr(offload, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
