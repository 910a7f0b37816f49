"""Checks of what callers pass, with errors that name the argument, its value and what it takes."""

from __future__ import annotations

from offload.errors import GeometryError, RequestError

_SHOWN = (str, int, float, type(None))
"""What an error shows by its value; of anything else it names the type, because tensors print their data."""


def expect(call: str, name: str, value: object, kinds: type | tuple[type, ...], takes: str) -> None:
    """Raise unless a value is one of these types.

    Args:
        takes: What the argument takes, as the end of a sentence: `a Limits or None`.

    Raises:
        RequestError: It is not.
    """
    if not isinstance(value, kinds):
        raise refusal(call, name, value, takes)


def refusal(call: str, name: str, value: object, takes: str) -> RequestError:
    """Return the error for an argument that is not what it takes."""
    kind = type(value).__name__
    shown = repr(value) if isinstance(value, _SHOWN) else f"{_article(kind)} {kind}"
    return RequestError(f"{call}: {name} is {shown}; it takes {takes}.", value=value)


def _article(word: str) -> str:
    return "an" if word[:1] in "AEIOUaeiou" else "a"


def integer(subject: str, name: str, size: object) -> int:
    """Return a size.

    Raises:
        GeometryError: It is no integer.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise GeometryError(
            subject, expected={name: "an integer"}, got={name: f"{size!r} ({type(size).__name__})"}
        )
    return size


def positive(subject: str, **sizes: int) -> None:
    """Raise with every size that is not a positive integer."""
    wrong = {name: size for name, size in sizes.items() if integer(subject, name, size) < 1}
    if wrong:
        raise GeometryError(subject, expected=dict.fromkeys(wrong, "at least 1"), got=wrong)
