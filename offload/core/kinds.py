"""The words of a request: pool kinds, layouts, io backends and directions."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from offload.errors import UnknownNameError


class PoolKind(StrEnum):
    """What one layer of one page is made of."""

    MHA = "mha"
    """Keys and values per head: `k [T, H, D]`, `v [T, H, Dv]`."""

    MLA = "mla"
    """One latent row per token: `kv [T, 1, C]`."""

    ROWS = "rows"
    """One opaque row of bytes per page."""

    STATE = "state"
    """One opaque row per slot, in several components with dtypes of their own."""


class Layout(StrEnum):
    """Axis order of a host pool; `offload.core.layout` says what each means in bytes."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"
    PAGE_HEAD = "page_head"
    PAGE_FIRST_KV_SPLIT = "page_first_kv_split"


class IoBackend(StrEnum):
    """What moves the bytes."""

    DIRECT = "direct"
    """One plain copy per run."""

    MEMCPY_BATCH = "memcpy_batch"
    """One call of the driver's batched copy per layer."""

    KERNEL = "kernel"
    """One GPU kernel per layer that gathers or scatters runs."""

    STAGED = "staged"
    """Relayout on the device in staging memory, and copies of the host page's runs: long ones where it has those."""

    CPU = "cpu"
    """Indexed copies between host tensors."""

    KERNEL_ASCEND = "kernel_ascend"
    """The kernels of an Ascend NPU; needs a driver that someone else registers."""


class Direction(StrEnum):
    """Which way the bytes go."""

    LOAD = "load"
    """Host to device."""

    BACKUP = "backup"
    """Device to host."""


AUTO = "auto"
"""The io backend that stands for 'the first one that passes'; see `strategy.AUTO_ORDER`."""

Word = TypeVar("Word", bound=StrEnum)

_WHAT: dict[type[StrEnum], str] = {
    PoolKind: "kind",
    Layout: "layout",
    IoBackend: "io_backend",
    Direction: "direction",
}


def parse(words: type[Word], name: str, *, also: tuple[str, ...] = ()) -> Word:
    """Return the enum member that a caller's string names; members pass through.

    Args:
        also: Further names to list among the choices, such as "auto".

    Raises:
        UnknownNameError: No member has that name.
    """
    if isinstance(name, words):
        return name
    try:
        return words(name)
    except ValueError:
        what = _WHAT.get(words, words.__name__.lower())
        choices = (*also, *(str(word) for word in words))
        raise UnknownNameError(what, name, choices) from None
