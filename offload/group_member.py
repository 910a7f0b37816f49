"""One member of a group: a pair of pools with a name, a place among the model's layers and its own checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from offload.core.page_ids import Bounds, PagesLike, as_pages, as_pair, first_repeat
from offload.core.request import Pages, Part
from offload.errors import GeometryError, RequestError, shown
from offload.pool import DevicePool, HostPool

PageRule: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""From the pages of the member that is followed to this one's, for host and device pages alike."""

_FEW_IN_ALL = 8192
"""Pages of a pool up to which a fresh map of them is quicker than the scratch array."""

_FEW = 12
"""Pages up to which a set is quicker than the scratch array."""


@attrs.define(eq=False)
class Member:
    """A pair inside a group, with its place among the model's layers."""

    index: int
    name: str
    device: DevicePool
    host: HostPool
    rule: Literal["same", "own"] | PageRule

    pool_layers: tuple[int | None, ...]
    """By model layer, the pool's own layer; None where this member has none."""

    _scratch: dict[bool, Pages] = attrs.field(factory=dict)
    _bounds: Bounds = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._bounds = np.array([[self.host.num_pages], [self.device.num_pages]], np.uint64)

    def check(self, host_pages: PagesLike, device_pages: PagesLike, *, load: bool) -> Part:
        """Return checked page pairs, copied.

        Raises:
            RequestError: Lengths differ, a page is out of range, or a destination repeats.
        """
        pair = as_pair(host_pages, device_pages, self._bounds)
        if pair is None:
            host = as_pages(host_pages, self.host.num_pages, what="host page")
            device = as_pages(device_pages, self.device.num_pages, what="device page")
            if len(host) != len(device):
                raise RequestError.lengths(host_pages=len(host), device_pages=len(device))
        else:
            host, device = pair
        if len(host) > 1:
            target, source = (device, host) if load else (host, device)
            self._check_distinct(target, source, load=load)
        return self.index, host, device

    def share(self, part: Part) -> Part:
        """Return another member's checked page pairs as this one's: the very same arrays.

        Whoever plans the copy sees by that that one plan serves both.

        Raises:
            RequestError: This pool is smaller, and has no such page.
        """
        _, hosts, devices = part
        for what, pages, bound in (
            ("host page", hosts, self.host.num_pages),
            ("device page", devices, self.device.num_pages),
        ):
            if len(pages) and int(pages.max()) >= bound:
                as_pages(pages, bound, what=f"{self.name} {what}")
        return self.index, hosts, devices

    def holds(self, other: Member) -> bool:
        """Return whether every page that another member can name is one of this member's too."""
        return (
            self.host.num_pages >= other.host.num_pages
            and self.device.num_pages >= other.device.num_pages
        )

    def _check_distinct(self, target: Pages, source: Pages, *, load: bool) -> None:
        """Raise if a destination page appears twice."""
        if len(target) <= _FEW and len(set(target.tolist())) == len(target):
            return
        pool = self.device if load else self.host
        if pool.num_pages <= _FEW_IN_ALL:
            seen = np.zeros(pool.num_pages, np.bool_)
            seen[target] = True
            if np.count_nonzero(seen) == len(target):
                return
        with pool.pages.table.mutex:
            scratch = self._scratch.get(load)
            if scratch is None:
                scratch = self._scratch[load] = np.zeros(pool.num_pages, np.int64)
            first = first_repeat(target, scratch)
        if first is None:
            return
        page = int(target[first])
        again = first + 1 + int(np.flatnonzero(target[first + 1 :] == page)[0])
        raise RequestError.written_twice(
            "load" if load else "backup",
            page=page,
            sources=(int(source[first]), int(source[again])),
            position=again,
        )


def count_layers(layers: Sequence[int]) -> int:
    """Return how many layers a map has.

    Raises:
        GeometryError: It is no sequence of integers.
    """
    try:
        return len([index(layer) for layer in layers[:]])
    except TypeError:
        raise GeometryError(
            "layers= of a pair",
            expected={"layers": "a sequence of integers"},
            got={"layers": shown(layers)},
        ) from None


def by_model_layer(name: str, layers: Sequence[int], num_layers: int) -> tuple[int | None, ...]:
    """Return, by model layer, the pool layer that a member has for it.

    Raises:
        GeometryError: `layers` are not distinct layers of the model.
    """
    found: list[int | None] = [None] * num_layers
    for pool_layer, layer in enumerate(layers):
        if layer < 0 or found[layer] is not None:
            raise GeometryError(
                f"layers= of member {name!r}",
                expected={"layers": "distinct layers of the model, from 0"},
                got={"layers": list(layers)},
            )
        found[layer] = pool_layer
    return tuple(found)
