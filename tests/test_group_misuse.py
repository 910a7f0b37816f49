"""Groups that were put together wrongly, and page rules that misbehave: told at once, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import offload
from offload import Direction, Pair, PoolGroup
from offload.core.request import Pages
from offload.errors import GeometryError, RequestError, UnknownNameError
from tests.test_groups import HOST, KV, pool


def pair(**how: object) -> Pair:
    """Return a pair of pools."""
    return Pair.backed(pool(KV), HOST, **how)  # type: ignore[arg-type]


def shifted(pages: Pages) -> Pages:
    """Make the next page of each, in place."""
    pages += 1
    return pages


@pytest.mark.parametrize("direction", Direction)
def test_a_rule_that_works_in_place_leaves_the_anchors_pages_alone(direction: Direction) -> None:
    """What a rule takes was checked before: it gets copies, or it could name pages that no pool has."""
    group = PoolGroup(kv=pair(), next=pair(pages=shifted), last=pair(pages=shifted, follows="next"))
    parts = group.parts(direction, [3, 5], np.array([1, 4]))
    assert [(hosts.tolist(), devices.tolist()) for _, hosts, devices in parts] == [
        ([3, 5], [1, 4]),
        ([4, 6], [2, 5]),
        ([5, 7], [3, 6]),
    ]


RULES: dict[str, Callable[[Pages], object]] = {
    "numbers with a point": lambda pages: pages / 2,
    "nothing": lambda pages: None,
    "pages that no pool has": lambda pages: pages + 1000,
    "pages below zero": lambda pages: -1 - pages,
    "one page for all": lambda pages: pages * 0,
    "other numbers of pages": lambda pages: pages[: pages[0]],
    "a table": lambda pages: pages[:, None],
    "truth values": lambda pages: pages > 0,
}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_made_wrong_is_told_with_its_member(rule: str) -> None:
    """The caller named good pages: the error is about the rule's, and names the member."""
    group = PoolGroup(kv=pair(), other=pair(pages=RULES[rule]))
    with offload.start_scheduler(group) as scheduler:
        with pytest.raises(RequestError, match="the page rule of member 'other': "):
            scheduler.load(host_pages=[1, 2], device_pages=[2, 3])
        assert scheduler.statistics().load.submitted == 0


def test_pages_of_a_members_own_are_told_with_its_name() -> None:
    """A page that is out of range says whose it is."""
    group = PoolGroup(kv=pair(), other=pair(pages="own"))
    with pytest.raises(RequestError, match="member 'other': host page 99 at position 0 is out of"):
        group.parts(
            Direction.LOAD, [0], [0], {"other": offload.PagePair(host_pages=[99], device_pages=[0])}
        )


@pytest.mark.parametrize("pages", ["smae", "trailing", None, 3])
def test_a_misspelt_page_rule_is_refused_where_it_stands(pages: object) -> None:
    """Not at the first request, and not by a failed assertion."""
    with pytest.raises(UnknownNameError, match="Choices: 'same', 'own'"):
        pair(pages=pages)


def test_an_anchor_follows_nobody() -> None:
    """A rule for the first member would be ignored: requests name its pages."""
    for how in ({"pages": shifted}, {"follows": "other"}):
        with pytest.raises(RequestError, match="'kv' stands first"):
            PoolGroup(kv=pair(**how), other=pair())


@pytest.mark.parametrize("layers", [(0.0, 1.0, 2.0), ("a", "b", "c"), 3, iter([0, 1, 2])])
def test_layer_maps_are_sequences_of_integers(layers: Sequence[int]) -> None:
    """Anything else is told as a geometry, not by whatever Python raises."""
    with pytest.raises(GeometryError, match="a sequence of integers"):
        pair(layers=layers)


@pytest.mark.parametrize("names", [["a"], list("abcd"), ["a", "b", "b"]])
def test_there_is_one_name_for_each_layer(names: list[str]) -> None:
    """A name too many would stand for a layer that is not there."""
    with pytest.raises(GeometryError, match="3 distinct names"):
        PoolGroup(layer_names=names, kv=pair())


@pytest.mark.parametrize("layer", [0.5, None, b"0", [0], float("nan")])
def test_a_layer_is_an_integer_or_a_name(layer: object) -> None:
    """Half a layer is not the one below it."""
    for layer_index in (PoolGroup(kv=pair()).layer, KV.layer_index):
        with pytest.raises(RequestError, match="it takes an index or a name"):
            layer_index(layer)  # type: ignore[arg-type]


def test_a_group_is_made_of_pairs() -> None:
    """A pool where a pair belongs is told by the member's name."""
    with pytest.raises(RequestError, match="'kv' of a group is a DevicePool; it takes a Pair"):
        PoolGroup(kv=pool(KV))  # type: ignore[arg-type]
