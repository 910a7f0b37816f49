"""Waits that could never end are found, and quickly."""

from __future__ import annotations

import pytest

from offload.core.batch import Piece
from offload.core.claims import Claims
from offload.core.kinds import Direction
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
