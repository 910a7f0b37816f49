"""How much memory host pools may take: cgroups of both versions around this process count, and the smallest is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from offload import RequestError
from offload.integrations.vllm.memory import Memory, memory
from offload.integrations.vllm.settings import GIB, Settings

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = str((1 << 63) - 4096)
"""What version 1 says where there is no limit."""


@attrs.frozen
class Case:
    """A process's cgroups, the files that it sees, and the one that counts."""

    cgroup: str
    files: Mapping[str, str]
    counts: str | None
    """None: the machine."""


CASES = {
    "no cgroups": Case("", {}, None),
    "version 2": Case("0::/a/b\n", {"a/b/memory.max": "4096\n"}, "a/b/memory.max"),
    "version 2, no limit": Case("0::/a/b\n", {"a/b/memory.max": "max\n"}, None),
    "version 2, the one around it": Case(
        "0::/a/b\n", {"a/b/memory.max": "8192\n", "a/memory.max": "4096\n"}, "a/memory.max"
    ),
    "version 2, seen from inside": Case("0::/\n", {"memory.max": "4096\n"}, "memory.max"),
    "version 2, a host's name for it": Case("0::/pod/x\n", {"memory.max": "4096\n"}, "memory.max"),
    "version 2, moved outside": Case("0::/../x\n", {"memory.max": "4096\n"}, "memory.max"),
    "version 1": Case(
        "3:cpu,cpuacct:/a\n5:memory:/a\n",
        {"memory/a/memory.limit_in_bytes": "4096\n", "memory.max": "12\n"},
        "memory/a/memory.limit_in_bytes",
    ),
    "version 1, no limit": Case(
        "5:memory:/a\n0::/a\n", {"memory/a/memory.limit_in_bytes": UNLIMITED}, None
    ),
    "version 1, seen from inside": Case(
        "5:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "4096"}, "memory/memory.limit_in_bytes"
    ),
    "more than the machine": Case("0::/\n", {"memory.max": str(MACHINE + 1)}, None),
}  # fmt: skip


def rooted(root: Path, case: Case) -> Path:
    """Write a case's files below a folder."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in case.files.items()}
    for name, text in (files | {"proc/self/cgroup": case.cgroup}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_limit_counts(tmp_path: Path, name: str) -> None:
    """A pod's limit is far below the machine, and filling more ends the process without a word."""
    case = CASES[name]
    found = memory(rooted(tmp_path, case))
    if case.counts is None:
        assert found == Memory(MACHINE, "this machine has")
    else:
        path = tmp_path / "sys/fs/cgroup" / case.counts
        assert found == Memory(4096, f"the limit of this container in {path} is")


def test_without_proc_the_machine_counts(tmp_path: Path) -> None:
    """What cannot be read limits nothing."""
    assert memory(tmp_path) == Memory(MACHINE, "this machine has")


def test_the_refusal_names_the_limit(tmp_path: Path) -> None:
    """An operator has to know which number to raise."""
    case = Case("0::/\n", {"memory.max": str(GIB)}, None)
    found = memory(rooted(tmp_path, case))
    with pytest.raises(RequestError, match=r"is 2\.0 GiB, and the limit .*memory\.max is 1\.0 GiB"):
        Settings.read({"host_gib": 2}).num_host_blocks(1 << 20, memory=found)
