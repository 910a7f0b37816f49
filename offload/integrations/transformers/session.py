"""Sessions: conversations whose cache moves between device and host pages.

spec = pool_spec(model.config, page_size=16, dtype=model.dtype)
device = offload.DevicePool.allocate(spec, num_pages=256)
host = offload.HostPool.like(device, num_pages=2048, layout="page_first_direct")
async with offload.open_scheduler(device, host) as scheduler:
    sessions = Sessions(model.config, scheduler, device=device, host=host)
    chat = sessions.open(max_tokens=2048)              # reserves device pages
    with chat.use() as cache:
        await anyio.to_thread.run_sync(forward, cache)     # model.generate(..., past_key_values=cache)
    await chat.evict()                                 # backs up what is new, frees the device pages
    await chat.load()                                  # takes device pages; the copy runs from now on
    with chat.use() as cache:
        await anyio.to_thread.run_sync(forward, cache)     # each layer waits for its own pages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from offload import (
    DevicePool,
    GeometryError,
    HostPool,
    RequestError,
    Scheduler,
    Transfer,
    TransferFailed,
)
from offload.integrations.transformers.cache import PagedCache, Residency, View
from offload.integrations.transformers.ledger import Ledger
from offload.integrations.transformers.model import CachedShape, cached_shape, pool_spec

Pages = npt.NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class Sessions:
    """Opens sessions of one model on one scheduler. Owns nothing: the pools and the scheduler are yours.

    Raises:
        GeometryError: The model's cache cannot be carried, or the device pool is not the one that
            `pool_spec` describes.
    """

    def __init__(
        self, config: PreTrainedConfig, scheduler: Scheduler, *, device: DevicePool, host: HostPool
    ) -> None:
        spec = attrs.evolve(device.spec, layer_names=None)
        dtype = spec.components[0].dtype
        wanted = pool_spec(config, page_size=spec.page_size, dtype=dtype)
        if spec != wanted:
            raise GeometryError("the device pool", expected={"spec": wanted}, got={"spec": spec})
        self._shape = cached_shape(config)
        self._scheduler = scheduler
        self._device = device
        self._host = host
        self._slots = _slots(device, self._shape)

    def open(self, *, max_tokens: int) -> Session:
        """Reserve device pages for a new, empty session.

        Args:
            max_tokens: What the session may grow to, prompt and answers together.

        Raises:
            OutOfPagesError: The device pool has no such run of free pages. Nothing was reserved.
        """
        if max_tokens < 1:
            raise RequestError(f"max_tokens is at least 1, got {max_tokens}", value=max_tokens)
        page_size = self._device.spec.page_size
        capacity = -(-max_tokens // page_size) * page_size
        cache = PagedCache(self._shape, Residency(Ledger(page_size, capacity)))
        session = Session(cache, self._scheduler, self._device, self._host, self._slots)
        session._take(self._device.pages.alloc(capacity // page_size, contiguous=True), load=None)
        return session


class Session:
    """One conversation: a `past_key_values` whose pages are on the device, on the host, or on both.

    Belongs to the scheduler's loop: its coroutines run there. The block of `use` may hand the cache to
    any one thread.
    """

    def __init__(
        self,
        cache: PagedCache,
        scheduler: Scheduler,
        device: DevicePool,
        host: HostPool,
        slots: Sequence[View],
    ) -> None:
        self.cache = cache
        """The `past_key_values` of every forward of this session. Updated only inside `use`."""
        self._residency = cache.residency
        self._ledger = cache.residency.ledger
        self._scheduler = scheduler
        self._device = device
        self._host = host
        self._slots = slots
        self._device_pages: Pages | None = None
        self._host_pages: Pages = NO_PAGES
        self._load: Transfer | None = None
        self._busy: str | None = None
        self._backing_up = anyio.Lock()

    def __repr__(self) -> str:
        where = "resident" if self.resident else "evicted"
        return (
            f"<Session {self.tokens}/{self._ledger.capacity} tokens, "
            f"{self._ledger.backed_up} backed up, {where}{f', {self._busy}' if self._busy else ''}>"
        )

    @property
    def tokens(self) -> int:
        """Tokens cached, on whichever side."""
        return self._ledger.tokens

    @property
    def resident(self) -> bool:
        """Whether it holds device pages; a load may still be filling them."""
        return self._device_pages is not None

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that its forwards have waited for loads so far."""
        return self._residency.waited_ns

    @contextmanager
    def use(self) -> Iterator[PagedCache]:
        """Lend the cache to a forward. Until the block ends, `evict`, `load` and `close` are refused.

        Raises:
            RequestError: The session is evicted, closed, or busy with something else.
        """
        if not self.resident and self._busy is None:
            raise RequestError("the session is evicted: `await session.load()` first")
        with self._exclusively("used by a forward"):
            self._residency.in_use = True
            try:
                yield self.cache
            finally:
                self._residency.in_use = False
                self._check_load()

    async def backup(self) -> int:
        """Copy to the host what it lacks, wait until that settled, and return the bytes moved.

        Only new pages move. The last page, when it was backed up half full and has grown, is new
        again. Tokens count as backed up only when their copy is done.

        Raises:
            OutOfPagesError: The host pool is full. Nothing was queued.
            TransferFailed: The copy, or the load before it, failed. Nothing counts as backed up.
        """
        async with self._backing_up:
            await self._await_load()
            indices = self._ledger.begin_backup()
            if not indices or self._device_pages is None:
                return 0
            self._reserve_host(indices.stop)
            transfer = await self._scheduler.backup(
                device_pages=self._device_pages[indices.start : indices.stop],
                host_pages=self._host_pages[indices.start : indices.stop],
            )
            await transfer
            self._ledger.end_backup()
            return transfer.nbytes

    async def evict(self) -> int:
        """Back up, give the device pages back, and return the bytes moved.

        Raises:
            RequestError: A forward is using the session, or it is evicted already.
            OutOfPagesError, TransferFailed: As `backup`. The session stays as it was.
        """
        if not self.resident and self._busy is None:
            raise RequestError("the session is evicted already")
        with self._exclusively("being evicted"):
            nbytes = await self.backup()
            self._release_device()
        return nbytes

    async def load(
        self, *, priority: int = 0, deadline: float | None = None, after: object = "compute"
    ) -> Transfer:
        """Take device pages and submit the load of all tokens. Returns when it is admitted.

        The next forward may start at once: each layer waits for its own pages. Await the transfer
        before you publish what that forward computed; on a GPU a failure may come after its fences.

        Raises:
            OutOfPagesError: The device pool has no such run of free pages. The session stays evicted.
            RequestError: The session is resident already.
        """
        if self.resident:
            raise RequestError("the session is resident already")
        with self._exclusively("being loaded"):
            num_pages = self._ledger.num_pages(self.tokens)
            reserved = self._ledger.num_pages(self._ledger.capacity)
            pages = self._device.pages.alloc(reserved, contiguous=True)
            try:
                transfer = await self._scheduler.load(
                    host_pages=self._host_pages[:num_pages],
                    device_pages=pages[:num_pages],
                    priority=priority,
                    deadline=deadline,
                    after=after,
                )
            except BaseException:
                self._device.pages.free(pages)
                raise
            self._take(pages, load=transfer)
        return transfer

    def close(self) -> None:
        """Give all pages back. Pages that still move are reused only after they have landed.

        Raises:
            RequestError: A forward is using the session, or a coroutine is moving it.
        """
        with self._exclusively("closed"):
            if self.resident:
                self._release_device()
            self._host.pages.free(self._host_pages)
            self._host_pages = NO_PAGES
            self._ledger.crop(-self.tokens)
        self._busy = "closed"

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if self._busy is not None:
            raise RequestError(f"the session is {self._busy}; it cannot be {what} now")
        self._busy = what
        try:
            yield
        finally:
            self._busy = None

    def _take(self, pages: Pages, *, load: Transfer | None) -> None:
        """Hold these device pages; `load` is filling them."""
        self._device_pages = pages
        self._load = self._residency.load = load
        page_size = self._ledger.page_size
        start, length = int(pages[0]) * page_size, len(pages) * page_size
        self._residency.views = [
            (keys.narrow(2, start, length), values.narrow(2, start, length))
            for keys, values in self._slots
        ]

    def _release_device(self) -> None:
        assert self._device_pages is not None
        pages, self._device_pages = self._device_pages, None
        self._load = self._residency.load = None
        self._residency.views = None
        self._device.pages.free(pages)

    def _reserve_host(self, num_pages: int) -> None:
        """Own at least so many host pages. A failed backup keeps them for the next try."""
        missing = num_pages - len(self._host_pages)
        if missing > 0:
            fresh = self._host.pages.alloc(missing)
            self._host_pages = np.concatenate([self._host_pages, fresh])

    async def _await_load(self) -> None:
        """Wait for the load that is under way; when it failed, fall back to what the host has."""
        if self._load is None:
            return
        try:
            await self._load
        except TransferFailed:
            self._check_load()
            raise
        self._load = self._residency.load = None

    def _check_load(self) -> None:
        """After a failed load, be evicted again with the tokens that the host has: try `load` again."""
        if self._load is None or not self._load.done or self._residency.in_use:
            return
        try:
            self._load.result(timeout=0)
        except TransferFailed:
            self._release_device()
            self._ledger.roll_back()
        else:
            self._load = self._residency.load = None


def _slots(device: DevicePool, shape: CachedShape) -> list[View]:
    """Return K and V of every token slot of the pool, one pair per pool layer.

    Shapes:
        [1, H, P * T, D] and [1, H, P * T, Dv], as strides over the pool's [P, T, H, D].

    Raises:
        GeometryError: The pool's order of axes has no such strides.
    """
    made: list[View] = []
    for layer in range(device.num_layers):
        parts = [_one_run(device, each.name, each.dtype, layer) for each in device.spec.components]
        if shape.latent:
            parts = list(torch.split(parts[0], [shape.key_dim, shape.value_dim], dim=-1))
        made.append((parts[0], parts[1]))
    return made


def _one_run(device: DevicePool, component: str, dtype: torch.dtype, layer: int) -> torch.Tensor:
    pages = device.view(component, layer).view(dtype)
    try:
        slots = pages.view(-1, *pages.shape[2:])
    except RuntimeError:
        raise GeometryError(
            f"component {component!r} of the device pool",
            expected={"axes": "tokens of neighbouring pages at one stride, such as 'p t h d'"},
            got={"axes": f"strides {pages.stride()} of shape {tuple(pages.shape)} [P, T, H, D]"},
            remedy="DevicePool.allocate makes such a pool.",
        ) from None
    return slots.transpose(0, 1).unsqueeze(0)
