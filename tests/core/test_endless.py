"""Waits that could never end are found, and quickly."""

from __future__ import annotations

import numpy as np
import pytest

from offload.core.batch import Piece
from offload.core.claims import Claims
from offload.core.hazards import HazardTable
from offload.core.kinds import Direction
from offload.core.machine import Machine
from offload.core.request import Request
from offload.errors import RequestError
from tests.core.test_machine import Rig


def ladder(rig: Rig) -> list[int]:
    """Queue pairs that each follow both of the pair before, from a streaming backup of device page 0 on.

    Returns:
        The host pages of the last backups. There are dozens of ways from there to the first.
    """
    rig.backup([0], [0], streaming=True)
    rig.load([0], [1])
    rig.load([0], [2])
    host, device = [1, 2], [1, 2]
    for level in range(3):
        first = 3 + 4 * level
        host = list(range(first, first + 4))
        rig.backup(device, host[:2])
        rig.backup(device, host[2:])
        device = host
        rig.load(host[::2], device[:2])
        rig.load(host[1::2], device[2:])
        device = device[::2]
    return host


@pytest.mark.parametrize("page", [19, 0])
def test_who_is_ahead_is_looked_at_once(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ways lead to a streaming backup, its layers are asked once whom they will follow."""
    rig = Rig()
    top = ladder(rig)
    asked: list[int] = []
    ahead_of_layers = Claims.ahead_of_layers

    def counted(claims: Claims, stream: Piece) -> set[int]:
        asked.append(stream.id)
        return ahead_of_layers(claims, stream)

    monkeypatch.setattr(Claims, "ahead_of_layers", counted)
    load = rig.request(Direction.LOAD, top[:1], [page])
    if page == 0:
        with pytest.raises(RequestError, match="load writes device page 0, and waits for"):
            rig.do(load)
    else:
        rig.submit(load)
    assert asked == [1]


def of_group(
    number: int,
    direction: Direction,
    *members: tuple[int, int, int],
    streaming: bool = False,
) -> Request:
    """Return a request of one page per member, as (member, host page, device page)."""
    parts = tuple(
        (member, np.array([host]), np.array([device])) for member, host, device in members
    )
    return Request(number, direction, parts, "r", 1, len(parts), 0.0, streaming=streaming)


@pytest.mark.parametrize(("member", "page"), [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_only_pages_of_the_same_member_are_shared(member: int, page: int) -> None:
    """Page 2 of one member is not page 2 of another: a load is refused for the very page alone."""
    machine = Machine(3, [(HazardTable(4), HazardTable(4)) for _ in range(2)])
    awaited = of_group(1, Direction.BACKUP, (0, 0, 2), (1, 0, 3), streaming=True)
    machine.handle(awaited)
    load = of_group(2, Direction.LOAD, (0, 0, 1), (member, 1, page))
    if (member, page) in {(0, 2), (1, 3)}:
        with pytest.raises(RequestError, match=f"load writes device page {page}, and waits for"):
            machine.handle(load)
    else:
        assert machine.handle(load) == []
