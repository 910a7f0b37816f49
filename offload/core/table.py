"""The strategy table: which copy a (kind, layout, io backend, direction) gets, or why it gets none.

`TABLE` is total. A cell is a strategy or a rejection; a rejection is a layout without meaning for the kind,
or a driver that is missing. What depends on sizes is in `checks`, and `strategy` looks both up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product

import attrs

from offload.core.kinds import Direction, IoBackend, Layout, PoolKind


class Strategy(StrEnum):
    """How a pair is copied."""

    PAGE_RUNS = "page_runs"
    """One copy per maximal run of pages that are adjacent on both sides."""

    TOKEN_RUNS = "token_runs"
    """One copy per token row of a page, or fewer where rows lie together."""

    ROW_KERNEL = "row_kernel"
    """A GPU kernel gathers or scatters whole token rows."""

    HEAD_KERNEL = "head_kernel"
    """A GPU kernel gathers or scatters one head of a token row."""

    STAGED_ROWS = "staged_rows"
    """Rows are put in the host's order in staging memory on the device; over the link go the host page's runs."""

    STAGED_HEADS = "staged_heads"
    """The same, one head of a row at a time."""

    INDEX_COPY = "index_copy"
    """Indexed copies between host tensors."""


@attrs.frozen
class Rejection:
    """Why a pair is not copied."""

    reason: str
    """One sentence without its full stop."""

    error: Exception | None = attrs.field(default=None, eq=False, repr=False)
    """What was raised where a verdict was asked for."""


Cell = Strategy | Rejection

BUILT = frozenset(IoBackend) - {IoBackend.KERNEL_ASCEND}
"""The columns that this library runs by itself; the other waits for a driver."""

PAGE_RUNS = Strategy.PAGE_RUNS
TOKEN_RUNS = Strategy.TOKEN_RUNS
ROW_KERNEL = Strategy.ROW_KERNEL
HEAD_KERNEL = Strategy.HEAD_KERNEL
STAGED_ROWS = Strategy.STAGED_ROWS
STAGED_HEAD = Strategy.STAGED_HEADS
INDEX_COPY = Strategy.INDEX_COPY
NO_ASCEND = Rejection("it needs an Ascend driver, and none is registered")
NO_HEADS_ = Rejection("page_head splits token rows by head, and an mla row has no heads")
NO_HEAD_R = Rejection("page_head splits token rows by head, and an opaque row has no heads")
NO_PIECES = Rejection(
    "page_first_kv_split stores pieces of a row apart, and an opaque row has none"
)

Row = tuple[Cell, ...]

# fmt: off
_MHA: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (PAGE_RUNS, TOKEN_RUNS, HEAD_KERNEL, STAGED_HEAD, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_KV_SPLIT: (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
}
_MLA: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (NO_HEADS_, NO_HEADS_,  NO_HEADS_,   NO_HEADS_,   NO_HEADS_,  NO_HEADS_),
    Layout.PAGE_FIRST_KV_SPLIT: (PAGE_RUNS, TOKEN_RUNS, ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
}
_OPAQUE: Mapping[Layout, Row] = {
    #                            direct     memcpy_batch kernel       staged       cpu         kernel_ascend
    Layout.LAYER_FIRST:         (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST:          (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_FIRST_DIRECT:   (PAGE_RUNS, PAGE_RUNS,  ROW_KERNEL,  STAGED_ROWS, INDEX_COPY, NO_ASCEND),
    Layout.PAGE_HEAD:           (NO_HEAD_R, NO_HEAD_R,  NO_HEAD_R,   NO_HEAD_R,   NO_HEAD_R,  NO_HEAD_R),
    Layout.PAGE_FIRST_KV_SPLIT: (NO_PIECES, NO_PIECES,  NO_PIECES,   NO_PIECES,   NO_PIECES,  NO_PIECES),
}
# fmt: on

# Both directions of a kind take the same copies, with source and destination exchanged.
_MATRICES: Mapping[tuple[PoolKind, Direction], Mapping[Layout, Row]] = {
    (PoolKind.MHA, Direction.LOAD): _MHA,
    (PoolKind.MHA, Direction.BACKUP): _MHA,
    (PoolKind.MLA, Direction.LOAD): _MLA,
    (PoolKind.MLA, Direction.BACKUP): _MLA,
    (PoolKind.ROWS, Direction.LOAD): _OPAQUE,
    (PoolKind.ROWS, Direction.BACKUP): _OPAQUE,
    (PoolKind.STATE, Direction.LOAD): _OPAQUE,
    (PoolKind.STATE, Direction.BACKUP): _OPAQUE,
}
_COLUMNS = {
    io_backend: index
    for index, io_backend in enumerate(
        (
            IoBackend.DIRECT,
            IoBackend.MEMCPY_BATCH,
            IoBackend.KERNEL,
            IoBackend.STAGED,
            IoBackend.CPU,
            IoBackend.KERNEL_ASCEND,
        )
    )
}

Key = tuple[PoolKind, Layout, IoBackend, Direction]


TABLE: Mapping[Key, Cell] = {
    (kind, layout, io_backend, direction): _MATRICES[kind, direction][layout][column]
    for kind, layout, direction in product(PoolKind, Layout, Direction)
    for io_backend, column in _COLUMNS.items()
}
"""Every (kind, layout, io backend, direction)."""
