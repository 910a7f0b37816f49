"""What third parties add: io backends, drivers and layouts by name. The package's only module state.

Names come in through `register_*`, or through Python entry points of the groups `offload.backends`,
`offload.drivers` and `offload.layouts`, which are read once, when a name is first looked up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

import attrs

from offload.arguments import refusal
from offload.core.axes import Axes
from offload.core.kinds import AUTO, IoBackend, Layout
from offload.core.strategy import Column, Table
from offload.errors import RequestError, UnknownNameError

Factory = Callable[..., object]
"""Makes a backend or a driver; what it is called with, the seam it plugs into says."""


@attrs.frozen
class BackendEntry:
    """A registered io backend."""

    name: str
    factory: Factory
    column: Column
    """Says of a pair (kind, direction, host and device geometry) its strategy, or a rejection."""


@attrs.define(eq=False)
class _Registry:
    backends: dict[str, BackendEntry] = attrs.field(factory=dict)
    drivers: dict[str, Factory] = attrs.field(factory=dict)
    layouts: dict[str, Axes] = attrs.field(factory=dict)
    called: set[EntryPoint] = attrs.field(factory=set)
    """Entry points that have registered what they bring."""

    read: bool = False
    """Whether all of them were."""

    lock: threading.RLock = attrs.field(factory=threading.RLock)


_REGISTRY = _Registry()

BUILT_IN_DRIVERS = ("cuda", "threads", "sim")


def register_backend(name: str, factory: Factory, *, column: Column) -> None:
    """Add an io backend to the table, its errors and the printed matrix.

    Args:
        name: How callers name it. A name of the table's own is taken, except that a column which only
            waits for a driver (`kernel_ascend`) may be filled.
        factory: `factory() -> Backend`, a class or a function. Called once by each scheduler that uses the
            name: when it opens, or at the first request that says so. `offload.backend.base` has the protocol
            `Backend`, what its `prepare` returns (`Prepared`), and what both may have besides; the base
            class `PoolCopy` there has all of `Prepared` but `copy` and `num_ops`.
        column: `column(kind, direction, host, device) -> str | Rejection`, with a `PoolKind`, a `Direction` and
            the `Geometry` (`offload.core.geometry`) of both pools: any name for how it copies such a pair, or
            why it does not. Asked often, also for the errors of other io backends: it must be pure.

    Raises:
        RequestError: The name is taken, or is none; or `factory` or `column` cannot be called.

    Example:
        >>> from offload.backend.base import PoolCopy
        >>> class Copies(PoolCopy):
        ...     def copy(self, layer):
        ...         for ours, theirs in self.pairs:
        ...             to = self.destination.view(theirs.name, layer)
        ...             to[self.pages[1]] = self.source.view(ours.name, layer)[self.pages[0]]
        ...     def num_ops(self, layer):
        ...         return len(self.pairs)
        >>> class Simple:
        ...     name = "simple"
        ...     prepare = staticmethod(Copies.of)
        >>> register_backend("simple", Simple, column=lambda kind, direction, host, device: "rows")

    Callers name it, `io_backend="simple"`; `auto` never takes it. `examples/own_backend.py` has types, and
    `offload.testing.Hooks` holds, delays and breaks its copies in tests.
    """
    taken = {AUTO, *IoBackend} - {IoBackend.KERNEL_ASCEND}
    for argument, value in {"factory": factory, "column": column}.items():
        if not callable(value):
            raise refusal("register_backend", argument, value, "a function")
    with _REGISTRY.lock:
        _claim("io_backend", name, taken | set(_REGISTRY.backends))
        _REGISTRY.backends[name] = BackendEntry(name, factory, column)


def register_driver(name: str, factory: Factory) -> None:
    """Add a driver that `open_scheduler(driver=name)` accepts.

    Raises:
        RequestError: The name is taken, or `factory` cannot be called.
    """
    if not callable(factory):
        raise refusal("register_driver", "factory", factory, "a function")
    with _REGISTRY.lock:
        _claim("driver", name, {*BUILT_IN_DRIVERS, *_REGISTRY.drivers})
        _REGISTRY.drivers[name] = factory


def register_layout(name: str, axes: str) -> None:
    """Give an axis order a name that host pools accept as `layout=`.

    Raises:
        RequestError: The name is taken.
        GeometryError: `axes` are none.
    """
    with _REGISTRY.lock:
        _claim("layout", name, {*Layout, *_REGISTRY.layouts})
        _REGISTRY.layouts[name] = Axes(axes, name=name)


def backends() -> Mapping[str, BackendEntry]:
    """Return the registered io backends by name."""
    return _loaded().backends


def drivers() -> Mapping[str, Factory]:
    """Return the registered drivers by name."""
    return _loaded().drivers


def layouts() -> Mapping[str, Axes]:
    """Return the registered layouts by name."""
    return _loaded().layouts


def table(on: str | None = None) -> Table:
    """Return the strategy table with what was registered.

    Args:
        on: `cpu` or `cuda`: reject what cannot run there.
    """
    columns = {name: entry.column for name, entry in backends().items()}
    return Table(columns=columns, orders=layouts(), on=on)


def io_backend(name: str) -> str:
    """Return the name of an io backend, or `auto`, as the table knows it.

    Raises:
        UnknownNameError: There is none of that name.
    """
    names = [AUTO, *(str(each) for each in IoBackend), *backends()]
    given: object = name
    if not isinstance(given, str) or given not in names:
        raise UnknownNameError("io_backend", name, dict.fromkeys(names))
    return str(name)


def layout(name: str) -> Layout | Axes:
    """Return a layout by name, built in or registered.

    Raises:
        UnknownNameError: There is none of that name.
    """
    known = {str(each): each for each in Layout}
    given: object = name
    if isinstance(given, str) and given in known:
        return known[given]
    if not isinstance(given, str) or given not in layouts():
        raise UnknownNameError("layout", name, [*known, *layouts()])
    return layouts()[name]


def _claim(what: str, name: object, taken: set[str]) -> None:
    if not isinstance(name, str) or not name:
        raise RequestError(f"{what} {name!r}: a name is a string that is not empty.", value=name)
    if name in taken:
        raise RequestError(
            f"{what} {str(name)!r} is taken. Register it under another name.", value=name
        )


def _loaded() -> _Registry:
    with _REGISTRY.lock:
        if not _REGISTRY.read:
            for group in ("offload.backends", "offload.drivers", "offload.layouts"):
                for entry in entry_points(group=group):
                    if entry not in _REGISTRY.called:
                        _call(entry)
            _REGISTRY.read = True
        return _REGISTRY


def _call(entry: EntryPoint) -> None:
    """Let an installed package register: an entry point is a function that calls `register_*`.

    Raises:
        RequestError: It raised. It is called again at the next look-up.
    """
    _REGISTRY.called.add(entry)  # before the call, which may look names up itself
    try:
        entry.load()()
    except Exception as error:
        _REGISTRY.called.discard(entry)
        raise RequestError(
            f"entry point {entry.name!r} of {entry.group!r} ({entry.value}) raised "
            f"{type(error).__name__}: {error}. Mend or uninstall its package.",
            value=entry.name,
        ) from error
