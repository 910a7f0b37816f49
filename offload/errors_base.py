"""The base of all errors, and the words that their texts share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Error = TypeVar("_Error", bound="OffloadError")


def sized(nbytes: float) -> str:
    """Return bytes in the largest unit of which there is one: `512 B`, `88.1 MB` of 1e6."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


_SHOWN = (bytes, int, float, type(None))
"""What an error shows by its value; of anything else it names the type, because tensors print their data."""


def shown(value: object) -> str:
    """Return a value as an error shows it: `3`, `'text'`, `a dict`, `the class Limits`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return repr(str(value))  # a member of an enum by its text
    if isinstance(value, _SHOWN):
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"


def one_of(names: Iterable[object], *, word: str = "or") -> str:
    """Return names as prose: `'a', 'b' or 'c'`."""
    quoted = [repr(str(name)) for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {word} {quoted[-1]}"


def counted(number: int, word: str) -> str:
    """Return a number with its word: `1 byte`, `2 bytes`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def told(error: BaseException) -> str:
    """Return an error's repr, or its name where that cannot be had: it is not ours, and may do anything."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - the error's own fault
        return type(error).__name__


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the same
        return ""


def _revive(cls: type[_Error], args: tuple[object, ...], state: dict[str, object]) -> _Error:
    """Rebuild a pickled error from its text and fields, without building the text again."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class OffloadError(Exception):
    """The base of every error of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the text and the fields; like every exception, without the cause."""
        return _revive, (type(self), self.args, self.__dict__)
