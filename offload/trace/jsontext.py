"""Numbers, names and labels of any origin as the text of a trace event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

RESERVED: Final = frozenset(
    {
        "Ev Idx",
        "External id",
        "Rank",
        "Seq",
        "batchId",
        "batchSize",
        "bytes",
        "cbid",
        "context",
        "correlation",
        "device",
        "labels",
        "name",
        "queued",
        "sort_index",
        "stream",
    }
)
"""Keys of `args` that HTA or the format itself gives a meaning: an event with `stream` is a GPU kernel to HTA."""


def us(ns: int) -> str:
    """Return nanoseconds as the microseconds of a trace, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def quoted(value: str) -> str:
    """Return a string of any content as JSON. Not escaped to ASCII: Perfetto v52 shows such escapes as they are."""
    return json.dumps(value, ensure_ascii=False)


def arguments(values: Mapping[str, Any], prefix: str = "") -> str:
    """Return the inside of an `args` object from values of unknown origin: scalars, finite, no reserved key."""
    return ",".join(
        f"{quoted(_key(prefix + str(key)))}:{_scalar(value)}" for key, value in values.items()
    )


def _key(key: str) -> str:
    return key + "_" if key in RESERVED else key


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float) and value - value == 0.0:
        return json.dumps(value)
    return quoted(str(value))
