"""The Triton kernels: rows of words from pages of one pool to pages of another, of one layer or of several.

A layer of a page is `COUNT_0 * COUNT_1 * COUNT_2` rows, nested, each of `WIDTH` words in one piece on both
sides. Rows of whole tokens have one such count (row copies), rows of one head two (head copies).

* Everything that is multiplied by a stride is 64 bits wide: pools pass 2**31 words. Arguments that grow with
  the pool are declared so, or a large one would be another variant, compiled in the middle of a load.
* A tile is `ROWS` rows by `BLOCK` words; what lies beyond either end is masked.
* Programs are few and take every so-manieth tile, so compute keeps its multiprocessors.
* Where a row starts is counted in units of `UNIT` words. With 2 the compiler sees, from the
  multiplication alone, that rows start on even words, and moves two words at once.
"""

# mypy: disable-error-code="untyped-decorator, attr-defined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    source,
    destination,
    source_pages,
    destination_pages,
    source_base,
    destination_base,
    tile,
    num_rows,
    SOURCE_PAGE: tl.constexpr,
    DESTINATION_PAGE: tl.constexpr,
    COUNT_0: tl.constexpr,
    COUNT_1: tl.constexpr,
    COUNT_2: tl.constexpr,
    SOURCE_0: tl.constexpr,
    SOURCE_1: tl.constexpr,
    SOURCE_2: tl.constexpr,
    DESTINATION_0: tl.constexpr,
    DESTINATION_1: tl.constexpr,
    DESTINATION_2: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one tile of a layer. Strides and bases are in units, widths in words."""
    across: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    per_page: tl.constexpr = COUNT_0 * COUNT_1 * COUNT_2
    row = tile // across * ROWS + tl.arange(0, ROWS).to(tl.int64)
    word = tile % across * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    index = row // per_page
    inner = row % per_page
    first = inner // (COUNT_1 * COUNT_2)
    second = inner // COUNT_2 % COUNT_1
    third = inner % COUNT_2
    start = (
        source_base
        + tl.load(source_pages + index, mask=live, other=0) * SOURCE_PAGE
        + first * SOURCE_0
        + second * SOURCE_1
        + third * SOURCE_2
    )
    end = (
        destination_base
        + tl.load(destination_pages + index, mask=live, other=0) * DESTINATION_PAGE
        + first * DESTINATION_0
        + second * DESTINATION_1
        + third * DESTINATION_2
    )
    mask = live[:, None] & (word < WIDTH)[None, :]
    moved = tl.load(source + (start * UNIT)[:, None] + word[None, :], mask=mask)
    tl.store(destination + (end * UNIT)[:, None] + word[None, :], moved, mask=mask)


@triton.jit(do_not_specialize=["num_pages", "source_base", "destination_base"])
def copy_rows(  # type: ignore[no-untyped-def]
    source,
    destination,
    source_pages,
    destination_pages,
    num_pages: tl.int64,
    source_base: tl.int64,
    destination_base: tl.int64,
    SOURCE_PAGE: tl.constexpr,
    DESTINATION_PAGE: tl.constexpr,
    COUNT_0: tl.constexpr,
    COUNT_1: tl.constexpr,
    COUNT_2: tl.constexpr,
    SOURCE_0: tl.constexpr,
    SOURCE_1: tl.constexpr,
    SOURCE_2: tl.constexpr,
    DESTINATION_0: tl.constexpr,
    DESTINATION_1: tl.constexpr,
    DESTINATION_2: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one layer of `num_pages` pages."""
    num_rows = num_pages.to(tl.int64) * (COUNT_0 * COUNT_1 * COUNT_2)
    num_tiles = (num_rows + ROWS - 1) // ROWS * ((WIDTH + BLOCK - 1) // BLOCK)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _copy_tile(
            source, destination, source_pages, destination_pages,
            source_base.to(tl.int64), destination_base.to(tl.int64), tile, num_rows,
            SOURCE_PAGE, DESTINATION_PAGE, COUNT_0, COUNT_1, COUNT_2,
            SOURCE_0, SOURCE_1, SOURCE_2, DESTINATION_0, DESTINATION_1, DESTINATION_2,
            WIDTH, UNIT, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "num_layers"])
def copy_layers(  # type: ignore[no-untyped-def]
    sources,
    destinations,
    source_pages,
    destination_pages,
    num_pages: tl.int64,
    num_layers: tl.int64,
    SOURCE_PAGE: tl.constexpr,
    DESTINATION_PAGE: tl.constexpr,
    COUNT_0: tl.constexpr,
    COUNT_1: tl.constexpr,
    COUNT_2: tl.constexpr,
    SOURCE_0: tl.constexpr,
    SOURCE_1: tl.constexpr,
    SOURCE_2: tl.constexpr,
    DESTINATION_0: tl.constexpr,
    DESTINATION_1: tl.constexpr,
    DESTINATION_2: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Copy `num_layers` layers of `num_pages` pages, one after the other.

    Args:
        sources, destinations: Where each layer begins: addresses, multiples of `ALIGNMENT` bytes.
    """
    num_rows = num_pages.to(tl.int64) * (COUNT_0 * COUNT_1 * COUNT_2)
    per_layer = (num_rows + ROWS - 1) // ROWS * ((WIDTH + BLOCK - 1) // BLOCK)
    for tile in range(tl.program_id(0), per_layer * num_layers, tl.num_programs(0)):
        layer = tile // per_layer
        source = tl.load(sources + layer).to(tl.pointer_type(WORD))
        destination = tl.load(destinations + layer).to(tl.pointer_type(WORD))
        _copy_tile(
            tl.multiple_of(source, ALIGNMENT), tl.multiple_of(destination, ALIGNMENT),
            source_pages, destination_pages, 0, 0, tile % per_layer, num_rows,
            SOURCE_PAGE, DESTINATION_PAGE, COUNT_0, COUNT_1, COUNT_2,
            SOURCE_0, SOURCE_1, SOURCE_2, DESTINATION_0, DESTINATION_1, DESTINATION_2,
            WIDTH, UNIT, ROWS, BLOCK,
        )  # fmt: skip


WORDS = {8: tl.int64, 4: tl.int32, 1: tl.uint8}
"""The kernels' words by bytes."""
