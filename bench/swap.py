"""transformers' own swap of continuous batching, driven for one request: the baseline of `serving`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

REQUEST = "turn"


class Swap:
    """One request of so many cached tokens, on a cache with transformers' default page size."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        one_rank = DistributedHelper(None, None)
        config = ContinuousBatchingConfig(
            num_blocks=2 + 2 * tokens // 256,
            max_batch_tokens=256,
            max_memory_percent=0.5,
            use_async_batching=False,
        )
        cache = PagedAttentionCache(model.config, config, "cpu", one_rank, dtype=model.dtype)
        scheduler = FIFOScheduler(cache, None, max_requests_per_batch=8)
        with _plain_memory():
            self._manager = OffloadingManager(cache, scheduler, 1.0, 0.8, None, one_rank)
        self._state = RequestState(REQUEST, [0] * tokens)
        assert cache.can_store_request_tokens(self._state, tokens), "the cache is too small"
        self._tables = {
            name: list(allocator.block_table[REQUEST])
            for name, allocator in cache.cache_allocators.items()
        }

    def out(self) -> None:
        """Copy the request to the host."""
        swapped = self._manager._offload_to_cpu([self._state], {REQUEST: self._tables})
        assert swapped == {REQUEST}, "the swap pool is too small"

    def back(self) -> None:
        """Copy it back, as the manager does before the forward of a batch. Blocks until it is there."""
        self._manager.restore_scheduled_requests([FutureRequestState(self._state, False, {}, 0)])


@contextmanager
def _plain_memory() -> Iterator[None]:
    """Let the manager allocate without pinning, which a machine without an accelerator refuses."""
    empty = torch.empty

    def plain(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **kwargs)
        return made

    with patch.object(torch, "empty", plain):
        yield
