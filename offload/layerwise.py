"""Hooks that tie a transfer to a forward pass: wait before a layer, back up after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self
from weakref import WeakSet, ref

import attrs
import torch
from torch.utils.hooks import RemovableHandle

from offload import actions, waits
from offload.arguments import expect
from offload.core.kinds import Direction
from offload.errors import RequestError, TransferFailed, shown
from offload.layerwise_block import Block, hang, remove
from offload.trace import Tracer
from offload.trace.forward import ForwardTrace
from offload.transfer import Transfer

__all__ = ["Attachment", "ForwardTrace", "attach", "fence"]

_ATTACHED: WeakSet[torch.nn.Module] = WeakSet()
"""The modules of all blocks that are open."""

_ATTACHING = threading.Lock()


def attach(
    layers: Iterable[torch.nn.Module],
    load: Transfer | Sequence[Transfer] | None = None,
    backup: Transfer | Sequence[Transfer] | None = None,
    *,
    tracer: Tracer | None = None,
) -> Attachment:
    """Install hooks on a model's layers; a context manager, which removes them.

    Before layer `i` runs, its thread waits until every `load` has landed layer `i`; on a GPU until it is
    issued, and its stream is fenced (`Transfer.fence`). After it ran, every `backup` (streaming) hears
    `layer_written(i)`. One forward at a time; concurrent forwards attach to modules of their own. With a
    backup a block is one forward; without, it may be a prefill and all its steps.

    Leaving the block, by an exception or not, cancels the backups of which a layer was not written.

    Run the forward in a worker thread: on the scheduler's own loop thread a wait is refused. A thread runs on
    when its `await` is cancelled (`task.cancel()`, `wait_for`): the next layer that it reaches after the block was
    left raises, and the one that runs then still uses the pages. So free them when the forward has left:

        try:
            with attach(layers, load=load):
                forward = asyncio.ensure_future(asyncio.to_thread(model, ids))
                await asyncio.shield(forward)
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([forward])
            device.pages.free(pages)

    Args:
        layers: One module per model layer, in order.
        load: Loads that the forward reads from.
        backup: Streaming backups of what it writes.
        tracer: Records the forward where there is no transfer to name one.

    Raises:
        RequestError: The number of layers is not that of the transfers', a module appears twice, a
            backup is not streaming, a load and a backup changed places, or a module is attached already.
    """
    given: object = layers
    if not isinstance(given, Iterable):
        raise RequestError(
            f"attach takes a list of layers, one module per model layer, and got {type(given).__name__}. "
            "Pass the model's own list, such as model.model.layers, or [layer] for a single one."
        )
    expect("attach", "tracer", tracer, (Tracer, type(None)), "a Tracer, or None")
    return Attachment(
        tuple(layers), _listed(load, Direction.LOAD), _listed(backup, Direction.BACKUP), tracer
    )


@attrs.define(eq=False)
class Attachment:
    """Hooks on the layers of one model, until the block ends."""

    _modules: tuple[torch.nn.Module, ...]
    _loads: tuple[Transfer, ...]
    _backups: tuple[Transfer, ...]
    _tracer: Tracer | None = None
    _block: Block | None = None
    _handles: list[RemovableHandle] = attrs.field(factory=list)
    _trace: ForwardTrace | None = None
    _began_ns: int = 0

    def __attrs_post_init__(self) -> None:
        if len(set(map(id, self._modules))) != len(self._modules):
            raise RequestError(
                "attach was given the same module more than once. Pass one module per model layer, "
                "in order."
            )
        for backup in self._backups:
            if not backup._entry.request.streaming:
                raise RequestError(
                    f"{backup!r} is not a streaming backup, and would not hear of written layers. "
                    "Submit it with streaming=True."
                )
        for transfer in (*self._loads, *self._backups):
            if transfer.num_layers != len(self._modules):
                raise RequestError(
                    f"attach was given {len(self._modules)} layers, and {transfer!r} has "
                    f"{transfer.num_layers}. Pass one module per model layer, in order."
                )
        self._refuse_attached()

    def _refuse_attached(self) -> None:
        for layer, module in enumerate(self._modules):
            if module in _ATTACHED:
                raise RequestError(
                    f"layer {layer} ({type(module).__name__}) is attached already, and the two blocks would "
                    "take each other's forward for their own. Attach once, with all loads and backups of "
                    "that forward; forwards that run at once need modules of their own."
                )

    def __enter__(self) -> Self:
        with _ATTACHING:
            self._refuse_attached()
            _ATTACHED.update(self._modules)
        transfers = (*self._loads, *self._backups)
        tracer = transfers[0]._entry.shell.tracer if transfers else self._tracer
        if tracer is not None and tracer.active:
            self._trace = ForwardTrace(tracer)
        last = len(self._modules) - 1
        block = self._block = Block(last, bool(self._backups), self._wait, self._written)
        self._handles = hang(self._modules, block)
        block.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave_block(normally=error is None)
        with _ATTACHING:
            _ATTACHED.difference_update(self._modules)
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        for backup in self._backups:
            layer = backup._entry.unwritten()
            if layer is not None:
                text = f"layer {layer} was not written when its block of attach was left."
                actions.cancel(backup._entry, TransferFailed.source(backup._entry.name, text))

    def _leave_block(self, *, normally: bool) -> None:
        """Take the hooks off, unless a forward may run on: then they do that when it has ended."""
        block, self._block = self._block, None
        assert block is not None
        known, over = ref(block), block.leave(normally=normally)
        del block
        if over or known() is None:
            remove(self._handles)
        self._handles = []

    def _clock(self) -> int:
        transfers = (*self._loads, *self._backups)
        return transfers[0]._entry.shell.driver.now_ns() if transfers else time.perf_counter_ns()

    def _wait(self, layer: int) -> None:
        """Before a layer: until its pages are there."""
        if not layer:
            self._began_ns = self._clock()
        trace = self._trace
        if trace is not None:
            trace.arrive(layer)
        for load in self._loads:
            fence(load, layer, trace)

    def _written(self, layer: int) -> None:
        """After a layer: its backups may start."""
        if self._trace is not None:
            self._trace.leave(layer, tuple(load.id for load in self._loads))
        for backup in self._backups:
            backup.layer_written(layer)
        if layer == len(self._modules) - 1 and self._began_ns:
            for transfer in (*self._loads, *self._backups)[:1]:
                transfer._entry.shell.counters.forwarded(self._clock() - self._began_ns)


def fence(
    transfer: Transfer, layer: int, trace: ForwardTrace | None = None, timeout: float | None = None
) -> bool:
    """Fence a layer as `Transfer.fence` does; return whether the thread had to wait.

    For engines with hooks of their own.

    Args:
        trace: The forward to which a wait is drawn.
        timeout: Seconds that a wait may take.

    Raises:
        RequestError: It is a backup, whose layers this very forward may still have to write; and as
            `Transfer.fence` does.
    """
    _check_transfer("fence", transfer, Direction.LOAD)
    entry = transfer._entry
    return waits.noted_fence(entry, layer, timeout, trace) != 0


def _listed(
    transfers: Transfer | Sequence[Transfer] | None, direction: Direction
) -> tuple[Transfer, ...]:
    if transfers is None:
        return ()
    listed = tuple(transfers) if isinstance(transfers, Sequence) else (transfers,)
    for transfer in listed:
        _check_transfer("attach", transfer, direction)
    return listed


def _check_transfer(call: str, transfer: Transfer, direction: Direction) -> None:
    """Refuse a backup as a load, which would wait for what only the forward itself can write; or a load as a backup."""
    if not isinstance(transfer, Transfer):
        raise RequestError(
            f"{call} takes transfers, and got {shown(transfer)}. A load or a backup is a transfer once it "
            "was awaited: load=await scheduler.load(...).",
            value=transfer,
        )
    if transfer.direction is direction:
        return
    if direction is Direction.LOAD:
        raise RequestError(
            f"{transfer!r} is a backup, and a forward waits for loads: it would wait for layers that it "
            "writes itself. Pass it to attach as backup=, or use Transfer.fence."
        )
    raise RequestError(
        f"{transfer!r} is a load, and has no layers that a forward writes. Pass it to attach as load=."
    )
