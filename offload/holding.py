"""`with scheduler.hold():` what one thread submits inside becomes one batch."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import attrs

from offload.submit import Desk, Hold


@attrs.define(eq=False)
class HoldBlock:
    """The block. It may be nested; the outermost one counts."""

    _desk: Desk
    _let_go: Callable[[list[int]], None]
    _holds: list[Hold] = attrs.field(factory=list)

    def __enter__(self) -> None:
        self._holds.append(self._desk.hold())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pieces = self._desk.release(self._holds.pop())
        if pieces:
            self._let_go(pieces)
