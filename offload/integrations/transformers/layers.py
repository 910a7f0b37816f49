"""The cache's layers, by what a layer keeps: tokens, an index beside them, a state, or tokens and a state.

`PagedLayer` serves full and sliding-window attention and MLA alike, because all are views of shape
[1, H, S, D]. Lengths and masks are metadata: `generate()` asks for them before any layer runs, and they are
right while the bytes are still being loaded. Each layer waits for its own bytes alone, when it is reached.

Tokens count once the last attention layer has written them: a forward that raises half way leaves no
trace of them, for the next one writes over what it wrote. A state is written in place.
"""

# Axes: S tokens of the session, H kv heads, D and Dv head dims of K and V, q tokens of a forward, X index dim.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from offload import GeometryError, RequestError
from offload.integrations.transformers.kept import KeptLayer, StatePart
from offload.integrations.transformers.residency import Residency
from offload.integrations.transformers.slots import Slots


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Attention: all tokens are kept, those in sight are returned.

    Args:
        window: Tokens that a query sees, itself included; None: all.
        last: Whether it is the last layer that keeps tokens, with which they count.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    _num_parts = 1
    """Parts of a token that are written apart."""

    def __init__(
        self, residency: Residency, layer: int, *, window: int | None = None, last: bool
    ) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
        self._residency = residency
        self._layer = layer
        self._window = window
        self._last = last
        self._written: set[str] = set()

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the pool exists already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens behind the cached ones, and return all that a query may see.

        Shapes:
            key_states: [1, H, q, D]; value_states: [1, H, q, Dv]. Returned: the same with q replaced
                by the cached tokens in sight plus q, as views of the pool.

        Raises:
            RequestError: No `use()`, more than one sequence, or no room. Nothing was written.
            GeometryError: Another shape or dtype than the pool's. Nothing was written.
            TransferFailed: The load of this layer failed.
        """
        slots = self._residency.reach(self._layer)
        keys, values = slots.keys, slots.values
        assert keys is not None
        assert values is not None
        _check_batch(key_states)
        _check_like(f"K of layer {self._layer}", keys, key_states, dims=(1, 3))
        _check_like(f"V of layer {self._layer}", values, value_states, dims=(1, 3))
        ledger = self._residency.ledger
        ledger.check_room(key_states.shape[2])
        start = ledger.tokens
        end = start + key_states.shape[2]
        # Before writing, not only before reading: the last loaded page may reach past `start`.
        self._residency.fence(self._layer)
        keys[:, :, start:end].copy_(key_states.detach())
        values[:, :, start:end].copy_(value_states.detach())
        self._count("tokens", end)
        first = self._first_in_sight(start)
        return keys[:, :, first:end], values[:, :, first:end]

    def _count(self, part: str, end: int) -> None:
        """Count the tokens when the last layer has written each part that it keeps, in any order."""
        if not self._last:
            return
        self._written.add(part)  # again, if a forward stopped between two parts
        if len(self._written) == self._num_parts:
            self._written.clear()
            self._residency.ledger.commit(end)

    def _first_in_sight(self, start: int) -> int:
        # A query sees itself and the `window - 1` tokens before it.
        return 0 if self._window is None else max(start - self._window + 1, 0)

    def get_seq_length(self) -> int:
        """Return the tokens that all layers have."""
        return self._residency.ledger.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` will return, and the position of the first."""
        start = self.get_seq_length()
        first = self._first_in_sight(start)
        return start - first + query_length, first

    def get_max_length(self) -> int:
        """Return how many tokens fit in the reserved pages; a window's is the window, as transformers says."""
        return self._residency.ledger.capacity if self._window is None else self._window


class IndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """Sparse attention: a key per token for the index, beside K and V."""

    _num_parts = 2

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' index keys behind the cached ones, and return all.

        Shapes:
            indexer_key_states: [1, q, X]. Returned: [1, S + q, X], a view of the pool.

        Raises:
            RequestError, GeometryError, TransferFailed: As `update`.
        """
        indexer = self._residency.reach(self._layer).indexer
        assert indexer is not None
        _check_batch(indexer_key_states)
        _check_like(f"indexer keys of layer {self._layer}", indexer, indexer_key_states, dims=(2,))
        ledger = self._residency.ledger
        ledger.check_room(indexer_key_states.shape[1])
        start = ledger.tokens
        end = start + indexer_key_states.shape[1]
        self._residency.fence(self._layer)
        indexer[:, start:end].copy_(indexer_key_states.detach())
        self._count("indexer", end)
        return indexer[:, :end]


class StateLayer(LinearAttentionLayer):
    """A conv state, a recurrent state, or both: tensors of fixed size in the session's slot.

    A model may write over what it is handed instead of calling `update_*`, so it is handed the slot itself.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, residency: Residency, layer: int, *, state: tuple[StatePart, ...]) -> None:
        # Not the base's: it would set as attributes what is looked up here when it is asked for.
        conv = {part.number: part for part in state if part.role == "conv"}
        recurrent = {part.number for part in state if part.role == "recurrent"}
        numbers = range(1 + max(part.number for part in state))
        self.number_of_states = len(numbers)
        self.is_conv_states_initialized = {number: number in conv for number in numbers}
        self.is_recurrent_states_initialized = {number: number in recurrent for number in numbers}
        self.conv_kernel_size = {number: part.shape[-1] for number, part in conv.items()}
        self.record_past = False
        self._residency = residency
        self._layer = layer
        self._state = {(part.role, part.number): part for part in state}
        self.set_previous(False)

    def set_previous(self, previous: bool) -> None:
        """Say whether the slot holds the state of tokens before, or nothing yet."""
        self._held = set(self._state) if previous else set()
        # As transformers does: a layer has a previous state once it has a conv state.
        self.has_previous_state = {
            number: previous and conv for number, conv in self.is_conv_states_initialized.items()
        }

    # Attributes in the base. Here they are looked up when a model asks, which is when they have to be there.
    @property
    def conv_states(self) -> Mapping[int, torch.Tensor]:  # type: ignore[override]
        """By number, the session's own: strides over the pool."""
        return self._reach().conv

    @property
    def recurrent_states(self) -> Mapping[int, torch.Tensor]:  # type: ignore[override]
        """By number, the session's own: strides over the pool."""
        return self._reach().recurrent

    def _reach(self) -> Slots:
        slots = self._residency.reach(self._layer)
        self._residency.fence(self._layer)
        return slots

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Write the last of the new tokens' inputs over the state, and return those before them too.

        Shapes:
            conv_states: [1, C, q]; returned: [1, C, kernel + q], or [1, C, q] where nothing came before.

        Raises:
            RequestError: No `use()`, gradients are on, more than one sequence.
            GeometryError: Another shape or dtype than the pool's.
            TransferFailed: The load of this layer failed.
        """
        self._check("conv", state_idx, conv_states, dims=range(1, conv_states.dim() - 1))
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Write over the state, and return it. Raises as `update_conv_state`."""
        dims = range(1, recurrent_states.dim())
        self._check("recurrent", state_idx, recurrent_states, dims=dims)
        return super().update_recurrent_state(recurrent_states, state_idx)

    def _check(self, role: str, number: int, states: torch.Tensor, *, dims: Sequence[int]) -> None:
        """Refuse what the slot does not hold. Later states may have another dtype: the slot's stands."""
        part = self._state.get((role, number))
        what = f"{role} state {number} of layer {self._layer}"
        if part is None:
            raise GeometryError(
                what, expected={"states": list(self._state)}, got={"states": "one more"}
            )
        _check_batch(states)
        slots = self._reach()
        held = (slots.conv if role == "conv" else slots.recurrent)[number]
        first = (role, number) not in self._held
        _check_like(what, held, states, dims=dims, dtype=first)
        self._held.add((role, number))

    def reset(self) -> None:
        """Forget the state. The slot stays."""
        self.set_previous(False)


class HybridLayer(StateLayer, PagedLayer):  # type: ignore[no-untyped-call, misc]
    """Attention and a state side by side in one layer."""

    def __init__(
        self,
        residency: Residency,
        layer: int,
        *,
        state: tuple[StatePart, ...],
        window: int | None = None,
        last: bool,
    ) -> None:
        PagedLayer.__init__(self, residency, layer, window=window, last=last)
        StateLayer.__init__(self, residency, layer, state=state)

    def get_max_length(self) -> int:
        """Return what the attention part says."""
        return PagedLayer.get_max_length(self)


def cache_layer(
    residency: Residency, layer: int, kept: KeptLayer, *, last: bool
) -> CacheLayerMixin | LinearAttentionLayer | DummyLayer:
    """Return the cache's layer for what a model layer keeps.

    Args:
        last: Whether it is the model's last that keeps tokens.
    """
    if kept.attention is not None and kept.state is not None:
        return HybridLayer(residency, layer, state=kept.state, window=kept.window, last=last)
    if kept.state is not None:
        return StateLayer(residency, layer, state=kept.state)
    if kept.attention is None:
        return DummyLayer()  # type: ignore[no-untyped-call]
    if kept.indexer is not None:
        return IndexedLayer(residency, layer, last=last)
    return PagedLayer(residency, layer, window=kept.window, last=last)


def _check_batch(states: torch.Tensor) -> None:
    if states.shape[0] != 1:
        raise RequestError(
            f"a session is one sequence, and this forward has {states.shape[0]}: "
            "beams and batches need a session each",
            value=states.shape[0],
        )


def _check_like(
    what: str, slot: torch.Tensor, states: torch.Tensor, *, dims: Sequence[int], dtype: bool = True
) -> None:
    """Refuse states that the pool does not hold: sizes in `dims`, dtype and device, all at once."""
    same = all(dim < states.dim() and states.shape[dim] == slot.shape[dim] for dim in dims)
    if same and states.device == slot.device and (not dtype or states.dtype == slot.dtype):
        return
    expected, got = (
        {
            "sizes": [tensor.shape[dim] for dim in dims if dim < tensor.dim()],
            "dtype": tensor.dtype if dtype else "any",
            "device": tensor.device,
        }
        for tensor in (slot, states)
    )
    differ = [fact for fact in expected if expected[fact] != got[fact]]
    raise GeometryError(
        what,
        expected={fact: expected[fact] for fact in differ},
        got={fact: got[fact] for fact in differ},
    )
