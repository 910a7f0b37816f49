"""What pieces claim in the hazard tables of all members: whom they follow, and whose bytes they read."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from offload.core.batch import Piece, State
from offload.core.hazards import HazardTable
from offload.core.kinds import Direction
from offload.core.request import Pages, Request
from offload.errors import RequestError, TransferFailed


@attrs.define(eq=False)
class Claims:
    """The pages of pieces, in the tables of a group.

    An ordinary request claims both sides. A streaming backup claims its host pages when it is submitted,
    and each layer of it claims the device pages when it is written.

    Args:
        tables: The hazard tables of each member, as (host, device).
    """

    tables: Sequence[tuple[HazardTable, HazardTable]]

    orphans: int = -1
    """Claims of holders up to this one are nobody's any more, and stay for ever."""

    _youngest: int = -1
    _kept: dict[HazardTable, Pages] = attrs.field(factory=dict)
    """What was claimed in a table when it was opened, by holders up to the youngest."""

    def open(self) -> int:
        """Return the youngest holder that ever claimed anything in these tables."""
        tables = [table for pair in self.tables for table in pair]
        youngest = max(table.youngest() for table in tables)
        self._youngest = youngest
        for table in tables:
            counts = table.counts()
            if counts is not None:
                self._kept[table] = counts
        if self._kept:
            self.orphans = youngest
        return youngest

    def refuse_orphans(self, request: Request) -> None:
        """Raise for pages that will never be free.

        Raises:
            RequestError: A scheduler whose device was lost has left bytes in the air there.
        """
        for member, host_pages, device_pages in request.parts:
            host, device = self.tables[member]
            for side, table, ids in (("host", host, host_pages), ("device", device, device_pages)):
                if min(table.peek(ids, write=True), default=self.orphans + 1) <= self.orphans:
                    raise RequestError(
                        f"the {side} pages of this request include some that a scheduler with a lost device "
                        "had in the air: they are never free again. Use others."
                    )

    def take(self, piece: Piece) -> tuple[list[int], list[int]]:
        """Claim a piece's pages; return whom it must follow, and those among them who write what it reads."""
        request, number = piece.request, piece.id
        load = request.direction is Direction.LOAD
        follow: list[int] = []
        sources: list[int] = []
        for member, host_pages, device_pages in request.parts:
            host, device = self.tables[member]
            if piece.parent is None:
                found = host.claim(number, host_pages, write=not load)
                if found:
                    (sources if load else follow).extend(found)
            if not request.streaming or piece.parent is not None:
                found = device.claim(number, device_pages, write=load)
                if found:
                    (follow if load else sources).extend(found)
        return follow, sources

    def release(self, piece: Piece) -> None:
        """Take back what a piece claimed."""
        request, number = piece.request, piece.id
        load = request.direction is Direction.LOAD
        for member, host_pages, device_pages in request.parts:
            host, device = self.tables[member]
            if piece.parent is None:
                host.release(number, host_pages, write=not load)
            if piece.stream is None:
                device.release(number, device_pages, write=load)

    def forget(self, owner: object) -> None:
        """Void all claims since `open`, also one that a signal has left half made, in tables of this owner."""
        for pair in self.tables:
            for table in pair:
                if table.owner is owner:
                    table.restore(self._kept.get(table), self._youngest)

    def ahead_of(self, load: Request) -> set[int]:
        """Return whom a load would have to follow."""
        ids: set[int] = set()
        for member, host_pages, device_pages in load.parts:
            host, device = self.tables[member]
            ids.update(host.peek(host_pages, write=False))
            ids.update(device.peek(device_pages, write=True))
        return ids

    def ahead_of_layers(self, stream: Piece) -> set[int]:
        """Return the loads that layers of a streaming backup will follow if they are written now."""
        ids: set[int] = set()
        for member, _, device_pages in stream.request.parts:
            ids.update(self.tables[member][1].peek(device_pages, write=False))
        return ids

    def undisturbed(self, load: Request) -> bool:
        """Return whether nobody has claimed a load's pages for writing since it was submitted."""
        for member, host_pages, device_pages in load.parts:
            host, device = self.tables[member]
            if host.written_since(load.id, host_pages):
                return False
            if not device.last_writer_is(load.id, device_pages):
                return False
        return True

    # Torn pages -------------------------------------------------------------------------------

    def tear(self, backup: Piece, why: str) -> None:
        """Note that a backup has left its host pages half written."""
        for member, host_pages, _ in backup.request.parts:
            self.tables[member][0].torn.tear(host_pages, backup.id, why)

    def mend(self, backup: Piece) -> None:
        """Note that a backup has written its host pages whole."""
        for member, host_pages, _ in backup.request.parts:
            torn = self.tables[member][0].torn
            if torn.left:
                torn.mend(host_pages)

    def note_written(self, backup: Piece) -> None:
        """Remember whether a backup that leaves has written its host pages whole, or in part."""
        if backup.parent is None:
            if backup.whole:
                self.mend(backup)
            elif backup.touched:
                self.tear(backup, backup.end())

    def torn(self, load: Piece) -> TransferFailed | None:
        """Return why a load must not read its host pages, or None.

        A torn page is no reason while the load follows somebody who may yet write it.
        """
        for member, host_pages, _ in load.request.parts:
            torn = self.tables[member][0].torn
            if torn.left:
                found = torn.first(_unwritten(load, member, host_pages))
                if found is not None:
                    page, number, why = found
                    return TransferFailed.source(
                        f"backup {number}",
                        f"host page {page} holds part of {why}. Back that page up again, or free it.",
                    )
        return None


def let_down(follower: Piece, piece: Piece) -> BaseException | None:
    """Return what fails a piece that relied on what another was to write, and has left without; None if nothing."""
    relied = piece.id in follower.relies and piece.landed < follower.last
    if not relied or not (piece.touched or piece.state is State.FAILED):
        return None
    if isinstance(piece.error, TransferFailed):
        return piece.error  # it was let down itself, and says by whom
    return TransferFailed.source(piece.name, f"it was to read what comes from {piece.end()}.")


def _unwritten(load: Piece, member: int, pages: Pages) -> Pages:
    """Return those of a member's host pages that nobody whom the load follows is to write."""
    written = [
        theirs
        for ahead in load.follows
        if ahead.request.direction is Direction.BACKUP and ahead.parent is None
        for other, theirs, _ in ahead.request.parts
        if other == member
    ]
    return pages[~np.isin(pages, np.concatenate(written))] if written else pages
