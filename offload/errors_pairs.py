"""Names that are none of the choices, and pairs of layout and io backend that cannot be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from offload.errors_base import OffloadError, one_of, shown


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
        super().__init__(f"unknown {what} {shown(name)}{hint} {ends}")

    @classmethod
    def layer(cls, name: str, names: Iterable[str], *, num_layers: int) -> UnknownNameError:
        """Return the error for a layer's name that is none of `names`."""
        without = f"Layers have no names here: use 0 to {num_layers - 1}, or give layer_names=."
        return cls("layer", name, names, without=without)
