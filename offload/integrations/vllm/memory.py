"""How much memory there is for host pools: the machine's, or what the cgroups around this process leave of it.

In a container the machine's is not ours: filling more than the cgroup's limit ends the process without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs

_ROOT = Path("/")


@attrs.frozen
class Memory:
    """A number of bytes, and who says so."""

    nbytes: int
    who: str
    """As the beginning of a sentence that ends in a size: `this machine has`."""


def memory(root: Path = _ROOT) -> Memory:
    """Return the smallest of what the machine has and of the limits of the cgroups that this process is in.

    Args:
        root: Where `proc` and `sys` are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [Memory(machine, "this machine has"), *_limits(root)]
    return min(found, key=lambda each: each.nbytes)


def _limits(root: Path) -> Iterator[Memory]:
    """Yield the limits of our cgroups and of those around them, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if number == "0" and not controllers:
            yield from _up(root / "sys/fs/cgroup", inside, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _up(root / "sys/fs/cgroup/memory", inside, "memory.limit_in_bytes")


def _up(base: Path, inside: str, name: str) -> Iterator[Memory]:
    """Yield the limits of a cgroup and of all around it. A container sees some of them, or only its own, at `base`."""
    steps = PurePosixPath(inside.lstrip("/"))
    if ".." in steps.parts:  # outside of what is mounted here
        steps = PurePosixPath()
    for each in (steps, *steps.parents):
        yield from _limit(base / each / name)


def _limit(path: Path) -> Iterator[Memory]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return
    if text.isdecimal():  # else `max`: none
        yield Memory(int(text), f"the limit of this container in {path} is")
