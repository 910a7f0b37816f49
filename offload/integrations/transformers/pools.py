"""The pools of a model's sessions: one group, whose members are what its layers keep.

| member | kind | a page is | layers |
|---|---|---|---|
| `kv` | `mha`, or `mla` for a latent | `page_size` tokens | full and sliding-window attention |
| `indexer` | `rows` | the same tokens: `kv`'s pages | sparse attention |
| `state` | `state` | one session's slot | conv, recurrent and linear attention |

Layers of one sort that differ in size stand in members of their own (`kv_2`), on the same pages. The
group's layers are the model's own, with holes: a layer has landed when all that it keeps has.
"""

# Axes: S tokens of a pool or a session, H kv heads, D head dim, X an indexer's dim.

from __future__ import annotations

import attrs
import numpy as np
from transformers import PreTrainedModel

from offload import DevicePool, GeometryError, GroupPages, HostPool, Pair, PoolGroup
from offload.integrations.transformers.kept import Kept, kept_by
from offload.integrations.transformers.plan import MemberPlan, plans
from offload.integrations.transformers.slots import Slots, pool_slots

NO_PAGES = np.empty(0, dtype=np.int64)


@attrs.frozen(eq=False)
class Renewal:
    """A session's host pages before and after a backup."""

    after: GroupPages
    """What it has when the backup is done."""

    fresh: GroupPages
    """What of it was taken now, to be freed if the backup fails ..."""

    old: GroupPages
    """... and what is no longer needed if it does not."""


class SessionPools(PoolGroup):
    """A pool group for the sessions of one model. `session_pools` allocates one.

    Args:
        kept: What the model keeps; `kept_by` tells.
        pools: By member, its device and its host pool, allocated or adopted; `plans` says which.

    Raises:
        GeometryError: The members or their specs are not those of the model, or a device pool's pages
            have no common stride.
    """

    def __init__(self, kept: Kept, **pools: tuple[DevicePool, HostPool]) -> None:
        self.page_size = pools["kv"][0].spec.page_size if "kv" in pools else 1
        """Tokens per page; 1 for a model of states alone."""
        planned = plans(kept, self.page_size)
        _check_members(kept, planned, pools)
        pairs = {name: _pair(name, planned, *pools[name]) for name in planned}
        super().__init__(layer_names=None, **pairs)
        self.kept = kept
        self.paged = "kv" in planned
        """Whether the anchor's pages hold tokens; else they are slots."""
        self._slots = pool_slots(kept, {name: pools[name][0] for name in planned}, planned)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all members that hold tokens."""
        specs = [member.device.spec for member in self.members]
        return sum(spec.page_bytes for spec in specs if spec.kind != "state")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one session's states."""
        specs = [member.device.spec for member in self.members]
        return sum(spec.page_bytes for spec in specs if spec.kind == "state")

    # Pages of a session -----------------------------------------------------------------------------

    @property
    def no_pages(self) -> GroupPages:
        """What a session has on a side where it is not."""
        return GroupPages(NO_PAGES, dict.fromkeys(self._slot_members, NO_PAGES))

    def take_device(self, num_pages: int) -> GroupPages:
        """Take one run of pages for tokens, and a slot for states.

        Raises:
            OutOfPagesError: There is no such run, or no slot. Nothing was taken.
        """
        slots = dict.fromkeys(self._slot_members, 1)
        return self.alloc("device", num_pages if self.paged else 1, slots, contiguous=True)

    def renewed(self, held: GroupPages, pages: range) -> Renewal:
        """Take fresh host pages for some pages of tokens, and a fresh slot for states.

        A backup never writes over what the last one has: that stays whole until the next is done.

        Args:
            held: What the last backup has.
            pages: By position, what the next one writes: all from the first that has changed.

        Raises:
            OutOfPagesError: There are too few. Nothing was taken.
        """
        if not self.paged:
            slot = self.alloc("host", 1)
            return Renewal(after=slot, fresh=slot, old=held)
        fresh = self.alloc("host", len(pages), dict.fromkeys(self._slot_members, 1))
        unchanged, old = held.anchor[: pages.start], held.anchor[pages.start :]
        return Renewal(
            after=GroupPages(np.concatenate([unchanged, fresh.anchor]), fresh.own),
            fresh=fresh,
            old=GroupPages(old, held.own),
        )

    def moved(
        self, host: GroupPages, device: GroupPages, pages: range
    ) -> tuple[GroupPages, GroupPages]:
        """Return both sides of a transfer: some of the pages of tokens, and the slots that the host has."""
        own = {name: device.own[name][: len(slots)] for name, slots in host.own.items()}
        if not self.paged:
            return host, GroupPages(device.anchor[: len(host.anchor)], own)
        rows = slice(pages.start, pages.stop)
        return GroupPages(host.anchor[rows], host.own), GroupPages(device.anchor[rows], own)

    def views(self, pages: GroupPages) -> list[Slots]:
        """Return, by model layer, where a session with these device pages keeps what it keeps."""
        slots = [*pages.own.values()] if self.paged else [pages.anchor]
        slot = int(slots[0][0]) if slots and len(slots[0]) else None
        start = int(pages.anchor[0]) * self.page_size
        length = len(pages.anchor) * self.page_size
        return [each.cut(start, length, slot) for each in self._slots]

    @property
    def _slot_members(self) -> list[str]:
        """The member that has slots of its own, if there is one: other state members use the same."""
        return [member.name for member in self.members if member.rule == "own"]


def session_pools(
    model: PreTrainedModel,
    *,
    page_size: int = 16,
    num_pages: int = 0,
    num_host_pages: int = 0,
    num_slots: int = 0,
    num_host_slots: int = 0,
    layout: str = "page_first",
) -> SessionPools:
    """Allocate the pools of a model's sessions, on its device and in host memory.

    Runs one token through the model to see what it keeps: call this before serving.

    Args:
        page_size: Tokens per page.
        num_pages, num_host_pages: For a model with attention layers. A backup takes fresh host pages for
            what it writes: up to one more for each that runs.
        num_slots: For a model with states: how many sessions are on the device at once.
        num_host_slots: How many are on the host, and one more for each backup that runs.
        layout: Of the host pool for keys and values. Indexer rows and states are one run of bytes in
            any order, and are stored page first.

    Raises:
        GeometryError: The model keeps something that cannot be carried, or a number is missing.
    """
    kept = kept_by(model)
    pools: dict[str, tuple[DevicePool, HostPool]] = {}
    counts = {"num_pages": num_pages, "num_host_pages": num_host_pages}
    slots = {"num_slots": num_slots, "num_host_slots": num_host_slots}
    for name, plan in plans(kept, page_size).items():
        given = slots if plan.sort == "state" else counts
        _check_counts(kept, name, given)
        here, there = given.values()
        device = DevicePool.allocate(plan.spec, num_pages=here, device=kept.device)
        order = layout if plan.sort == "kv" else "page_first"
        pools[name] = device, HostPool.like(device, num_pages=there, layout=order)
    return SessionPools(kept, **pools)


def _pair(name: str, planned: dict[str, MemberPlan], device: DevicePool, host: HostPool) -> Pair:
    """Return a member's pair: states have slots of their own, all else the anchor's pages."""
    layers = planned[name].layers
    if planned[name].sort != "state" or "kv" not in planned:
        return Pair(device, host, layers=layers)
    if name == "state":
        return Pair(device, host, pages="own", layers=layers)
    return Pair(device, host, follows="state", layers=layers)


def _check_members(
    kept: Kept,
    planned: dict[str, MemberPlan],
    pools: dict[str, tuple[DevicePool, HostPool]],
) -> None:
    wanted = {name: plan.spec for name, plan in planned.items()}
    got = {name: attrs.evolve(device.spec, layer_names=None) for name, (device, _) in pools.items()}
    if wanted != got:
        names = [name for name in wanted | got if wanted.get(name) != got.get(name)]
        raise GeometryError(
            f"the pools of {kept.model_type}",
            expected={name: wanted.get(name, "no such member") for name in names},
            got={name: got.get(name, "missing") for name in names},
        )


def _check_counts(kept: Kept, member: str, counts: dict[str, int]) -> None:
    missing = [name for name, count in counts.items() if count < 1]
    if missing:
        raise GeometryError(
            f"session_pools of {kept.model_type}, which keeps {member!r}",
            expected=dict.fromkeys(missing, "at least 1"),
            got={name: counts[name] for name in missing},
        )
