"""One block of `attach`: which forwards are its own, and what becomes of one that it was left under.

Theory of operation
-------------------
Whatever ends the `await` of a thread does not end the thread: a forward may run on after its block was left, and
its pages may have other owners by then. So it must come to no further layer, while other forwards of the same model
go on. A forward is known as the block's own in two ways:

* The block is in the context that entered it, and `to_thread` gives a thread the context of who starts it.
* From its first layer on its thread is known, and how far it has come. A thread runs one forward at a time, so
  one that comes to a later layer is the same forward, and one that comes to an earlier layer is another.

Neither outlives the forward: its context goes with the call, and what a thread remembers goes at its next forward. The
hooks themselves hold no block that was left, and take themselves off when they find it gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeAlias
from weakref import ref

import attrs
import torch
from torch.utils.hooks import RemovableHandle

from offload.errors import RequestError

Act: TypeAlias = Callable[[int], None]
"""What is done about a layer."""


class _Here(threading.local):
    """How far forwards of this thread have come: by block, the latest layer, and whether that runs."""

    def __init__(self) -> None:
        self.reached: dict[Block, tuple[int, bool]] = {}


_HERE = _Here()
_CURRENT: ContextVar[Block | None] = ContextVar("offload_attached", default=None)


@attrs.define(eq=False)
class Block:
    """What hooks know, whatever thread calls them."""

    last: int
    """Its last layer."""

    once: bool
    """Whether it takes a single forward."""

    before: Act
    after: Act
    left: bool = False
    spent: bool = False
    """Whether a forward that it was left under has been refused."""

    _furthest: int = -1
    _threads: set[int] = attrs.field(factory=set)
    """Those whose forwards have come to a layer."""

    _whole: bool = False
    """Whether the latest forward has come through its last layer."""

    _broken: bool = False
    """Whether it was seen to raise."""

    _outer: Block | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def enter(self) -> None:
        """Be what threads belong to that are started from here on."""
        self._outer = _CURRENT.get()
        _CURRENT.set(self)

    def leave(self, *, normally: bool) -> bool:
        """Take no further layer; return whether no forward of it can be under way any more."""
        with self._lock:
            self.left = True
            threads = set(self._threads)
        _HERE.reached.pop(self, None)
        if _CURRENT.get() is self:
            _CURRENT.set(self._outer)
        self._outer, self.before, self.after = None, _nothing, _nothing
        here = threads == {threading.get_ident()}  # then it has returned, or has raised
        return here or self._broken or (normally and self._whole)

    def reach(self, layer: int) -> None:
        """Let a forward come to a layer, when what it waits for is there.

        Raises:
            RequestError: The block was left under this forward, or it is a second one where one is taken.
        """
        with self._lock:
            if self.left:
                self._refuse_stray(layer)
                return
            if self.once and layer <= self._furthest:
                self._broken = True
                raise RequestError(
                    f"a second forward has come to layer {layer} in one block of attach, whose backup "
                    "takes each layer once: attach once per forward. Nothing of this one was written."
                )
            self._furthest = max(self._furthest, layer)
            self._threads.add(threading.get_ident())
            self._whole = self._broken = False
            before = self.before
        _HERE.reached[self] = layer, True
        before(layer)
        if self.left:
            self._refuse(layer)

    def written(self, layer: int) -> None:
        """Note that a layer has run, unless that was in the forward of another block."""
        if _HERE.reached.get(self) != (layer, True):
            return
        if layer == self.last:
            del _HERE.reached[self]
        if self.left:
            return
        self.after(layer)
        if layer == self.last:
            self._whole = True
        else:
            _HERE.reached[self] = layer, False

    def raised(self, layer: int) -> None:
        """Note that a forward is over, if a layer was entered and nobody said that it was written."""
        if not self.left and _HERE.reached.get(self) == (layer, True):
            del _HERE.reached[self]
            self._broken = True

    def _refuse_stray(self, layer: int) -> None:
        """Refuse a layer to a forward that the block was left under; others go on."""
        before = _HERE.reached.pop(self, None)
        started_here = not self._threads or threading.get_ident() in self._threads
        if (before is not None and layer > before[0]) or (_CURRENT.get() is self and started_here):
            self._refuse(layer)

    def _refuse(self, layer: int) -> None:
        self.spent = True
        _HERE.reached.pop(self, None)
        raise RequestError(
            f"a forward has come to layer {layer} after its block of attach was left, and its pages may "
            "have other owners by now. Leave the block, and free pages, when the forward has ended."
        )


def hang(modules: Sequence[torch.nn.Module], block: Block) -> list[RemovableHandle]:
    """Hang the hooks of a block on its modules, one per layer."""
    handles: list[RemovableHandle] = []
    known = ref(block)

    def before(layer: int) -> Callable[..., None]:
        def reach(*_: object) -> None:
            block = known()
            if block is None or block.spent:
                remove(
                    handles
                )  # here alone: torch goes through the hooks behind a layer without a copy
            else:
                block.reach(layer)

        return reach

    def behind(act: Callable[[Block, int], None], layer: int) -> Callable[..., None]:
        def tell(*_: object) -> None:
            block = known()
            if block is not None:
                act(block, layer)

        return tell

    for layer, module in enumerate(modules):
        handles += (
            module.register_forward_pre_hook(before(layer)),
            module.register_forward_hook(behind(Block.written, layer)),
            module.register_forward_hook(behind(Block.raised, layer), always_call=True),
        )
    return handles


def remove(handles: list[RemovableHandle]) -> None:
    """Take hooks off their modules."""
    for handle in handles:
        handle.remove()


def _nothing(_: int) -> None:
    """Do nothing about a layer: the block was left."""
