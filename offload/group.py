"""Which pools one request moves: pairs of device and host pools, and how they share pages and layers.

Everything inside works on a group; a single pair is a group of one member. The first member is the
anchor: the pages of a request are its pages. Other members follow the anchor, or a member before them,
by the same ids or by a rule; or they have pages of their own. Pages are made and checked once per rule,
whatever the number of members that share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from offload.arguments import distinct_names, expect, layer_number, refusal
from offload.core.hazards import HazardTable
from offload.core.kinds import Direction
from offload.core.page_ids import PagesLike, as_pages
from offload.core.pages import PageAllocator
from offload.core.request import Pages, Part
from offload.errors import GeometryError, RequestError, UnknownNameError, shown
from offload.group_member import Member, PageRule, by_model_layer
from offload.group_pages import GroupPages, PagePair, give_all, take_all
from offload.group_pair import Pair
from offload.group_sources import page_sources
from offload.pool import DevicePool, HostPool

__all__ = ["GroupPages", "Member", "PagePair", "PageRule", "Pair", "PoolGroup"]


class PoolGroup:
    """Pairs of pools that one request moves together.

    Layer `i` of a transfer has landed when every member that has a layer `i` has landed it.

    Args:
        layer_names: Names of the model's layers; every call that takes a layer takes either. The
            anchor's own names where it is not given and has one for each layer.
        members: By name; the first is the anchor.

    Raises:
        GeometryError: The pools of a pair differ, a layer map does not fit, or two members share a pool.
        UnknownNameError: A member follows one that does not stand before it.
    """

    def __init__(self, *, layer_names: Sequence[str] | None = None, **members: Pair) -> None:
        if not members:
            raise GeometryError("a group", expected={"pairs": "at least 1"}, got={"pairs": 0})
        _check_pairs(members)
        maps = {name: _layers(pair) for name, pair in members.items()}
        self.num_layers = 1 + max(max(layers) for layers in maps.values())
        self.members = tuple(
            Member(
                index,
                name,
                pair.device,
                pair.host,
                "same" if index == 0 else pair.pages,
                by_model_layer(name, maps[name], self.num_layers),
            )
            for index, (name, pair) in enumerate(members.items())
        )
        _check_apart(self.members)
        having = {layer for layers in maps.values() for layer in layers}
        self.holes = frozenset(range(self.num_layers)) - having
        """Layers of the model that no member has: nothing is copied for them."""
        self._page_bytes = [member.device.spec.page_bytes for member in self.members]
        self._sources = page_sources(
            self.members, {name: pair.follows for name, pair in members.items()}
        )
        self._own = {m.name: m for m in self.members if m.rule == "own"}
        anchor = self.members[0].device.spec.layer_names
        if layer_names is None and anchor and len(anchor) == self.num_layers:
            layer_names = anchor
        self.layer_names = (
            () if layer_names is None else distinct_names("a group", layer_names, self.num_layers)
        )
        self._index = {name: index for index, name in enumerate(self.layer_names)}

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        return f"<{type(self).__name__} {names}: {self.num_layers} layers>"

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
                raise UnknownNameError.layer(layer, self.layer_names, num_layers=self.num_layers)
            return index
        return layer_number(layer, self.num_layers)

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
        if members is None and len(self.members) == 1:
            return (self.members[0].check(host_pages, device_pages, load=load),)
        own = self._checked_own({} if members is None else members)
        anchor = PagePair(host_pages=host_pages, device_pages=device_pages)
        named = {self.anchor.name: anchor, **own}
        made: list[Part] = []
        parts: list[Part | None] = [None] * len(self.members)
        for source in self._sources:
            part = source.make(named, made, load=load)
            made.append(part)
            source.spread(part, parts)
        return tuple(part for part in parts if part is not None)

    def nbytes(self, parts: Sequence[Part]) -> int:
        """Return the bytes that these page pairs move over all layers."""
        each = self._page_bytes
        if len(parts) == 1:
            member, hosts, _ = parts[0]
            return len(hosts) * each[member]
        return sum(len(hosts) * each[member] for member, hosts, _ in parts)

    def places(
        self,
        device_pages: PagesLike,
        host_pages: PagesLike,
        members: Mapping[str, PagePair] | None = None,
    ) -> list[tuple[HazardTable, Pages]]:
        """Return checked copies of pages of the anchor and of members with their own, each with its table.

        Members that follow are not looked at: a request lets go of their pages with those that they follow.

        Raises:
            RequestError: A page is out of range.
            UnknownNameError: `members` names one that takes no pages of its own.
        """
        own = self._checked_own({} if members is None else members)
        found = []
        anchor = PagePair(host_pages=host_pages, device_pages=device_pages)
        for name, pair in {self.anchor.name: anchor, **own}.items():
            member = self._own.get(name, self.anchor)
            for pool, pages, what in (
                (member.device, pair.device_pages, "device page"),
                (member.host, pair.host_pages, "host page"),
            ):
                checked = as_pages(pages, pool.num_pages, what=what)
                if len(checked):
                    found.append((pool.pages.table, checked))
        return found

    def alloc(
        self,
        side: Literal["host", "device"],
        n: int,
        members: Mapping[str, int] | None = None,
        *,
        contiguous: bool = False,
    ) -> GroupPages:
        """Take pages on one side of every member, all or nothing.

        Args:
            n: Pages of the anchor. Members that follow it use the same ids, and take none.
            members: How many pages of each member that has its own; one that is left out takes none.
            contiguous: In each pool, only ids `p, p + 1, ...` will do.

        Raises:
            OutOfPagesError: A pool has too few; names its member. No page was taken.
            UnknownNameError: `members` names one that has no pages of its own.
        """
        _check_side(side)
        counts = {} if members is None else members
        if not isinstance(counts, Mapping):
            raise refusal(
                "alloc", "members", counts, "a mapping of names to numbers of pages, or None"
            )
        self._check_own(counts)
        names = [self.anchor.name, *self._own]
        numbers = [n, *(counts.get(name, 0) for name in self._own)]
        anchor, *own = take_all(
            [
                (name, self._allocator(side, name), number)
                for name, number in zip(names, numbers, strict=True)
            ],
            contiguous=contiguous,
        )
        return GroupPages(anchor, dict(zip(self._own, own, strict=True)))

    def free(self, side: Literal["host", "device"], pages: GroupPages) -> None:
        """Give back pages of every member, all or nothing; locked ones are handed out after their unlock.

        Raises:
            RequestError: A page is not allocated, or is given twice. No page was freed.
            UnknownNameError: `pages` names a member that has none of its own.
        """
        _check_side(side)
        expect("free", "pages", pages, GroupPages, "the GroupPages that alloc returned")
        self._check_own(pages.own)
        named = {self.anchor.name: pages.anchor, **pages.own}
        give_all([(self._allocator(side, name), ids) for name, ids in named.items()])

    def _allocator(self, side: Literal["host", "device"], name: str) -> PageAllocator:
        member = self._own.get(name, self.anchor)
        return (member.host if side == "host" else member.device).pages

    def _check_own(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._own:
                none = "The group has no member with pages of its own."
                raise UnknownNameError("member", name, sorted(self._own), without=none)

    def _checked_own(self, members: object) -> Mapping[str, PagePair]:
        """Return a request's `members=`, once it has the form and the names that it should."""
        form = "members={'name': offload.PagePair(host_pages=[...], device_pages=[...])}"
        if not isinstance(members, Mapping):
            raise RequestError(f"members is {type(members).__name__} {members!r}. Pass {form}.")
        self._check_own(members)
        for name, pair in members.items():
            if not isinstance(pair, PagePair):
                raise RequestError(
                    f"the pages of member {name!r} are {type(pair).__name__} {pair!r}, which does not say "
                    f"which side is which. Pass {form}.",
                    value=pair,
                )
        return members


def _check_side(side: object) -> None:
    """Refuse a side that is none, where the other one would be taken for it."""
    if side not in ("host", "device"):
        raise UnknownNameError("side", side, ["host", "device"])


def _check_pairs(members: Mapping[str, Pair]) -> None:
    """Refuse what is no pair, and an anchor whose pages would be those of another member."""
    given: Mapping[str, object] = members
    for name, pair in given.items():
        if not isinstance(pair, Pair):
            raise RequestError(
                f"member {name!r} of a group is {shown(pair)}; it takes a Pair(device, host)."
            )
    anchor, pair = next(iter(members.items()))
    if callable(pair.pages) or pair.follows is not None:
        raise RequestError(
            f"member {anchor!r} stands first, so requests name its pages: it follows nobody. Leave out "
            "its pages= and follows=, or let it stand behind the member that it follows."
        )


def _check_apart(members: Sequence[Member]) -> None:
    """Refuse a pool that two members share: copies of one layer may go in any order."""
    names: dict[DevicePool | HostPool, str] = {}
    for member in members:
        for pool in (member.device, member.host):
            other = names.setdefault(pool, member.name)
            if other != member.name:
                raise GeometryError(
                    f"members {other!r} and {member.name!r} of a group",
                    expected={"pools": "each in one member"},
                    got={"pools": f"{pool!r} in both"},
                )


def _layers(pair: Pair) -> list[int]:
    return list(range(pair.device.num_layers) if pair.layers is None else pair.layers)
