"""Every error that offload raises. Each class builds its text from its fields, and can be pickled.

A text says what was asked, why it cannot be, and what works instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

_Error = TypeVar("_Error", bound="OffloadError")


def one_of(names: Iterable[object], *, word: str = "or") -> str:
    """Return names as prose: `'a', 'b' or 'c'`."""
    quoted = [repr(str(name)) for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {word} {quoted[-1]}"


def counted(number: int, word: str) -> str:
    """Return a number with its word: `1 byte`, `2 bytes`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


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


class UnsupportedPairError(OffloadError, ValueError):
    """This layout cannot be copied by this io backend in this direction."""

    def __init__(
        self,
        *,
        kind: str,
        layout: str,
        io_backend: str,
        direction: str,
        reason: str,
        io_backends: Sequence[str] = (),
        layouts: Sequence[str] = (),
        pair: tuple[str, str] | None = None,
        pool: str | None = None,
    ) -> None:
        self.kind = kind
        self.layout = layout
        self.io_backend = io_backend
        self.direction = direction
        self.reason = reason
        """Why not, as a sentence without its full stop."""
        self.io_backends = tuple(io_backends)
        """What copies this layout in this direction."""
        self.layouts = tuple(layouts)
        """What this io backend copies in this direction."""
        self.pair = pair
        """An (io backend, layout) that works, where changing one of them alone does not help."""
        self.pool = pool
        """The member of a group that it is about, when there are several."""
        super().__init__(f"{self._asked()}: {reason}. {self._offer()}")

    def of(self, pool: str) -> UnsupportedPairError:
        """Return the same refusal, of one member of a group."""
        return UnsupportedPairError(
            kind=self.kind,
            layout=self.layout,
            io_backend=self.io_backend,
            direction=self.direction,
            reason=self.reason,
            io_backends=self.io_backends,
            layouts=self.layouts,
            pair=self.pair,
            pool=pool,
        )

    def _asked(self) -> str:
        verb = "back up" if self.direction == "backup" else str(self.direction)
        where = f"{self.kind}, pool {self.pool!r}" if self.pool else str(self.kind)
        return f"io_backend {one_of([self.io_backend])} cannot {verb} layout {one_of([self.layout])} ({where})"

    def _offer(self) -> str:
        layout, io_backend = one_of([self.layout]), one_of([self.io_backend])
        if self.io_backend == "auto":
            return self._offer_of_auto()
        first = f"eep {layout} and use io_backend {one_of(self.io_backends)}"
        second = f"eep {io_backend} and use layout {one_of(self.layouts)}"
        # 1 both ways out, 2 another io backend, 3 another layout, 4 both must change, or nothing helps.
        if self.io_backends and self.layouts:
            return f"K{first}; or k{second}."
        if self.io_backends:
            return f"K{first}."
        if self.layouts:
            return f"K{second}."
        alone = f"No other io backend copies {layout} here, and {io_backend} copies no other layout"
        if self.pair:
            return f"{alone}. Use io_backend {one_of(self.pair[:1])} with layout {one_of(self.pair[1:])}."
        return f"{alone}."

    def _offer_of_auto(self) -> str:
        """Return what helps where any io backend would have done."""
        if self.io_backends:
            return f"Use io_backend {one_of(self.io_backends)}."
        if self.layouts:
            return f"Use layout {one_of(self.layouts)}."
        if self.pair:
            return f"Use io_backend {one_of(self.pair[:1])} with layout {one_of(self.pair[1:])}."
        return "No io backend copies anything here."


class UnknownNameError(OffloadError, ValueError):
    """A name that is none of the choices."""

    def __init__(
        self, what: str, name: object, choices: Iterable[str], *, without: str = ""
    ) -> None:
        self.what = what
        """What kind of name it is, as the caller writes it: `io_backend`, `layout`, `member`."""
        self.name = name
        self.choices = tuple(str(choice) for choice in choices)
        close = get_close_matches(str(name), self.choices, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else "."
        offered = ", ".join(repr(choice) for choice in self.choices) or "none"
        # `without` is what to say where there are no choices at all.
        ends = f"Choices: {offered}." if self.choices or not without else without
        super().__init__(f"unknown {what} {name!r}{hint} {ends}")

    @classmethod
    def layer(cls, name: str, names: Iterable[str], *, num_layers: int) -> UnknownNameError:
        """Return the error for a layer's name that is none of `names`."""
        without = f"Layers have no names here: use 0 to {num_layers - 1}, or give layer_names=."
        return cls("layer", name, names, without=without)


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


def told(error: BaseException) -> str:
    """Return an error's repr, or its name where that cannot be had: it is not ours, and may do anything."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - the error's own fault
        return type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the same
        return ""


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


class OutOfPagesError(OffloadError):
    """The allocator has fewer free pages than asked for."""

    def __init__(
        self,
        *,
        needed: int,
        free: int,
        locked: int = 0,
        contiguous: bool = False,
        pool: str | None = None,
    ) -> None:
        self.needed = needed
        self.free = free
        self.locked = locked
        """Freed pages that come back when the copies that use them have landed."""
        self.contiguous = contiguous
        self.pool = pool
        """The member of a group that it is about, when there are several."""
        asked = f"{needed} contiguous pages" if contiguous else f"{needed} pages"
        where = f" of pool {pool!r}" if pool else ""
        text = f"{asked}{where} are needed, {free} are free and {locked} are locked. "
        # 1 waiting helps, 2 pages are there but scattered, 3 only freeing helps.
        if not contiguous and locked and free + locked >= needed:
            text += (
                "Locked pages come back when their copies have landed: await idle(), then retry."
            )
        elif contiguous and free >= needed:
            text += "No run of free pages is that long: allocate without contiguous=True."
        else:
            text += "Free pages that are no longer used, or make the pool larger."
        super().__init__(text)


class OutOfMemoryError(MemoryError, OffloadError):
    """The system, or the device, does not have the memory that a pool asks for."""

    def __init__(self, call: str, *, num_pages: int, nbytes: int, where: str) -> None:
        self.call = call
        """What was called: `HostPool.allocate`."""
        self.num_pages = num_pages
        self.nbytes = nbytes
        """Bytes of the whole pool."""
        self.where = where
        """What does not have them: `this machine`, `cuda:0`."""
        size = f"{nbytes} bytes ({nbytes / (1 << 30):.1f} GiB)"
        super().__init__(
            f"{call}: {counted(num_pages, 'page')} take {size}, and {where} does not have them. "
            "Pass a smaller num_pages."
        )


class SchedulerClosedError(OffloadError):
    """The scheduler is closed, or can serve no more: its loop has ended, or its device is lost."""

    def __init__(self, asked: str = "submit", *, gone: str = "", remedy: str = "") -> None:
        self.asked = asked
        self.gone = gone
        """What happened: `the device is lost`; empty: it was closed."""
        self.remedy = remedy or (
            "Nothing was queued. Submit before the block that opened it ends, or open another."
        )
        super().__init__(f"cannot {asked}: {gone or 'the scheduler is closed'}. {self.remedy}")


class TransferFailed(OffloadError):
    """It broke; the cause is `__cause__`."""

    def __init__(
        self,
        transfer: str,
        *,
        layer: int | None = None,
        cause: BaseException | None = None,
        leaves: str = "",
    ) -> None:
        self.transfer = transfer
        """Which one, as its repr names it: `load 12`."""
        self.layer = layer
        """The layer whose copy raised, where that is known."""
        self.leaves = leaves
        """What it leaves in its pages, as a sentence; empty where that is not known."""
        super().__init__(f"{transfer} {self._ended(cause)}.{' ' if leaves else ''}{leaves}")
        self.__cause__ = cause

    def _ended(self, cause: BaseException | None) -> str:
        at = "" if self.layer is None else f" at layer {self.layer}"
        return f"failed{at}{_why(cause)}"

    @classmethod
    def source(cls, transfer: str, text: str) -> TransferFailed:
        """Return the cause of a failure that lies in another request, which wrote what was to be read."""
        error = cls(transfer)
        error.args = (text,)
        return error


class TransferCancelled(TransferFailed):
    """It was cancelled: by `Transfer.cancel`, or because its scheduler closed before it was issued."""

    def _ended(self, cause: BaseException | None) -> str:
        return "was cancelled"


def left_behind(direction: str, *, landed: int | None, lost: bool = False) -> str:
    """Return what a transfer that failed or was cancelled leaves in its pages, as a sentence.

    Args:
        landed: How many layers had landed; None: it was never issued.
        lost: Whether it will never be known if the others have.
    """
    if landed is None:
        return "Nothing was copied."
    until = "for ever" if lost else "until the copies already issued have landed"
    lasts = f"its pages stay locked {until}."
    if direction == "load":
        return (
            f"{'Layers that had landed are usable' if landed else 'No layer had landed'}; {lasts}"
        )
    hold = "hold" if landed else "may hold"
    return f"Its host pages {hold} part of it, and cannot be loaded until they are backed up again; {lasts}"


def _why(cause: BaseException | None) -> str:
    """Return a cause as the end of a sentence, without its full stop; our own need no class's name."""
    if cause is None:
        return ""
    text = _text(cause).rstrip(". ")
    if isinstance(cause, TransferFailed):
        return f": {text}"
    return f": {type(cause).__name__}: {text}".rstrip(": ")


class InvalidTransitionError(OffloadError):
    """A defect of offload: an event that this state cannot have. Carries the transfer's story."""

    def __init__(self, *, event: str, state: str, story: Sequence[str] = ()) -> None:
        self.event = event
        self.state = state
        self.story = tuple(story)
        """What happened to it so far, oldest first."""
        told = "; ".join(self.story) or "nothing"
        super().__init__(
            f"event {event!r} in state {state!r} has no transition. This is a bug in offload: "
            f"report it with this story: {told}."
        )
