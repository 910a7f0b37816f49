"""Token slots to pages: engines count slots, transfers move whole pages."""

from __future__ import annotations

import numpy as np

from offload.core.hazards import Pages
from offload.core.page_ids import MAX_PAGES, PagesLike, as_pages
from offload.errors import GeometryError, RequestError


def pages_from_slots(slots: PagesLike, page_size: int, *, num_pages: int | None = None) -> Pages:
    """Return the pages that token slots fill, in the order of the slots.

    Slot `s` is token `s % page_size` of page `s // page_size`. Every page must be named whole, by its
    slots in ascending order; the pages themselves may come in any order.

    Args:
        slots: Integers in a list, range, numpy array or host tensor.
        num_pages: Of the pool, where it is known: slots beyond it are refused here already.

    Raises:
        RequestError: A slot is out of range, a page starts in its middle, misses a slot or has its
            slots in another order. Names the first bad slot and its position.

    Example:
        >>> pages_from_slots([8, 9, 10, 11, 0, 1, 2, 3], page_size=4)
        array([2, 0])
    """
    if page_size < 1:
        raise GeometryError(
            "pages_from_slots", expected={"page_size": "at least 1"}, got={"page_size": page_size}
        )
    bound = (MAX_PAGES if num_pages is None else num_pages) * page_size
    array = as_pages(slots, bound, what="slot")
    inside = np.arange(len(array)) % page_size
    starts = np.repeat(array[::page_size], page_size)[: len(array)]
    wrong = array != starts - starts % page_size + inside
    if wrong.any():
        raise _misplaced(array, int(np.flatnonzero(wrong)[0]), page_size)
    if len(array) % page_size:
        raise _torn(array, page_size)
    return array[::page_size] // page_size


def _misplaced(array: Pages, position: int, page_size: int) -> RequestError:
    slot = int(array[position])
    # 1 the first slot of a page is not its first token, 2 a later slot does not follow the one before.
    if position % page_size == 0:
        why = f"starts a page, but is token {slot % page_size} of page {slot // page_size}"
    else:
        before = int(array[position - 1])
        why = f"follows slot {before}, so page {before // page_size} is torn or out of order"
    return RequestError(
        f"slot {slot} at position {position} {why}. "
        f"Pass whole pages of {page_size} slots, each in ascending order.",
        value=slot,
        position=position,
    )


def _torn(array: Pages, page_size: int) -> RequestError:
    position = len(array) - len(array) % page_size
    slot = int(array[position])
    return RequestError(
        f"slot {slot} at position {position} starts page {slot // page_size}, of which only "
        f"{len(array) - position} of {page_size} slots are given. Pass whole pages.",
        value=slot,
        position=position,
    )
