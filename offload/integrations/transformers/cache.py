"""A transformers cache whose memory is pages and slots of device pools.

Layers do the work; what concerns the cache as a whole is here: what it forgets, and what it refuses because
a session is one sequence.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers import Cache

from offload import RequestError
from offload.integrations.transformers.kept import Kept
from offload.integrations.transformers.layers import PagedLayer, StateLayer, cache_layer
from offload.integrations.transformers.residency import Residency


class PagedCache(Cache):
    """The `past_key_values` of one session. Made by `Sessions.open`, used inside `session.use()`."""

    def __init__(self, kept: Kept, residency: Residency) -> None:
        super().__init__(
            layers=[
                cache_layer(residency, index, layer, last=index == kept.last_attention)
                for index, layer in enumerate(kept.layers)
            ]
        )
        self.residency = residency

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens, and return all in sight. See `PagedLayer.update`."""
        with self.residency.visit(layer_idx, "update"):
            return super().update(key_states, value_states, layer_idx)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write new index keys, and return all. See `IndexedLayer.update_indexer`."""
        with self.residency.visit(layer_idx, "update indexer"):
            return super().update_indexer(indexer_key_states, layer_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the conv state itself, in the session's slot; None if nothing came before."""
        with self.residency.visit(layer_idx, f"get conv {state_idx}"):
            return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state itself, in the session's slot; None if nothing came before."""
        with self.residency.visit(layer_idx, f"get recurrent {state_idx}"):
            return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Write over the conv state. See `StateLayer.update_conv_state`."""
        with self.residency.visit(layer_idx, f"update conv {state_idx}"):
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Write over the recurrent state. See `StateLayer.update_recurrent_state`."""
        with self.residency.visit(layer_idx, f"update recurrent {state_idx}"):
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many tokens a layer's `update` will return, and the position of the first.

        A model asks for it before its first layer runs. So a forward that has no room is refused here,
        before it has written over a state.

        Raises:
            RequestError: Inside `use()`, for more new tokens than fit.
        """
        if isinstance(self.layers[layer_idx], PagedLayer):
            self.residency.admit(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def is_linear(self) -> list[bool]:
        """Return which layers keep a state and no tokens."""
        return [
            isinstance(layer, StateLayer) and not isinstance(layer, PagedLayer)
            for layer in self.layers
        ]

    def set_previous(self, previous: bool) -> None:
        """Say whether states of tokens before are there, or on their way."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.set_previous(previous)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, on the device and on the host.

        Raises:
            RequestError: A positive number, as in transformers, or more tokens than there are; or the
                model keeps states, which do not say what they were before.
        """
        if tokens_to_remove:
            self._refuse_states("crop")
        self.residency.ledger.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens. The pages stay."""
        self.residency.ledger.crop(-self.residency.ledger.tokens)
        self.set_previous(False)

    def activate_past_recording(self) -> None:
        """Do nothing: tokens are all kept, so that any number can be cropped.

        Raises:
            RequestError: The model keeps states, which assisted generation cannot roll back.
        """
        self._refuse_states("activate_past_recording (assisted generation)")

    def reorder_cache(self, beam_idx: object) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("reorder_cache (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("batch_repeat_interleave")

    def batch_select_indices(self, indices: object) -> NoReturn:
        """Refuse: a session is one sequence."""
        raise self._one_sequence("batch_select_indices")

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse: a copy would share the pages, and write over them."""
        raise self._one_sequence("deepcopy")

    def _refuse_states(self, what: str) -> None:
        stateful = [i for i, layer in enumerate(self.layers) if isinstance(layer, StateLayer)]
        if stateful:
            raise RequestError(
                f"{what} cannot run on this session's cache: layer {stateful[0]} keeps a state, which "
                "cannot be taken back by a token."
            )

    def _one_sequence(self, what: str) -> RequestError:
        return RequestError(
            f"{what} cannot run on a session's cache: a session is one sequence in pages of its "
            "own. Use num_beams=1, and open a session per sequence."
        )
