"""What happens to calls that were right: no room, a closed scheduler, a copy that broke or was cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors_base import OffloadError, counted, text_of


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
        asked = counted(needed, "contiguous page" if contiguous else "page")
        where = f" of pool {pool!r}" if pool else ""
        text = (
            f"{asked}{where} {_are(needed)} needed, {free} {_are(free)} free and "
            f"{locked} {_are(locked)} locked. "
        )
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


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


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
    """It broke; the cause is `__cause__`.

    Attributes:
        transfer: Which one, as its repr names it: `load 12`.
        layer: The layer whose copy raised, where that is known; else None.
        leaves: What it leaves in its pages, as a sentence; empty where that is not known.
        unprepared: Whether it failed while its copies were prepared, before the first of them.
    """

    def __init__(
        self,
        transfer: str,
        *,
        layer: int | None = None,
        cause: BaseException | None = None,
        leaves: str = "",
        unprepared: bool = False,
    ) -> None:
        self.transfer = transfer
        self.layer = layer
        self.leaves = leaves
        self.unprepared = unprepared
        super().__init__(f"{transfer} {self._ended(cause)}.{' ' if leaves else ''}{leaves}")
        self.__cause__ = cause

    def _ended(self, cause: BaseException | None) -> str:
        at = "" if self.layer is None else f" at layer {self.layer}"
        if self.unprepared:
            at = " while it was prepared"
        return f"failed{at}{_why(cause)}"

    @classmethod
    def source(cls, transfer: str, text: str) -> TransferFailed:
        """Return the cause of a failure that lies in another request, which wrote what was to be read."""
        error = cls(transfer)
        error.args = (text,)
        return error


class TransferCancelled(TransferFailed):
    """It was cancelled: by `Transfer.cancel`, or because its scheduler closed before it was issued.

    Its attributes are those of `TransferFailed`; `layer` is None.
    """

    def _ended(self, cause: BaseException | None) -> str:
        return f"was cancelled{_why(cause)}"


def left_behind(direction: str, *, landed: int | None, lost: bool = False) -> str:
    """Return what a transfer that failed or was cancelled leaves in its pages, as a sentence.

    Args:
        landed: How many layers had landed; None: it was never issued, or never copied.
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
    text = text_of(cause).rstrip(". ")
    if isinstance(cause, TransferFailed):
        return f": {text}"
    return f": {type(cause).__name__}: {text}".rstrip(": ")


class CudaError(OffloadError, RuntimeError):
    """A call of the CUDA driver failed."""

    def __init__(self, call: str, error_code: int, text: str = "") -> None:
        self.call = call
        self.error_code = error_code
        """As the CUDA driver numbers them."""
        detail = f" ({text})" if text else ""
        super().__init__(f"{call} returned CUDA error {error_code}{detail}")


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
