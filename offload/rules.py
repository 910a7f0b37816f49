"""Page rules: how a member of a group makes its pages of those that it follows.

A rule is applied to host and to device pages alike, so row `i` of one side still goes to row `i` of the
other. It is applied once per request, however many members share it: rules that are equal are one rule.
"""

from __future__ import annotations

import attrs
import numpy as np

from offload.arguments import positive
from offload.core.request import Pages
from offload.core.slots import pages_from_slots
from offload.errors import GeometryError


@attrs.frozen
class Trailing:
    """The last `count` pages; all of them where there are fewer. See `trailing`."""

    count: int

    def __call__(self, pages: Pages) -> Pages:
        """Return a member's pages."""
        return pages[-self.count :]


@attrs.frozen
class Spread:
    """`count` pages for each: page `p` becomes `count * p` and the `count - 1` after it. See `ratio`."""

    count: int

    def __call__(self, pages: Pages) -> Pages:
        """Return a member's pages."""
        return (pages[:, None] * self.count + np.arange(self.count)).ravel()


@attrs.frozen
class Gathered:
    """One page for each `count`, which must be whole and in order. See `ratio`."""

    count: int

    def __call__(self, pages: Pages) -> Pages:
        """Return a member's pages.

        Raises:
            RequestError: Pages that share a member's page are not all there, in ascending order.
        """
        return pages_from_slots(pages, self.count)


def trailing(count: int) -> Trailing:
    """Return the rule of a window: the last `count` pages of a request.

    Raises:
        GeometryError: `count` is not positive.
    """
    positive("rules.trailing", count=count)
    return Trailing(count)


def ratio(pages: int, *, per: int = 1) -> Spread | Gathered:
    """Return the rule of pools whose pages hold more, or fewer, tokens than those that they follow.

    Args:
        pages: Pages of the member ...
        per: ... for so many pages of what it follows. One of the two is 1.

    Raises:
        GeometryError: A number is not positive, or both are larger than 1.

    Example:
        >>> ratio(2)(np.array([3, 5]))
        array([ 6,  7, 10, 11])
        >>> ratio(1, per=2)(np.array([6, 7, 10, 11]))
        array([3, 5])
    """
    positive("rules.ratio", pages=pages, per=per)
    if pages > 1 and per > 1:
        raise GeometryError(
            "rules.ratio", expected={"pages or per": 1}, got={"pages or per": (pages, per)}
        )
    return Gathered(per) if per > 1 else Spread(pages)
