"""Hooks around every layer copy: hold it, slow it, make it fail, write it down.

A driver asks `Hooks.begin` when a layer is about to be copied and obeys the `Order` it gets: first the
gate, then the delay, then the error or the copy. It calls `Hooks.end` when the layer has landed or
failed. The thread driver waits for a gate and for a delay on its worker; the simulator keeps the
engine busy for them in virtual time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs


class Gate:
    """A door that copies stop at while it is closed. Any thread may open, close and look."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._changed = threading.Condition()
        self._open = is_open
        self._arrived = 0
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Gate {'open' if self._open else 'closed'}, {self._arrived} arrived>"

    @property
    def is_open(self) -> bool:
        """Whether copies pass."""
        return self._open

    @property
    def arrived(self) -> int:
        """How many copies have come to the gate so far, those that passed included."""
        return self._arrived

    def open(self) -> None:
        """Let through what waits and what comes."""
        with self._changed:
            self._open = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """Stop what comes from now on."""
        with self._changed:
            self._open = False

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the gate is open; return whether it is. `timeout` in seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open, timeout)

    def wait_arrived(self, count: int = 1, timeout: float | None = None) -> bool:
        """Block this thread until `count` copies have come to the gate; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._arrived >= count, timeout)

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when the gate is open: at once, or on the thread that opens it."""
        with self._changed:
            if not self._open:
                self._callbacks.append(callback)
                return
        callback()

    def arrive(self) -> None:
        """Count one copy in. A driver's call."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()


@attrs.define(eq=False)
class Op:
    """One layer copy, as hooks record it."""

    stream: str
    """`load`, `backup`, or what else the driver calls its stream."""

    flight: object
    """The flight; identity counts."""

    layer: int
    """The layer of the flight."""

    state: str = "begun"
    """`begun`, then `landed` or `failed`."""


@attrs.frozen
class Order:
    """What a driver does before it copies a layer."""

    op: Op
    gates: tuple[Gate, ...] = ()
    """Wait until each is open, one after the other."""

    delay: float = 0.0
    """Then take this much longer, in seconds."""

    error: BaseException | None = None
    """Then raise this instead of copying; see `torn`."""

    torn: bool = False
    """Copy first and raise afterwards: the bytes moved, and nobody was told."""


@attrs.define(eq=False)
class _Rule:
    """One thing to do to the ops that match; None matches all."""

    stream: str | None
    layer: int | None
    nth: int | None
    gate: Gate | None = None
    delay: float = 0.0
    error: BaseException | None = None
    torn: bool = False
    seen: int = 0

    def applies(self, op: Op) -> bool:
        if self.stream not in (None, op.stream) or self.layer not in (None, op.layer):
            return False
        self.seen += 1
        return self.nth in (None, self.seen)


class Hooks:
    """Rules for layer copies and the record of all of them; pass it to a driver as `hooks=`.

    Every rule picks its ops by `stream` name, by `layer`, and by `nth` (the first op that matches the
    other two is 1); what is left out matches all. Rules may be added at any time, from any thread.

    Example:
        >>> hooks = Hooks()
        >>> gate = hooks.gate(stream="load", layer=2)  # stops there until gate.open()
        >>> hooks.fail(OSError("no such device"), stream="backup", nth=3)
        >>> driver = ThreadsDriver(hooks=hooks)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self.ops: list[Op] = []
        """Every layer copy so far, in the order in which they began."""

    def gate(
        self, *, stream: str | None = None, layer: int | None = None, nth: int | None = None
    ) -> Gate:
        """Hold the ops that match before they copy; return the gate, closed."""
        gate = Gate()
        self._rules.append(_Rule(stream, layer, nth, gate=gate))
        return gate

    def delay(
        self,
        seconds: float,
        *,
        stream: str | None = None,
        layer: int | None = None,
        nth: int | None = None,
    ) -> None:
        """Make the ops that match take `seconds` longer, on the driver's clock."""
        self._rules.append(_Rule(stream, layer, nth, delay=seconds))

    def fail(
        self,
        error: BaseException,
        *,
        stream: str | None = None,
        layer: int | None = None,
        nth: int | None = None,
        torn: bool = False,
    ) -> None:
        """Raise `error` in place of the ops that match; `torn=True` copies first, then raises."""
        self._rules.append(_Rule(stream, layer, nth, error=error, torn=torn))

    def begin(self, stream: str, flight: object, layer: int) -> Order:
        """Record an op and return what the driver does about it. A driver's call."""
        op = Op(stream, flight, layer)
        with self._lock:
            self.ops.append(op)
            rules = [rule for rule in self._rules if rule.applies(op)]
        faults = [rule for rule in rules if rule.error is not None]
        return Order(
            op,
            gates=tuple(rule.gate for rule in rules if rule.gate is not None),
            delay=sum(rule.delay for rule in rules),
            error=faults[0].error if faults else None,
            torn=bool(faults) and faults[0].torn,
        )

    def end(self, op: Op, error: BaseException | None) -> None:
        """Record how an op ended. A driver's call."""
        op.state = "landed" if error is None else "failed"
