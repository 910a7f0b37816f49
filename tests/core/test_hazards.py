"""The hazard table against a table that remembers everything."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.core import hazards
from offload.core.hazards import HazardTable
from offload.errors import RequestError

NUM_PAGES = 7


class Oracle:
    """Every claim ever made, in order, and a search through all of them."""

    def __init__(self) -> None:
        self.claims: list[tuple[int, frozenset[int], bool]] = []
        self.follows: dict[int, set[int]] = {}
        self.pins = [0] * NUM_PAGES

    def conflicts(self, holder: int, pages: frozenset[int], write: bool) -> set[int]:
        return {
            other
            for other, theirs, writes in self.claims
            if other != holder and pages & theirs and (write or writes)
        }

    def reachable(self, holders: set[int]) -> set[int]:
        seen: set[int] = set()
        todo = list(holders)
        while todo:
            holder = todo.pop()
            if holder not in seen:
                seen.add(holder)
                todo.extend(self.follows.get(holder, ()))
        return seen

    def live(self) -> set[int]:
        return {holder for holder, _, _ in self.claims}

    def may_release(self) -> list[int]:
        live = self.live()
        return [holder for holder in sorted(live) if not self.follows[holder] & live]

    def locked(self, page: int) -> bool:
        return self.pins[page] > 0 or any(page in pages for _, pages, _ in self.claims)


class Program:
    """A random program on a table and on the oracle, compared after every step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = HazardTable(NUM_PAGES)
        self.oracle = Oracle()
        self.raw: dict[int, list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], bool]]] = {}
        self.pinned: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self.holder = 0
        self.last_write = [-1] * NUM_PAGES

    def step(self) -> None:
        draw = self.random.random()
        if draw < self.appetite:
            self.submit()
        elif draw < 0.9:
            self.release()
        else:
            self.pin()
        self.compare_locks()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.appetite = self.random.choice((0.3, 0.5, 0.8))
            self.step()

    def submit(self) -> None:
        self.holder += self.random.randint(1, 3)
        self.oracle.follows[self.holder] = set()
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self.claim(self.holder, write=self.random.random() < 0.4)

    def claim(self, holder: int, *, write: bool) -> None:
        chosen = self.random.sample(range(NUM_PAGES), self.random.randint(0, NUM_PAGES))
        if not write and chosen:
            chosen += self.random.choices(chosen, k=self.random.randint(0, 2))
        pages = np.array(chosen, np.int64)
        expected = self.oracle.conflicts(holder, frozenset(chosen), write)
        told = self.table.claim(holder, pages, write=write)
        assert list(told) == sorted(set(told))
        assert set(told) <= expected
        self.oracle.follows[holder] |= set(told)
        assert expected <= self.oracle.reachable(self.oracle.follows[holder])
        self.oracle.claims.append((holder, frozenset(chosen), write))
        self.raw.setdefault(holder, []).append((pages, write))
        if write:
            for page in chosen:
                self.last_write[page] = holder

    def release(self) -> None:
        free = self.oracle.may_release()
        if not free:
            return
        holder = self.random.choice(free)
        for pages, write in self.raw.pop(holder):
            self.table.release(holder, pages, write=write)
        self.oracle.claims = [claim for claim in self.oracle.claims if claim[0] != holder]

    def pin(self) -> None:
        if self.pinned and self.random.random() < 0.5:
            pages = self.pinned.pop(self.random.randrange(len(self.pinned)))
            self.table.unlock(pages)
            step = -1
        else:
            chosen = self.random.sample(range(NUM_PAGES), self.random.randint(0, 3))
            pages = np.array(chosen, np.int64)
            self.table.lock(pages)
            self.pinned.append(pages)
            step = 1
        for page in pages.tolist():
            self.oracle.pins[page] += step

    def compare_locks(self) -> None:
        every = np.arange(NUM_PAGES)
        expected = [self.oracle.locked(page) for page in range(NUM_PAGES)]
        assert self.table.locked(every).tolist() == expected
        some = self.random.sample(range(NUM_PAGES), 2)
        assert self.table.busy(np.array(some)) == any(expected[page] for page in some)
        since = self.random.randint(0, self.holder)
        assert self.table.written_since(since, np.array(some)) == any(
            self.last_write[page] > since for page in some
        )


@pytest.mark.parametrize("block", range(20))
def test_random_programs_agree_with_a_table_that_remembers_everything(block: int) -> None:
    """What a claim is told follows from live conflicts, and every live conflict follows from it."""
    for seed in range(block * 100, block * 100 + 100):
        try:
            Program(seed).run(40)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seed", range(10))
def test_a_log_that_fills_up_forgets_only_what_is_covered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a log of four entries, so that it is compacted and grown all the time."""
    monkeypatch.setattr(hazards, "_FIRST_LOG", 4)
    for inner in range(100):
        Program(1_000_000 + seed * 100 + inner).run(40)


def pages(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(ids, np.int64)


def test_disjoint_claims_follow_nobody() -> None:
    """Claims without a common page get the shared empty answer."""
    table = HazardTable(8)
    answers = [
        table.claim(holder, pages(2 * holder, 2 * holder + 1), write=True) for holder in range(4)
    ]
    assert answers == [(), (), (), ()]
    assert all(answer is answers[0] for answer in answers)


def test_a_middle_reader_that_left_hides_nobody() -> None:
    """A writer follows the first and the last reader when the one between them has left."""
    table = HazardTable(4)
    for holder in (1, 2, 3):
        assert table.claim(holder, pages(0), write=False) == ()
    table.release(2, pages(0), write=False)
    assert table.claim(4, pages(0), write=True) == (1, 3)


def test_a_last_reader_that_left_hides_nobody() -> None:
    """A writer follows an earlier live reader when the last one has left."""
    table = HazardTable(4)
    table.claim(1, pages(0, 1), write=False)
    table.claim(2, pages(0), write=False)
    table.release(2, pages(0), write=False)
    assert table.claim(3, pages(0), write=True) == (1,)


def test_a_holder_never_follows_itself() -> None:
    """A holder that reads and writes the same page follows only others."""
    table = HazardTable(4)
    table.claim(1, pages(0), write=False)
    assert table.claim(2, pages(0), write=True) == (1,)
    assert table.claim(2, pages(0), write=False) == ()
    assert table.claim(2, pages(0, 1), write=True) == ()


def test_a_page_that_everybody_reads_does_not_grow_for_ever() -> None:
    """The log of a shared page stays small while a hundred thousand readers come and go."""
    table = HazardTable(4)
    table.claim(0, pages(0), write=False)
    for holder in range(1, 20_000):
        table.claim(holder, pages(0), write=False)
        if holder > 5:
            table.release(holder - 5, pages(0), write=False)
    assert table._chain is not None
    assert len(table._chain._page) == hazards._FIRST_LOG
    assert table.claim(20_000, pages(0), write=True) == (0, 19_995, 19_996, 19_997, 19_998, 19_999)


def test_pages_of_a_claim_may_repeat() -> None:
    """Repeated source pages count once, and one release frees them."""
    table = HazardTable(4)
    table.claim(1, pages(3, 3, 3), write=False)
    table.release(1, pages(3, 3, 3), write=False)
    assert not table.busy(pages(0, 1, 2, 3))


def test_a_lock_has_no_place_in_the_order() -> None:
    """A locked page is busy, but a claim on it follows nobody."""
    table = HazardTable(4)
    table.lock(pages(1))
    table.lock(pages(1))
    assert table.claim(1, pages(1), write=True) == ()
    table.release(1, pages(1), write=True)
    table.unlock(pages(1))
    assert table.busy(pages(1))
    table.unlock(pages(1))
    assert not table.busy(pages(1))


def test_last_writer_is_the_latest_claim_alive_or_not() -> None:
    """A join asks whether anything was ordered after the load that it would attach to."""
    table = HazardTable(4)
    table.claim(1, pages(0, 1), write=True)
    assert table.last_writer_is(1, pages(0, 1))
    table.claim(2, pages(1), write=False)
    assert table.last_writer_is(1, pages(0, 1))
    table.claim(3, pages(1), write=True)
    assert table.last_writer_is(1, pages(0))
    assert not table.last_writer_is(1, pages(0, 1))
    assert table.written_since(1, pages(0, 1))
    assert not table.written_since(3, pages(0, 1))


def test_the_youngest_holder_is_remembered_on_either_side() -> None:
    """The last holder that claimed anything, as a reader or a writer, alive or not; nobody at first."""
    table = HazardTable(8)
    assert table.youngest() == -1
    assert HazardTable(0).youngest() == -1
    table.claim(0, pages(3), write=True)
    assert (table.youngest(), table.last_writer(3), table.last_writer(2)) == (0, 0, -1)
    table.claim(4, pages(5), write=False)
    assert table.youngest() == 4
    table.release(4, pages(5), write=False)
    table.claim(6, pages(1), write=True)
    table.release(6, pages(1), write=True)
    assert (table.youngest(), table.last_writer(1)) == (6, 6)
    assert table.held()
    table.release(0, pages(3), write=True)
    assert not table.held()


@pytest.mark.parametrize("write", [False, True])
def test_busy_sees_claims_and_locks(write: bool) -> None:
    """A page is busy while somebody claims it or has locked it, and others are not."""
    table = HazardTable(8)
    assert not table.busy(pages(0, 3))
    table.claim(1, pages(3), write=write)
    assert table.busy(pages(0, 3))
    assert not table.busy(pages(0, 2))
    table.release(1, pages(3), write=write)
    table.lock(pages(2))
    assert table.busy(pages(0, 2))
    assert not table.busy(pages(0, 3))
    table.unlock(pages(2))
    assert not table.busy(pages(0, 1, 2, 3))


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("seed", range(0, 100, 4))
def test_claims_in_steps_are_claims(seed: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of many pages is made in steps, and is the same claim: repeated pages included."""
    monkeypatch.setattr(hazards, "_STEP", step)
    Program(seed).run(40)


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 131_073])
def test_all_pages_of_a_large_claim_are_claimed(n: int) -> None:
    """Around the size of a step no page is left out and none is counted twice, claimed or released."""
    table = HazardTable(n + 1)
    every = np.arange(n)
    assert table.claim(1, every, write=True) == ()
    assert table.locked(np.arange(n + 1)).tolist() == [True] * n + [False]
    assert table.claim(2, every, write=False) == (1,)
    table.release(1, every, write=True)
    table.release(2, every, write=False)
    assert not table.held()


def test_those_to_follow_are_plain_integers() -> None:
    """Holders come back as they were given, whether the table, the chain or a look without a claim names them."""
    table = HazardTable(4)
    for holder in range(1, 5):
        table.claim(holder, pages(0, 1), write=False)
    told = [table.peek(pages(0, 1), write=True), table.claim(5, pages(0, 1), write=True)]
    told += [table.peek(pages(0, 1), write=False), table.claim(6, pages(0, 1), write=False)]
    assert told == [(1, 2, 3, 4), (1, 2, 3, 4), (5,), (5,)]
    assert {type(holder) for answer in told for holder in answer} == {int}


def test_a_reader_behind_a_writer_starts_no_log() -> None:
    """Only readers that meet readers are remembered one by one."""
    table = HazardTable(4)
    table.claim(1, pages(0, 1), write=True)
    table.claim(2, pages(0, 1), write=False)
    table.claim(3, pages(2, 3), write=False)
    assert table._chain is None
    table.claim(4, pages(1, 2), write=False)
    assert table._chain is not None
    assert table._chain._size == 2


@pytest.mark.parametrize("locked", [(), (0,), (0, 3, 0), (0, 1, 3)])
@pytest.mark.parametrize("asked", [(2,), (2, 5), (0, 2, 0), (0, 5, 2), (4, 0)])
def test_an_unlock_that_was_not_locked_is_told_in_full(
    locked: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    """The first page without a lock is named, no lock is taken back, and nobody looks again."""
    table = HazardTable(6)
    for page in locked:
        table.lock(pages(page))
    position = next(i for i, page in enumerate(asked) if page not in locked)
    before = [table.locked(np.arange(6)).tolist(), table.releases]
    with pytest.raises(RequestError) as caught:
        table.unlock(pages(*asked))
    assert str(caught.value) == (
        f"unlock of page {asked[position]} at position {position}, which is not locked. "
        "Each lock can be taken back once."
    )
    assert (caught.value.value, caught.value.position) == (asked[position], position)
    assert [table.locked(np.arange(6)).tolist(), table.releases] == before


def test_releases_and_unlocks_are_counted() -> None:
    """Who waits for pages sees a number grow with each release and unlock, and with nothing else."""
    table = HazardTable(6)
    seen = [table.releases]
    table.claim(1, pages(0), write=True)
    table.claim(2, pages(1, 2), write=False)
    table.lock(pages(3, 4))
    table.unlock(pages())
    seen.append(table.releases)
    table.release(1, pages(0), write=True)
    seen.append(table.releases)
    table.release(2, pages(1, 2), write=False)
    seen.append(table.releases)
    table.unlock(pages(3, 4))
    seen.append(table.releases)
    assert seen == [0, 0, 1, 2, 3]


def test_a_reader_is_remembered_until_its_last_claim_is_released() -> None:
    """A holder that claimed twice for reading is followed after one release, and not after both."""
    table = HazardTable(6)
    for mine in (pages(0, 1), pages(1, 2), pages(2, 3)):
        table.claim(1, mine, write=False)
    table.release(1, pages(0, 1), write=False)
    assert table.peek(pages(1), write=True) == (1,)
    table.release(1, pages(1, 2), write=False)
    assert table.peek(pages(2), write=True) == (1,)
    assert table.peek(pages(0, 1), write=True) == ()
    table.release(1, pages(2, 3), write=False)
    assert table.peek(pages(0, 1, 2, 3), write=True) == ()
    assert not table._reading


def test_a_log_keeps_the_readers_of_each_page_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the log is compacted, a writer of one page is told of that page's readers alone."""
    monkeypatch.setattr(hazards, "_FIRST_LOG", 4)
    table = HazardTable(3)
    readers: list[list[int]] = [[], [], []]
    for holder in range(60):
        page = holder * holder % 3 + holder % 2
        table.claim(holder, pages(page), write=False)
        readers[page].append(holder)
        for each in range(3):
            assert table.peek(pages(each), write=True) == tuple(readers[each])
