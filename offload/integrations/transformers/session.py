"""Sessions: conversations whose cache moves between device and host memory.

pools = session_pools(model, page_size=16, num_pages=256, num_host_pages=2048)
async with offload.open_scheduler(pools) as scheduler:
    sessions = Sessions(scheduler)
    chat = sessions.open(max_tokens=2048)                  # reserves device pages
    with chat.use() as cache:
        await anyio.to_thread.run_sync(forward, cache)     # model.generate(..., past_key_values=cache)
    await chat.evict()                                     # backs up what is new, frees the device pages
    await chat.load()                                      # takes device pages; the copy runs from now on
    with chat.use() as cache:
        await anyio.to_thread.run_sync(forward, cache)     # each layer waits for its own bytes

A few models, such as Mamba2, take the cache as `cache_params=` instead of `past_key_values=`.

A model with conv or recurrent states (Mamba, Jamba, Qwen3-Next, ...) takes two numbers more:
`session_pools(..., num_slots=8, num_host_slots=64)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from offload import GroupPages, RequestError, Scheduler, Transfer, TransferFailed
from offload.integrations.transformers.cache import PagedCache
from offload.integrations.transformers.ledger import Ledger
from offload.integrations.transformers.pools import SessionPools
from offload.integrations.transformers.residency import Residency


class Sessions:
    """Opens sessions on one scheduler, which was opened over `session_pools`. Owns nothing.

    Raises:
        RequestError: The scheduler moves the pages of other pools.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        pools = scheduler.group
        if not isinstance(pools, SessionPools):
            raise RequestError(
                f"sessions need a scheduler over the pools of a model, and this one has {pools!r}: "
                "offload.open_scheduler(session_pools(model, ...))"
            )
        self._scheduler = scheduler
        self._pools = pools

    def open(self, *, max_tokens: int) -> Session:
        """Reserve device pages, and a slot for states, for a new and empty session.

        Args:
            max_tokens: What the session may grow to, prompt and answers together. States do not grow: a
                model of states alone is not bounded by it.

        Raises:
            OutOfPagesError: The device pool has no such run of free pages, or no slot. Nothing was
                reserved.
        """
        if max_tokens < 1:
            raise RequestError(f"max_tokens is at least 1, got {max_tokens}", value=max_tokens)
        page_size = self._pools.page_size
        kept = self._pools.kept
        ledger = Ledger(page_size, -(-max_tokens // page_size) * page_size)
        residency = Residency(ledger, kept.keeping if kept.has_states else ())
        session = Session(PagedCache(kept, residency), self._scheduler, self._pools)
        session._take(self._pools.take_device(ledger.num_pages(ledger.capacity)), load=None)
        return session


class Session:
    """One conversation: a `past_key_values` that is on the device, on the host, or on both.

    Belongs to the scheduler's loop: its coroutines run there. The block of `use` may hand the cache to
    any one thread.
    """

    def __init__(self, cache: PagedCache, scheduler: Scheduler, pools: SessionPools) -> None:
        self.cache = cache
        """The `past_key_values` of every forward of this session. Updated only inside `use`."""
        self._residency = cache.residency
        self._ledger = cache.residency.ledger
        self._scheduler = scheduler
        self._pools = pools
        self._device: GroupPages | None = None
        self._host = pools.no_pages
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
        """Tokens cached, on whichever side.

        A model of states alone has no layer that counts them: there, each block of `use` that ran a
        forward counts as one.
        """
        return self._ledger.tokens

    @property
    def resident(self) -> bool:
        """Whether it holds device pages; a load may still be filling them."""
        return self._device is not None

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that its forwards have waited for loads so far."""
        return self._residency.waited_ns

    @contextmanager
    def use(self) -> Iterator[PagedCache]:
        """Lend the cache to a forward. Until the block ends, `evict`, `load` and `close` are refused.

        A forward that raises leaves no trace of its tokens. States are written in place: where a model
        has them, let its errors leave the block. If the block raises, or a forward stopped half way, the
        session falls back to its last backup, and is evicted. A forward that has no room is refused
        before it writes anything, and costs nothing.

        Raises:
            RequestError: The session is evicted, closed, or busy with something else.
        """
        if not self.resident and self._busy is None:
            raise RequestError("the session is evicted: `await session.load()` first")
        with self._exclusively("used by a forward"):
            self._residency.begin()
            whole = False
            try:
                yield self.cache
                whole = self._residency.whole
            except RequestError as error:  # for want of room, nothing was written: states are whole
                whole = error is self._residency.refused and self._residency.whole
                raise
            finally:
                self._residency.in_use, self._residency.refused = False, None
                if self._residency.changed_states:
                    self._settle_states(whole=whole)
                self._check_load()

    async def backup(self) -> int:
        """Copy to the host what it lacks, wait until that settled, and return the bytes moved.

        Of tokens, only new pages move; the last page, when it was backed up half full and has grown, is
        new again. States move whole, if a forward ran since. What was copied counts as backed up only
        when the copy is done; until then the last backup stays whole.

        Raises:
            RequestError: The session has states, and a forward that may change them is using it.
            OutOfPagesError: A host pool is full. Nothing was queued.
            TransferFailed: The copy, or the load before it, failed. Nothing counts as backed up.
        """
        if not self._pools.kept.has_states:
            return await self._back_up()
        with self._exclusively("being backed up"):
            return await self._back_up()

    async def evict(self) -> int:
        """Back up, give the device pages back, and return the bytes moved.

        Raises:
            RequestError: A forward is using the session, or it is evicted already.
            OutOfPagesError, TransferFailed: As `backup`. The session stays as it was.
        """
        if not self.resident and self._busy is None:
            raise RequestError("the session is evicted already")
        with self._exclusively("being evicted"):
            nbytes = await self._back_up()
            self._release_device()
        return nbytes

    async def load(
        self, *, priority: int = 0, deadline: float | None = None, after: object = "compute"
    ) -> Transfer:
        """Take device pages and submit the load of all tokens and states. Returns when it is admitted.

        The next forward may start at once: each layer waits for its own bytes. Await the transfer
        before you publish what that forward computed; on a GPU a failure may come after its fences.

        Raises:
            OutOfPagesError: The device pool has no such run of free pages, or no slot. The session
                stays evicted.
            RequestError: The session is resident already.
        """
        if self.resident:
            raise RequestError("the session is resident already")
        with self._exclusively("being loaded"):
            pages = self._pools.take_device(self._ledger.num_pages(self._ledger.capacity))
            filled = range(self._ledger.num_pages(self.tokens))
            host, device = self._pools.moved(self._host, pages, filled)
            try:
                transfer = await self._scheduler.load(
                    host_pages=host.anchor,
                    device_pages=device.anchor,
                    members=host.paired(device),
                    priority=priority,
                    deadline=deadline,
                    after=after,
                )
            except BaseException:
                self._pools.free("device", pages)
                raise
            self._take(pages, load=transfer)
        return transfer

    def close(self) -> None:
        """Give all pages back. Pages that still move are reused only after they have landed.

        Raises:
            RequestError: A forward is using the session, or a coroutine is moving it.
        """
        if self._backing_up.locked() and self._busy is None:
            raise self._refusal("being backed up", "closed")
        with self._exclusively("closed"):
            if self.resident:
                self._release_device()
            self._pools.free("host", self._host)
            self._host = self._pools.no_pages
            self.cache.reset()
        self._busy = "closed"

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if self._busy is not None:
            raise self._refusal(self._busy, what.removeprefix("being "))
        self._busy = what
        try:
            yield
        finally:
            self._busy = None

    def _refusal(self, busy: str, what: str) -> RequestError:
        """Return the error for what cannot be done to the session while it is `busy`."""
        if busy == "closed":
            return RequestError(f"the session is closed, and cannot be {what}. Open another.")
        return RequestError(f"the session is {busy}, and cannot be {what} until that has ended.")

    async def _back_up(self) -> int:
        async with self._backing_up:
            await self._await_load()
            indices = self._ledger.begin_backup()
            if not indices or self._device is None:
                return 0
            renewal = self._pools.renewed(self._host, indices)
            host, device = self._pools.moved(renewal.after, self._device, indices)
            try:
                transfer = await self._scheduler.backup(
                    device_pages=device.anchor,
                    host_pages=host.anchor,
                    members=host.paired(device),
                )
                await transfer
            except BaseException:
                self._pools.free("host", renewal.fresh)
                raise
            self._host = renewal.after
            self._pools.free("host", renewal.old)
            self._ledger.end_backup()
            return transfer.nbytes

    def _take(self, pages: GroupPages, *, load: Transfer | None) -> None:
        """Hold these device pages; `load` is filling them."""
        self._device = pages
        self._load = self._residency.load = load
        self._residency.slots = self._pools.views(pages)
        self.cache.set_previous(self.tokens > 0)

    def _release_device(self) -> None:
        assert self._device is not None
        pages, self._device = self._device, None
        self._load = self._residency.load = None
        self._residency.slots = None
        self._pools.free("device", pages)

    def _fall_back(self) -> None:
        """Be evicted, with what the host has: try `load` again."""
        self._release_device()
        self._ledger.roll_back()

    def _settle_states(self, *, whole: bool) -> None:
        """After a block of `use` that changed states: they count, or are lost."""
        if not whole:
            self._fall_back()
        elif not self._pools.paged:
            self._ledger.commit(self._ledger.tokens + 1)

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
        """After a failed load, fall back to what the host has."""
        if self._load is None or not self._load.done or self._residency.in_use:
            return
        try:
            self._load.result(timeout=0)
        except TransferFailed:
            self._fall_back()
        else:
            self._load = self._residency.load = None
