"""A transformers cache whose keys and values are pages of a device pool.

Lengths and masks are metadata: `generate()` asks for them before any layer runs, and they are right
while the bytes are still being loaded. `update` of a layer waits for that layer alone, writes the new
tokens in place and returns views; nothing is concatenated and nothing is copied twice.

Tokens count once the last layer has written them. A forward that raises half way leaves no trace: the
next one writes over what it wrote.
"""

# Axes: S tokens of the session (its pages are contiguous, so P * T folds into S), H kv heads, D head dim.

from __future__ import annotations

import time
from typing import NoReturn

import attrs
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from offload import GeometryError, RequestError, Transfer
from offload.integrations.transformers.ledger import Ledger
from offload.integrations.transformers.model import CachedLayer, CachedShape

View = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer of a session, [1, H, S, D] and [1, H, S, Dv]: strided views of the pool."""


@attrs.define(eq=False)
class Residency:
    """Where a session's keys and values are now, and whether a forward may touch them."""

    ledger: Ledger
    """Tokens: how many there are, fit, and have been backed up."""

    views: list[View] | None = None
    """One per pool layer; None while the session holds no device pages."""

    load: Transfer | None = None
    """The load that fills the views, until a forward has passed all its layers."""

    in_use: bool = False
    """Inside `with session.use()`."""

    waited_ns: int = 0
    """Nanoseconds that forwards have waited for loads, over the life of the session."""

    def fence(self, pool_layer: int) -> None:
        """Order this thread, or its stream, after the layer's bytes."""
        if self.load is None:
            return
        start = time.perf_counter_ns()
        self.load.fence(pool_layer)
        self.waited_ns += time.perf_counter_ns() - start


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Full attention: every cached token is returned."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, residency: Residency, pool_layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._residency = residency
        self._pool_layer = pool_layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool exists already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> View:
        """Write the new tokens behind the cached ones, and return all that a query may see.

        Shapes:
            key_states: [1, H, q, D]; value_states: [1, H, q, Dv]. Returned: the same with q replaced
                by the cached tokens in sight plus q, as views of the pool.

        Raises:
            RequestError: No `use()`, more than one sequence, or no room. Nothing was written.
            GeometryError: Another shape or dtype than the pool's. Nothing was written.
            TransferFailed: The load of this layer failed.
        """
        residency = self._residency
        keys, values = self._checked(key_states, value_states)
        start = residency.ledger.tokens
        end = start + key_states.shape[2]
        # Before writing, not only before reading: the last loaded page may reach past `start`.
        residency.fence(self._pool_layer)
        keys[:, :, start:end].copy_(key_states.detach())
        values[:, :, start:end].copy_(value_states.detach())
        if self._pool_layer + 1 == len(residency.views or ()):
            residency.ledger.commit(end)
        first = self._first_in_sight(start)
        return keys[:, :, first:end], values[:, :, first:end]

    def _first_in_sight(self, start: int) -> int:
        return 0

    def _checked(self, key_states: torch.Tensor, value_states: torch.Tensor) -> View:
        residency = self._residency
        if residency.views is None:
            raise RequestError("the session is evicted: `await session.load()` first")
        if not residency.in_use:
            raise RequestError("run the forward inside `with session.use() as cache:`")
        keys, values = residency.views[self._pool_layer]
        if key_states.shape[0] != 1:
            raise RequestError(
                f"a session is one sequence, and this forward has {key_states.shape[0]}: "
                "beams and batches need a session each",
                value=key_states.shape[0],
            )
        _check("K", self._pool_layer, keys, key_states)
        _check("V", self._pool_layer, values, value_states)
        residency.ledger.check_room(key_states.shape[2])
        return keys, values

    def get_seq_length(self) -> int:
        """Return the tokens that all layers have."""
        return self._residency.ledger.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` will return, and the position of the first."""
        start = self.get_seq_length()
        first = self._first_in_sight(start)
        return start - first + query_length, first

    def get_max_length(self) -> int:
        """Return how many tokens fit in the reserved pages."""
        return self._residency.ledger.capacity


class PagedSlidingLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """Sliding-window attention: all tokens are kept, those in the window are returned."""

    is_sliding = True

    def __init__(self, residency: Residency, pool_layer: int, window: int) -> None:
        super().__init__(residency, pool_layer)
        self.sliding_window = window

    def _first_in_sight(self, start: int) -> int:
        # A query sees itself and the `window - 1` tokens before it.
        return max(start - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        """Return the window, as transformers' own sliding layer does."""
        return self.sliding_window


class PagedCache(Cache):
    """The `past_key_values` of one session. Made by `Sessions.open`, used inside `session.use()`."""

    def __init__(self, shape: CachedShape, residency: Residency) -> None:
        super().__init__(layers=[_layer(layer, residency) for layer in shape.layers])
        self.residency = residency

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, on the device and on the host.

        Raises:
            RequestError: A positive number, as in transformers, or more tokens than there are.
        """
        self.residency.ledger.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens. The pages stay."""
        self.residency.ledger.crop(-self.residency.ledger.tokens)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("reorder_cache (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("batch_select_indices")

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse: a copy would share the pages, and write over them."""
        raise self._one_sequence("deepcopy")

    def _one_sequence(self, what: str) -> RequestError:
        return RequestError(
            f"{what} cannot run on a session's cache: a session is one sequence in pages of its "
            "own. Use num_beams=1, and open a session per sequence."
        )


def _layer(layer: CachedLayer, residency: Residency) -> CacheLayerMixin | DummyLayer:
    if layer.pool_layer is None:
        return DummyLayer()  # type: ignore[no-untyped-call]
    if layer.window is None:
        return PagedLayer(residency, layer.pool_layer)
    return PagedSlidingLayer(residency, layer.pool_layer, layer.window)


def _check(name: str, layer: int, view: torch.Tensor, states: torch.Tensor) -> None:
    """Refuse states that the pool does not hold: (heads, dim), dtype and device, all at once."""
    expected = {"(heads, dim)": (view.shape[1], view.shape[3]), "dtype": view.dtype}
    got = {"(heads, dim)": (states.shape[1], states.shape[3]), "dtype": states.dtype}
    if expected != got or view.device != states.device:
        raise GeometryError(
            f"{name} of pool layer {layer}",
            expected={**expected, "device": view.device},
            got={**got, "device": states.device},
        )
