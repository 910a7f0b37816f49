"""Arguments that cannot be served: nothing was queued, nothing was made."""

from __future__ import annotations

from collections.abc import Mapping

from offload.errors_base import OffloadError

_PLURALS = frozenset({"axes", "byte strides", "components", "tensors", "tokens"})
"""Names of quantities that are followed by `are`."""


class GeometryError(OffloadError, ValueError):
    """Sizes, shapes, strides or dtypes that do not fit each other."""

    def __init__(
        self,
        subject: str,
        *,
        expected: Mapping[str, object],
        got: Mapping[str, object],
        remedy: str = "",
    ) -> None:
        self.subject = subject
        self.expected = dict(expected)
        """By name of the quantity, what would fit."""
        self.got = dict(got)
        """By the same names, what was given."""
        self.remedy = remedy
        facts = "; ".join(
            f"{name} {'are' if name in _PLURALS else 'is'} {got[name]}, expected {expected[name]}"
            for name in expected
        )
        super().__init__(f"{subject}: {facts}.{' ' if remedy else ''}{remedy}")

    @classmethod
    def misdeclared(
        cls,
        pool: str,
        *,
        declared: str,
        shape: tuple[int, ...],
        got: tuple[int, ...],
        looks_like: str,
        nbytes: int,
    ) -> GeometryError:
        """Return the error for a tensor that has the size of its layout and the shape of another."""
        error = cls(pool, expected={"shape": shape}, got={"shape": got})
        error.args = (
            (
                f"{pool} is declared {declared!r}, shape {shape}, but its tensor has shape {got}, "
                f"which is {looks_like!r}. Both need {nbytes} bytes, so copies would run and read "
                f"other layers' bytes. Pass layout={looks_like!r}, or allocate with "
                f"HostPool.allocate(layout={declared!r})."
            ),
        )
        return error


class RequestError(OffloadError, ValueError):
    """A call whose arguments cannot be served. Nothing was queued and no byte moved."""

    def __init__(self, text: str, *, value: object = None, position: int | None = None) -> None:
        self.value = value
        """The first bad value, where there is one."""
        self.position = position
        """Its index in what was passed."""
        super().__init__(text)

    @classmethod
    def out_of_range(
        cls, what: str, *, value: int, position: int | None = None, bound: int
    ) -> RequestError:
        """Return the error for an id outside `0 .. bound - 1`; `what` is such as `device page`.

        Args:
            position: Its index in a list of ids; None where it came alone.
        """
        at = "" if position is None else f" at position {position}"
        text = f"{what} {value}{at} is out of range. The pool has {what}s 0 to {bound - 1}."
        return cls(text, value=value, position=position)

    @classmethod
    def written_twice(
        cls, direction: str, *, page: int, sources: tuple[int, int], position: int
    ) -> RequestError:
        """Return the error for a destination page that appears twice in one request."""
        there, here = ("device", "host") if direction == "load" else ("host", "device")
        text = (
            f"{direction} writes {there} page {page} twice (from {here} pages {sources[0]} and "
            f"{sources[1]}). Each {there} page may appear once."
        )
        return cls(text, value=page, position=position)

    @classmethod
    def lengths(cls, *, host_pages: int, device_pages: int) -> RequestError:
        """Return the error for two page lists of different length."""
        return cls(
            f"host_pages has {host_pages} pages and device_pages has {device_pages}. "
            "Page i of one goes to page i of the other, so both need the same number."
        )


class NotATrace(OffloadError, ValueError):
    """A file that is no trace, or holds no lanes of ours."""
