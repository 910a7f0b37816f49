"""Which transformers this works with: another one is refused when this package is imported, by what it lacks."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FunctionType

from offload import RequestError

WORKS = "5.23"

_UNREAD = frozenset({"device", "dtype"})
"""What only moving and reordering read, which a session's cache refuses, and making states, which ours does not."""


@contextmanager
def needed() -> Iterator[None]:
    """Have imports of transformers that fail in this block say which version works.

    Raises:
        RequestError: A module or a name of transformers is not there.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise  # something that transformers itself needs
        raise _refused([str(error).partition(" (")[0]]) from error


def check(config: type, layer: type, ours: type) -> None:
    """Refuse a transformers whose parts are other than those that are stood on.

    Args:
        config: Its class of configurations.
        layer: Its layer of states.
        ours: The one in its place, which does not call its constructor.

    Raises:
        RequestError: Says what is missing.
    """
    lacking = [] if hasattr(config, "per_layer_config") else [f"{config.__name__}.per_layer_config"]
    other = sorted(_constructed(layer) - _of_its_own(ours) - _UNREAD)
    lacking += [f"{layer.__name__} as it was: it has {name} too" for name in other]
    if lacking:
        raise _refused(lacking)


def _constructed(owner: type) -> set[str]:
    """Return the attributes that the constructor of a class assigns."""
    return _stored(
        next(vars(each)["__init__"] for each in owner.__mro__ if "__init__" in vars(each))
    )


def _of_its_own(owner: type) -> set[str]:
    """Return the attributes that a class has or assigns by itself, without its bases."""
    own = [each for each in vars(owner).values() if isinstance(each, FunctionType)]
    return set(vars(owner)).union(*map(_stored, own))


def _stored(function: FunctionType) -> set[str]:
    return {str(op.argval) for op in dis.get_instructions(function) if op.opname == "STORE_ATTR"}


def _refused(lacking: Sequence[str]) -> RequestError:
    try:
        found: str | None = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        found = None
    this = "none is installed" if found is None else f"this is {found}"
    return RequestError(
        f"offload.integrations.transformers works with transformers {WORKS} or later, tested with {WORKS}, and {this}. "
        f"What it lacks: {'; '.join(lacking)}. Install transformers {WORKS}: pip install 'offload[transformers]'.",
        value=found,
    )
