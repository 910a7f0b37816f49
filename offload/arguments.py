"""Checks of what callers pass, with errors that name the argument, its value and what it takes."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from offload.errors import GeometryError, RequestError, shown


def expect(call: str, name: str, value: object, kinds: type | tuple[type, ...], takes: str) -> None:
    """Raise unless a value is of one of these types.

    Args:
        takes: What the argument takes, as the end of a sentence: `a Limits, or None`.

    Raises:
        RequestError: It is not.
    """
    if not isinstance(value, kinds):
        raise refusal(call, name, value, takes)


def refusal(call: str, name: str, value: object, takes: str) -> RequestError:
    """Return the error for an argument that is not what it takes."""
    return RequestError(f"{call}: {name} is {shown(value)}; it takes {takes}.", value=value)


def real(value: object) -> float:
    """Return a number of any kind, numpy's and a tensor's of no dimension among them.

    Raises:
        TypeError: It is none, or several, or one too large.
    """
    try:
        if isinstance(value, (int, float)):
            return float(value)
        convert = getattr(value, "__float__", None)
        if convert is not None and not getattr(value, "ndim", 0):
            return float(convert())
    except (OverflowError, RuntimeError, ValueError):
        pass
    raise TypeError(f"{shown(value)} is no number")


def distinct_names(subject: str, names: object, num_layers: int) -> tuple[str, ...]:
    """Return names of layers: a string for each, all different.

    Raises:
        GeometryError: They are not.
    """
    listed = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else None
    strings = [name for name in listed or () if isinstance(name, str)]
    if listed is not None and len(set(strings)) == len(listed) == num_layers:
        return tuple(strings)
    got = shown(names) if listed is None else f"{len(listed)} names, {len(set(strings))} distinct"
    odd = next((each for each in listed or () if not isinstance(each, str)), "")
    raise GeometryError(
        subject,
        expected={"layer_names": f"{num_layers} distinct names, one per layer"},
        got={"layer_names": f"{got}, one of them {shown(odd)}" if odd != "" else got},
    )


def integer(subject: str, name: str, size: object) -> int:
    """Return a size.

    Raises:
        GeometryError: It is no integer.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        kind = type(size).__name__
        got = f"{size!r} ({kind})" if isinstance(size, (str, bytes, float, bool)) else shown(size)
        raise GeometryError(subject, expected={name: "an integer"}, got={name: got})
    return size


def positive(subject: str, **sizes: int) -> None:
    """Raise with every size that is not a positive integer."""
    wrong = {name: size for name, size in sizes.items() if integer(subject, name, size) < 1}
    if wrong:
        raise GeometryError(subject, expected=dict.fromkeys(wrong, "at least 1"), got=wrong)


def layer_number(layer: object, num_layers: int) -> int:
    """Return a layer's index as an integer.

    Raises:
        RequestError: It is none of `0 .. num_layers - 1`.
    """
    try:
        number = index(layer)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(
            f"layer is {shown(layer)}; it takes an index or a name.", value=layer
        ) from None
    if not 0 <= number < num_layers:
        raise RequestError.out_of_range("layer", value=number, bound=num_layers)
    return number
