"""What a caller may pass as `after=`: our events and streams, sequences of them, and events of others."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import cast

from offload.driver.base import Event, Stream
from offload.driver.lookout import look_out
from offload.errors import RequestError


class ForeignEvent:
    """An event that is not ours, such as a `threading.Event`, seen through our protocol.

    It needs `wait(timeout)` or `synchronize()`, and `query()` or `is_set()`. Watching one that has not
    fired costs a thread, for all who watch it, that ends when it fires, or when it raises: then `error` says what.
    """

    __slots__ = ("__weakref__", "_callbacks", "_query", "_synchronize", "_wait", "error", "event")

    def __init__(self, event: object) -> None:
        self.event = event
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._query = _method(event, "query") or _method(event, "is_set")
        # Where there is a `synchronize`, a `wait` may order a stream and return at once.
        self._synchronize = _method(event, "synchronize")
        self._wait = None if self._synchronize else _method(event, "wait")

    def __repr__(self) -> str:
        return f"<foreign {self.event!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignEvent) and other.event is self.event

    def __hash__(self) -> int:
        return hash(id(self.event))

    @property
    def usable(self) -> bool:
        """Whether the object can be asked and waited for."""
        return self._query is not None and (self._wait or self._synchronize) is not None

    def query(self) -> bool:
        """Return whether it has fired. Never blocks."""
        assert self._query is not None
        return bool(self._query())

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it has fired; return whether it has. `timeout` in seconds."""
        if self._wait is not None:
            self._wait(timeout)
        elif timeout is None and self._synchronize is not None:
            self._synchronize()
        else:
            fired = threading.Event()
            self.watch(fired.set)
            fired.wait(timeout)
        return self.query()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when it has fired or has raised, on a helper thread; at once when it already has.

        Not when nobody keeps this object until then: who watches does, or no longer wants to know.
        """
        if self.query():
            callback()
            return
        self._callbacks.append(callback)
        if len(self._callbacks) == 1:
            look_out(self.event, ForeignEvent(self.event).wait, self)

    def fire(self, error: BaseException | None) -> None:
        """Call back: it has fired, or raised."""
        self.error = error
        while self._callbacks:
            self._callbacks.pop(0)()


def _method(thing: object, name: str) -> Callable[..., object] | None:
    found = None if isinstance(thing, type) else getattr(thing, name, None)
    return cast("Callable[..., object]", found) if callable(found) else None


def _several(thing: object) -> Iterable[object] | None:
    """Return the elements of something that has some; an array of no dimension has none, whatever it says."""
    if isinstance(thing, Iterable) and not isinstance(thing, str | bytes | type):
        with suppress(TypeError):
            return iter(thing)
    return None


def _of_a_device(thing: object) -> bool:
    """Return whether this is a stream that takes events, or an event that may be recorded again."""
    if any(_method(thing, name) for name in ("wait_event", "wait_stream", "record_event")):
        return True
    return bool(_method(thing, "record") and _method(thing, "synchronize"))


def _for_tasks(thing: object) -> bool:
    """Return whether this is something that tasks await, and threads cannot wait for."""
    if inspect.isawaitable(thing):
        return True
    methods = (_method(thing, name) for name in ("wait", "synchronize", "query", "is_set"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def events(
    after: object, known: Callable[[object], tuple[Event, ...] | None] = lambda _: None
) -> tuple[Event, ...]:
    """Return the events that `after` stands for, sequences flattened.

    Args:
        known: Returns the events for what is the driver's own kind, and None for anything else.

    Raises:
        RequestError: It is no event, no stream, and no sequence of them; or one of a device that is not the
            driver's.
    """
    if type(after) is tuple:  # the common case, `()`
        return tuple(event for one in after for event in events(one, known))
    found = known(after)
    if found is not None:
        return found
    if _for_tasks(after):
        raise RequestError(
            f"after={after!r} is for tasks, and a request is none: nothing awaits it here. Await it first, or "
            "pass a threading.Event.",
            value=after,
        )
    # 1 one of our events, 2 a stream: its point now, 3 somebody else's event, 4 several.
    if all(_method(after, name) for name in ("query", "wait", "watch")):
        return (cast("Event", after),)
    if _method(after, "carry") and _method(after, "record"):
        return (cast("Stream", after).record(),)
    if _of_a_device(after):
        raise RequestError(
            f"after={after!r} is a stream or an event of another kind of device than this driver's. Asked "
            "later, a stream only says whether it is idle, and an event speaks of its last record. Pass one "
            "of the pools' device, or an object with is_set() and wait(timeout).",
            value=after,
        )
    foreign = ForeignEvent(after)
    if foreign.usable:
        return (foreign,)
    several = _several(after)
    if several is not None:
        return tuple(event for one in several for event in events(one, known))
    raise RequestError(
        f"after={after!r} is neither an event nor a stream. Pass an object with query() or is_set() "
        "and wait(timeout), a stream of the driver, a sequence of them, () for nothing, or 'compute'.",
        value=after,
    )
