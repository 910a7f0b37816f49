"""Where the pages of a request come from: made and checked once, whichever members share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs

from offload.core.request import Part
from offload.errors import RequestError, UnknownNameError
from offload.group_member import Member
from offload.group_pages import PagePair


@attrs.define(eq=False)
class PageSource:
    """Page pairs of a request that are made once, whichever members share them."""

    lead: Member
    """Checks them."""

    taken: PageSource | None
    """The source whose pages the rule takes; None: the caller names the pages."""

    position: int
    sharers: list[Member] = attrs.field(factory=list)
    """Other members with the very same pages and pools as large as the lead's."""

    smaller: list[Member] = attrs.field(factory=list)
    """The same, with a smaller pool: their bounds are checked too."""

    def make(self, named: Mapping[str, PagePair], made: Sequence[Part], *, load: bool) -> Part:
        """Return the checked page pairs of a request.

        Args:
            named: What the caller named, by member.
            made: Those of the sources before this one.

        Raises:
            RequestError: The lead's checks fail, or the caller named no pages for it.
        """
        if self.taken is not None:
            return self._derived(made[self.taken.position], load=load)
        lead = self.lead
        pair = named.get(lead.name)
        if pair is None:
            raise RequestError(
                f"member {lead.name!r} has pages of its own and got none. Pass "
                f"members={{{lead.name!r}: PagePair(host_pages=..., device_pages=...)}}."
            )
        if lead.index == 0:
            return lead.check(pair.host_pages, pair.device_pages, load=load)
        with _told_of(f"member {lead.name!r}"):
            return lead.check(pair.host_pages, pair.device_pages, load=load)

    def _derived(self, taken: Part, *, load: bool) -> Part:
        """Return what the rule makes of the pages of the source that it takes."""
        lead = self.lead
        assert not isinstance(lead.rule, str)
        _, hosts, devices = taken
        with _told_of(f"the page rule of member {lead.name!r}"):
            # Copies: a rule may work in place, and what it takes has been checked.
            return lead.check(lead.rule(hosts.copy()), lead.rule(devices.copy()), load=load)

    def spread(self, part: Part, parts: list[Part | None]) -> None:
        """Put page pairs at the places of all members that share them."""
        parts[self.lead.index] = part
        for member in self.sharers:
            parts[member.index] = (member.index, *part[1:])
        for member in self.smaller:
            parts[member.index] = member.share(part)

    def add(self, member: Member) -> None:
        """Let another member share these pages."""
        (self.sharers if member.holds(self.lead) else self.smaller).append(member)

    def serves(self, taken: PageSource, rule: object) -> bool:
        """Return whether these are the pages that a rule makes of those of `taken`."""
        return self.taken is taken and bool(self.lead.rule == rule)


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    """Say in errors whose pages they are about, where a request has several sorts."""
    try:
        yield
    except RequestError as error:
        text = f"{what}: {error}"
        raise RequestError(text, value=error.value, position=error.position) from error


def page_sources(members: Sequence[Member], names: Mapping[str, str | None]) -> list[PageSource]:
    """Return what a request's pages are made from, each before those that follow it.

    Args:
        names: By member, the one that it follows; None: the first.

    Raises:
        UnknownNameError: A member follows one that does not stand before it.
    """
    sources: list[PageSource] = []
    of: dict[str, PageSource] = {}
    for member in members:
        taken = None
        if member.index and member.rule != "own":
            follows = names[member.name] or members[0].name
            if follows not in of:
                raise UnknownNameError(f"member before {member.name!r}", follows, of)
            taken = of[follows]
        found = taken if member.rule == "same" else None
        if taken is not None and found is None:
            found = next((each for each in sources if each.serves(taken, member.rule)), None)
        if found is None:
            found = PageSource(member, taken, len(sources))
            sources.append(found)
        else:
            found.add(member)
        of[member.name] = found
    return sources
