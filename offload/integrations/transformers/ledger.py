"""The token counts of one session: what is cached, what fits, what the host has. No tensors."""

from __future__ import annotations

import threading

import attrs

from offload import RequestError


@attrs.define(eq=False)
class Ledger:
    """Three counts that move under each other's feet: a forward's thread adds and crops tokens while the
    loop backs some up. One lock guards them; each method is one step."""

    page_size: int
    """Tokens per page."""

    capacity: int
    """Tokens that the reserved pages hold."""

    tokens: int = 0
    """Tokens that all layers have."""

    backed_up: int = 0
    """Tokens, from the first, whose bytes the host has."""

    _mark: int = 0
    """What `backed_up` becomes when the running backup lands; a crop lowers it."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def num_pages(self, tokens: int) -> int:
        """Return the pages that so many tokens reach into."""
        return -(-tokens // self.page_size)

    def check_room(self, new: int) -> None:
        """Raise unless `new` more tokens fit.

        Raises:
            RequestError: They do not.
        """
        if self.tokens + new > self.capacity:
            raise RequestError(
                f"{self.tokens} cached and {new} new tokens are {self.tokens + new}, and the session "
                f"has reserved {self.capacity}. Open it with a larger max_tokens.",
                value=self.tokens + new,
            )

    def commit(self, tokens: int) -> None:
        """Count the tokens that a whole forward has written."""
        with self._lock:
            self.tokens = tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, wherever they are.

        Raises:
            RequestError: The number is positive, or more than there are.
        """
        with self._lock:
            if not -self.tokens <= tokens_to_remove <= 0:
                raise RequestError(
                    f"crop takes minus the number of tokens to remove, from {-self.tokens} to 0, "
                    f"got {tokens_to_remove}",
                    value=tokens_to_remove,
                )
            self.tokens += tokens_to_remove
            self.backed_up = min(self.backed_up, self.tokens)
            self._mark = min(self._mark, self.tokens)

    def begin_backup(self) -> range:
        """Return the indices of the session's pages that hold tokens the host lacks.

        A last page that was backed up half full and has grown since is among them again.
        """
        with self._lock:
            self._mark = self.tokens
            if self.backed_up == self.tokens:
                return range(0)
            return range(self.backed_up // self.page_size, self.num_pages(self.tokens))

    def end_backup(self) -> None:
        """Count what the backup begun last has brought to the host."""
        with self._lock:
            self.backed_up = max(self.backed_up, self._mark)

    def roll_back(self) -> None:
        """Forget what the host does not have."""
        with self._lock:
            self.tokens = self._mark = self.backed_up
