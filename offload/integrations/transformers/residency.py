"""Where a session is now, and how far the forward has come that is using it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

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

    _calls: set[str] = attrs.field(factory=set)
    """What it asked of the cache at that layer; it asks for nothing twice."""

    _stopped: bool = False
    """Whether it raised at that layer."""

    refused: RequestError | None = None
    """What told a forward in this block that there is no room, before it had written anything."""

    def begin(self) -> None:
        """Start a block of `use`."""
        self.in_use = True
        self._place = None
        self._stopped = False
        self.refused = None

    def admit(self, new: int) -> None:
        """Refuse a forward that is about to begin, if its new tokens do not fit.

        Raises:
            RequestError: They do not. Nothing was written.
        """
        if not self.in_use:
            return
        try:
            self.ledger.check_room(new)
        except RequestError as error:
            self.refused = error
            raise

    @property
    def changed_states(self) -> bool:
        """Whether a forward has come to a layer in this block, if the session has states."""
        return self._place is not None

    @property
    def whole(self) -> bool:
        """Whether the last forward in this block came through all layers, as far as the cache can see."""
        return self._place is None or (self._place + 1 == len(self.followed) and not self._stopped)

    def visit(self, layer: int, call: str) -> AbstractContextManager[None]:
        """Follow a forward through what it asks of the cache at a layer.

        Raises:
            RequestError: Layers run out of order, because a forward before this one stopped half way; or
                gradients are on, and would run through what is written in place.
        """
        if not self.followed:
            return _NOT_FOLLOWED
        if torch.is_grad_enabled():
            raise RequestError(
                "states are written in place: run the forward under torch.inference_mode()"
            )
        self._follow(layer, call)
        return Visit(self)

    def _follow(self, layer: int, call: str) -> None:
        place = self._place
        following = 0 if place is None else (place + 1) % len(self.followed)
        if place is not None and self.followed[place] == layer and call not in self._calls:
            following = place
        if self._stopped or self.followed[following] != layer:
            raise RequestError(
                f"a forward came to layer {layer}, and the one before it stopped on the way. States "
                "cannot be taken back: leave `use()`, and the session falls back to its last backup."
            )
        if following != place:
            self._calls.clear()
        self._place = following
        self._calls.add(call)

    def stop(self) -> None:
        """Note that the forward raised where it is."""
        self._stopped = True

    def reach(self, layer: int) -> Slots:
        """Return a layer's slots. Their bytes may still be loading.

        Raises:
            RequestError: The session is evicted, or no `use()`.
        """
        if self.slots is None:
            raise RequestError("the session is evicted: `await session.load()` first")
        if not self.in_use:
            raise RequestError("run the forward inside `with session.use() as cache:`")
        return self.slots[layer]

    def fence(self, layer: int) -> None:
        """Order this thread, or its stream, after the layer's bytes."""
        if self.load is None:
            return
        start = time.perf_counter_ns()
        self.load.fence(layer)
        self.waited_ns += time.perf_counter_ns() - start


@attrs.frozen(eq=False)
class Visit:
    """A call of a forward at a layer: if it raises, the forward stopped there."""

    _residency: Residency

    def __enter__(self) -> None:
        """Do nothing: the call was noted."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Note an error."""
        if error is not None:
            self._residency.stop()


_NOT_FOLLOWED = nullcontext()
