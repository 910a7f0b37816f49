"""The host index: what is offered, what goes first, and what stays while a job uses it."""

from __future__ import annotations

import pytest

from offload.integrations.vllm.index import HostIndex


def keys(text: str) -> list[bytes]:
    """Return one key per letter."""
    return [letter.encode() for letter in text]


def store(index: HostIndex, text: str, keep: str = "") -> list[int]:
    """Write blocks, and have them land."""
    pages = index.write(keys(text), keys(keep))
    index.done(keys(text)[: len(pages)], pages, keep=True)
    return pages


def test_a_block_is_offered_when_it_has_landed() -> None:
    """On its way, a block is known and not offered."""
    index = HostIndex(4)
    pages = index.write(keys("ab"))
    assert index.match(keys("ab")) == 0
    assert b"a" in index
    index.done(keys("ab"), pages, keep=True)
    assert index.match(keys("abc")) == 2
    assert index.read(keys("ab")) == pages


def test_a_match_is_a_prefix() -> None:
    """Blocks after a gap do not count."""
    index = HostIndex(4)
    store(index, "ac")
    assert index.match(keys("abc")) == 1
    assert index.match(keys("bc")) == 0


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    """A prefix loses its end first, so that what is left can still be found."""
    index = HostIndex(4)
    store(index, "ab")
    store(index, "cd")
    index.touch(keys("ab"))
    store(index, "x")
    assert [index.match(keys(text)) for text in ("ab", "cd", "x")] == [2, 1, 1]
    store(index, "y")
    assert [index.match(keys(text)) for text in ("ab", "cd", "xy")] == [2, 0, 2]
    assert index.evictions == 2


@pytest.mark.parametrize("reading", [True, False], ids=["read", "written"])
def test_a_busy_block_stays(reading: bool) -> None:
    """Neither a block that is read nor one that is written is evicted."""
    index = HostIndex(2)
    pages = store(index, "ab") if reading else index.write(keys("ab"))
    if reading:
        index.read(keys("ab"))
    assert index.write(keys("c")) == []
    index.done(keys("ab"), pages, keep=True)
    assert len(index.write(keys("c"))) == 1


def test_readers_count() -> None:
    """A block that two jobs read stays until the second has ended."""
    index = HostIndex(1)
    (page,) = store(index, "a")
    assert index.read(keys("a")) == index.read(keys("a")) == [page]
    index.done(keys("a"), [page], keep=True)
    assert index.write(keys("b")) == []
    index.done(keys("a"), [page], keep=True)
    assert index.write(keys("b")) == [page]


def test_one_job_may_read_a_page_twice() -> None:
    """Two requests of a step may load the same block to two places."""
    index = HostIndex(1)
    (page,) = store(index, "a")
    pages = index.read(keys("a")) + index.read(keys("a"))
    index.done(keys("aa"), pages, keep=False)
    assert index.match(keys("a")) == 0
    assert index.write(keys("b")) == [page]


def test_kept_blocks_are_not_evicted_for_new_ones() -> None:
    """A prompt longer than host memory keeps its head and stores no tail."""
    index = HostIndex(2)
    store(index, "ab")
    assert index.write(keys("c"), keep=keys("ab")) == []
    assert index.match(keys("ab")) == 2


def test_room_ends_at_the_tail() -> None:
    """Where there is room for a part, it is the head that gets it."""
    index = HostIndex(3)
    assert len(index.write(keys("abcde"))) == 3
    assert [key in index for key in keys("abcde")] == [True, True, True, False, False]


def test_what_failed_is_forgotten() -> None:
    """A block whose job failed is offered to nobody, and its page is free."""
    index = HostIndex(1)
    pages = index.write(keys("a"))
    index.done(keys("a"), pages, keep=False)
    assert index.match(keys("a")) == 0
    assert index.num_used == 0
    store(index, "b")


def test_clear_waits_for_jobs() -> None:
    """After `clear` nothing is offered, and a page with a job is handed out only when that has ended."""
    index = HostIndex(2)
    written = index.write(keys("a"))
    index.clear()
    assert b"a" not in index
    other = index.write(keys("a"))
    assert set(other) & set(written) == set()
    assert index.write(keys("b")) == []
    index.done(keys("a"), written, keep=True)
    assert index.match(keys("a")) == 0, "the job that ended wrote another page"
    assert index.write(keys("b")) == written
    index.done(keys("a"), other, keep=True)
    assert index.match(keys("a")) == 1
