"""A pair of pools, and what a group is told of it: whose pages it moves, and for which layers of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import attrs

from offload.arguments import expect
from offload.core.kinds import Layout
from offload.errors import GeometryError, RequestError, UnknownNameError, shown
from offload.group_member import PageRule, count_layers
from offload.pool import DevicePool, HostPool, check_pair


@attrs.frozen(eq=False)
class Pair:
    """A device pool and the host pool that backs it."""

    device: DevicePool
    host: HostPool

    pages: Literal["same", "own"] | PageRule = attrs.field(default="same", kw_only=True)
    """Whose pages it moves: those of the member it follows, its own (given with each request), or
    what a rule makes of those it follows. `offload.rules` has the usual rules."""

    follows: str | None = attrs.field(default=None, kw_only=True)
    """The member whose pages these are, or are made from; it stands before this one. None: the anchor."""

    layers: Sequence[int] | None = attrs.field(default=None, kw_only=True)
    """The model layer of each of its pool layers; None is 0, 1, 2, ..."""

    def __attrs_post_init__(self) -> None:
        given: tuple[object, object] = (self.device, self.host)
        if not (isinstance(given[0], DevicePool) and isinstance(given[1], HostPool)):
            raise RequestError(
                f"a device pool comes first and its host pool second; got {_named(given[0])} and "
                f"{_named(given[1])}"
            )
        check_pair(self.device, self.host)
        expect("Pair", "follows", self.follows, (str, type(None)), "the name of a member, or None")
        if not callable(self.pages) and self.pages not in ("same", "own"):
            raise UnknownNameError("pages=", self.pages, ["same", "own"])
        if self.pages == "own" and self.follows is not None:
            raise RequestError(
                f"a pair with pages of its own follows nobody: leave out follows={self.follows!r}, or "
                "pass pages='same' or a rule."
            )
        if self.layers is not None and count_layers(self.layers) != self.device.num_layers:
            raise GeometryError(
                "layers= of a pair",
                expected={"layers": self.device.num_layers},
                got={"layers": len(self.layers)},
            )

    @classmethod
    def backed(
        cls,
        device: DevicePool,
        num_host_pages: int,
        layout: str = Layout.PAGE_FIRST,
        *,
        pages: Literal["same", "own"] | PageRule = "same",
        follows: str | None = None,
        layers: Sequence[int] | None = None,
    ) -> Self:
        """Return a device pool with a new host pool behind it."""
        host = HostPool.like(device, num_pages=num_host_pages, layout=layout)
        return cls(device, host, pages=pages, follows=follows, layers=layers)


def _named(pool: object) -> str:
    """Return a pool as its repr has it, and anything else as errors show it."""
    return repr(pool) if isinstance(pool, (DevicePool, HostPool)) else shown(pool)
