"""Trace events -> a file, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from offload.errors import RequestError
from offload.trace import events
from offload.trace.timeline import Timeline

GZIP_LEVEL: Final = 3
"""65,536 records: level 3 takes a third of level 9's time for a tenth more bytes."""

LINES_PER_WRITE: Final = 512

_DESCRIPTORS: Final = "/proc/self/fd"
_NO_NAMELESS: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""How file systems and kernels without nameless files say so."""


def export(timeline: Timeline, path: Path) -> Path:
    """Write a timeline as a Chrome trace; `.json.gz` compressed, `.json` plain."""
    return write(path, pieces(timeline))


def write(path: Path, text: Iterable[str]) -> Path:
    """Write pieces of text to `path`, whole or not at all: a reader never sees half of it.

    Raises:
        RequestError: The suffix is neither `.json` nor `.json.gz`.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise RequestError(f"Cannot write {path}: a trace ends in .json or .json.gz.", value=path)
    with replacing(path) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as packed:
                _write_all(packed, text)
        else:
            _write_all(file, text)
    return path


def _write_all(file: IO[bytes] | gzip.GzipFile, text: Iterable[str]) -> None:
    iterator = iter(text)
    while chunk := list(islice(iterator, LINES_PER_WRITE)):
        file.write("".join(chunk).encode("utf-8", "replace"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block succeeds.

    It has no name until it is complete, so a process that is killed leaves nothing behind. Where the file
    system has no nameless files it has a temporary name, and a process that is killed leaves that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    nameless = _nameless(path.parent)
    try:
        with temporary.open("xb") if nameless is None else nameless as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if nameless is not None:
                _give_name(file.fileno(), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _nameless(folder: Path) -> IO[bytes] | None:
    """Return a new file of that folder's file system that no folder holds; None where there are none."""
    if not Path(_DESCRIPTORS).is_dir():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError as error:
        if error.errno in _NO_NAMELESS:
            return None
        raise


def _give_name(descriptor: int, path: Path) -> None:
    """Give a nameless file a name that nothing has yet."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Naming a folder makes Python follow the link, which otherwise would be what gets the name.
        os.link(f"{_DESCRIPTORS}/{descriptor}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def header(timeline: Timeline) -> str:
    """Return the file's opening, up to the events."""
    facts: dict[str, Any] = {
        "offload.schema": events.SCHEMA,
        "offload.t0_unix_ns": timeline.unix_ns(timeline.origin_ns),
        "offload.ring_full": int(timeline.dropped > 0),
        "offload.dropped": timeline.dropped,
        "offload.records": timeline.records,
        "offload.ready_waits": timeline.ready,
        "offload.unmeasured_waits": timeline.unmeasured,
        "offload.rank": timeline.rank,
        "offload.device": timeline.device,
    }
    return (
        f'{{"displayTimeUnit":"ns","schemaVersion":1,"distributedInfo":{{"rank": {timeline.rank}}},\n'
        f'"metadata":{json.dumps(facts)},\n"traceEvents":[\n'
    )


def pieces(timeline: Timeline) -> Iterable[str]:
    """Yield a whole trace file in pieces."""
    yield header(timeline)
    separator = ""
    for event in events.events(timeline):
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"
