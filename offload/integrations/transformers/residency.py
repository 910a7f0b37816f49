"""Where a session is now, and how far the forward has come that is using it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import torch

from offload import RequestError, Transfer
from offload.integrations.transformers.ledger import Ledger
from offload.integrations.transformers.slots import Slots


@attrs.define(eq=False)
class Residency:
    """What the cache's layers ask before they touch memory.

    States are written in place, so a forward that stops half way leaves some layers one step ahead of
    the others. For a session that has states, layers are followed in order, and such a forward is seen.
    """

    ledger: Ledger
    """Tokens: how many there are, fit, and have been backed up."""

    followed: Sequence[int] = ()
    """Of a session with states: the layers that keep something, in the order of a forward."""

    slots: Sequence[Slots] | None = None
    """By model layer; None while the session holds no device pages."""

    load: Transfer | None = None
    """The load that fills the slots, until a forward has passed all its layers."""

    in_use: bool = False
    """Inside `with session.use()`."""

    waited_ns: int = 0
    """Nanoseconds that forwards have waited for loads, over the life of the session."""

    _place: int | None = None
    """Where in `followed` the forward is; None before its first layer."""

    def begin(self) -> None:
        """Start a block of `use`."""
        self.in_use = True
        self._place = None

    @property
    def changed_states(self) -> bool:
        """Whether a forward has come to a layer in this block, if the session has states."""
        return self._place is not None

    @property
    def half_way(self) -> bool:
        """Whether the last forward did not come to the last layer."""
        return self._place is not None and self._place + 1 < len(self.followed)

    def reach(self, layer: int) -> Slots:
        """Return the layer's slots for a forward that has come to it. Their bytes may still be loading.

        Raises:
            RequestError: No `use()`, or a forward before this one stopped half way.
        """
        if self.slots is None:
            raise RequestError("the session is evicted: `await session.load()` first")
        if not self.in_use:
            raise RequestError("run the forward inside `with session.use() as cache:`")
        if self.followed:
            self._follow(layer)
        return self.slots[layer]

    def _follow(self, layer: int) -> None:
        place = self._place
        if place is not None and self.followed[place] == layer:
            return
        following = 0 if place is None else (place + 1) % len(self.followed)
        if self.followed[following] != layer:
            stopped = "before it began" if place is None else f"at layer {self.followed[place]}"
            raise RequestError(
                f"a forward came to layer {layer} behind one that stopped {stopped}, and states "
                "cannot be taken back. Leave `use()`: the session falls back to its last backup."
            )
        self._place = following

    def fence(self, layer: int) -> None:
        """Order this thread, or its stream, after the layer's bytes."""
        if self.load is None:
            return
        start = time.perf_counter_ns()
        self.load.fence(layer)
        self.waited_ns += time.perf_counter_ns() - start

    def refuse_gradients(self) -> None:
        """Raise where a write in place would become part of a graph.

        Raises:
            RequestError: Gradients are on.
        """
        if torch.is_grad_enabled():
            raise RequestError(
                "states are written in place: run the forward under torch.inference_mode()"
            )
