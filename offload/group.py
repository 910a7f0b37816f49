"""Which pools one request moves: pairs of device and host pools, and how they share pages and layers.

Everything inside works on a group; a single pair is a group of one member. The first member is the
anchor: the pages of a request are its pages. Other members follow the anchor's pages, by the same ids or
by a rule, or have pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from offload.core.kinds import Direction
from offload.core.pages import PagesLike, as_pages, first_repeat
from offload.core.request import Pages, Part
from offload.errors import GeometryError, RequestError, UnknownNameError
from offload.pool import DevicePool, HostPool, check_pair

PageRule: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""From the anchor's pages to a member's, for host and device pages alike."""


@attrs.frozen(eq=False)
class Pair:
    """A device pool and the host pool that backs it."""

    device: DevicePool
    host: HostPool

    pages: Literal["same", "own"] | PageRule = attrs.field(default="same", kw_only=True)
    """Whose pages it moves: the anchor's ids, its own (given with each request), or a rule's."""

    layers: Sequence[int] | None = attrs.field(default=None, kw_only=True)
    """The model layer of each of its pool layers; None is 0, 1, 2, ..."""

    def __attrs_post_init__(self) -> None:
        check_pair(self.device, self.host)
        if self.layers is not None and len(self.layers) != self.device.num_layers:
            raise GeometryError(
                "layers= of a pair",
                expected={"layers": self.device.num_layers},
                got={"layers": len(self.layers)},
            )


@attrs.frozen(eq=False)
class PagePair:
    """The pages of one member that has its own."""

    host_pages: PagesLike
    device_pages: PagesLike


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

    def check(self, host_pages: PagesLike, device_pages: PagesLike, *, load: bool) -> Part:
        """Return checked page pairs, copied.

        Raises:
            RequestError: Lengths differ, a page is out of range, or a destination repeats.
        """
        host = as_pages(host_pages, self.host.num_pages, what="host page")
        device = as_pages(device_pages, self.device.num_pages, what="device page")
        if len(host) != len(device):
            raise RequestError.lengths(host_pages=len(host), device_pages=len(device))
        if len(host) > 1:
            target, source = (device, host) if load else (host, device)
            self._check_distinct(target, source, load=load)
        return Part(self.index, host, device)

    def _check_distinct(self, target: Pages, source: Pages, *, load: bool) -> None:
        """Raise if a destination page appears twice."""
        if len(target) <= _FEW and len(set(target.tolist())) == len(target):
            return
        pool = self.device if load else self.host
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


_FEW = 12
"""Pages up to which a set is quicker than the scratch array."""


class PoolGroup:
    """Pairs of pools that one request moves together.

    Layer `i` of a transfer has landed when every member that has a layer `i` has landed it. Members with
    `pages="same"`, or a rule, follow the first one, the anchor.

    Args:
        layer_names: Names of the model's layers; every call that takes a layer takes either. The
            anchor's own names where it is not given and has one for each layer.
        members: By name; the first is the anchor.

    Raises:
        GeometryError: The pools of a pair differ, or a layer map does not fit.
    """

    def __init__(self, *, layer_names: Sequence[str] | None = None, **members: Pair) -> None:
        if not members:
            raise GeometryError("a group", expected={"pairs": "at least 1"}, got={"pairs": 0})
        maps = {name: _layers(pair) for name, pair in members.items()}
        self.num_layers = 1 + max(max(layers) for layers in maps.values())
        self.members = tuple(
            Member(
                index,
                name,
                pair.device,
                pair.host,
                "same" if index == 0 else pair.pages,
                tuple(_inverse(name, maps[name], self.num_layers)),
            )
            for index, (name, pair) in enumerate(members.items())
        )
        self._own = {m.name for m in self.members if m.rule == "own"}
        anchor = self.members[0].device.spec.layer_names
        if layer_names is None and anchor and len(anchor) == self.num_layers:
            layer_names = anchor
        self.layer_names = tuple(layer_names) if layer_names else ()
        self._index = {name: index for index, name in enumerate(self.layer_names)}

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        return f"<PoolGroup {names}: {self.num_layers} layers>"

    @property
    def anchor(self) -> Member:
        """The member whose pages a request names."""
        return self.members[0]

    def layer(self, layer: int | str) -> int:
        """Return a layer's index.

        Raises:
            UnknownNameError: No layer has this name.
            RequestError: The index is out of range.
        """
        if isinstance(layer, str):
            index = self._index.get(layer)
            if index is None:
                raise UnknownNameError("layer", layer, self.layer_names)
            return index
        if not 0 <= layer < self.num_layers:
            raise RequestError.out_of_range(
                "layer", value=int(layer), position=0, bound=self.num_layers
            )
        return int(layer)

    def parts(
        self,
        direction: Direction,
        host_pages: PagesLike,
        device_pages: PagesLike,
        members: Mapping[str, PagePair] | None = None,
    ) -> tuple[Part, ...]:
        """Return the checked page pairs of every member.

        Raises:
            RequestError: Pages out of range, lengths that differ, repeated destinations, or a member
                with pages of its own that got none.
            UnknownNameError: `members` names one that takes no pages of its own.
        """
        load = direction is Direction.LOAD
        first = self.members[0].check(host_pages, device_pages, load=load)
        if len(self.members) == 1 and not members:
            return (first,)
        own = members or {}
        for name in own:
            if name not in self._own:
                raise UnknownNameError("member with pages of its own", name, sorted(self._own))
        rest = (_follow(member, first, own, load=load) for member in self.members[1:])
        return (first, *rest)

    def nbytes(self, parts: Sequence[Part]) -> int:
        """Return the bytes that these page pairs move over all layers."""
        members = self.members
        return sum(
            len(part.host_pages) * members[part.member].device.spec.page_bytes for part in parts
        )


def _follow(member: Member, anchor: Part, own: Mapping[str, PagePair], *, load: bool) -> Part:
    """Return a member's page pairs: the anchor's, a rule's, or its own."""
    if member.rule == "same":
        for what, pages, pool in (
            ("host page", anchor.host_pages, member.host),
            ("device page", anchor.device_pages, member.device),
        ):
            if len(pages) and int(pages.max()) >= pool.num_pages:
                as_pages(pages, pool.num_pages, what=f"{member.name} {what}")
        # The very same arrays: whoever plans the copy sees that one plan serves both.
        return Part(member.index, anchor.host_pages, anchor.device_pages)
    if not isinstance(member.rule, str):
        return member.check(
            member.rule(anchor.host_pages), member.rule(anchor.device_pages), load=load
        )
    pair = own.get(member.name)
    if pair is None:
        raise RequestError(
            f"member {member.name!r} has pages of its own and got none. Pass "
            f"members={{{member.name!r}: PagePair(host_pages=..., device_pages=...)}}."
        )
    return member.check(pair.host_pages, pair.device_pages, load=load)


def _layers(pair: Pair) -> list[int]:
    return list(range(pair.device.num_layers) if pair.layers is None else pair.layers)


def _inverse(name: str, layers: Sequence[int], num_layers: int) -> list[int | None]:
    found: list[int | None] = [None] * num_layers
    for pool_layer, layer in enumerate(layers):
        if layer < 0 or found[layer] is not None:
            raise GeometryError(
                f"layers= of member {name!r}",
                expected={"layers": "distinct layers of the model, from 0"},
                got={"layers": list(layers)},
            )
        found[layer] = pool_layer
    return found
