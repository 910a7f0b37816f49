"""What users write into `kv_connector_extra_config`, and what is refused before anything is allocated."""

from __future__ import annotations

import pytest

from offload import RequestError, UnknownNameError
from offload.integrations.vllm.memory import Memory
from offload.integrations.vllm.settings import GIB, Settings

BLOCK = 1 << 20
MACHINE = Memory(GIB, "this machine has")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "needs the size of host memory"),
        ({"host_gib": 1, "host_blocks": 3}, "one of them"),
        ({"host_gib": 0}, "host_gib=0; it takes a number above 0"),
        ({"host_gib": float("inf")}, "host_gib=inf"),
        ({"host_gib": "8"}, "host_gib='8'"),
        ({"host_blocks": 0}, "host_blocks=0; it takes a whole number from 1 up"),
        ({"host_blocks": True}, "host_blocks=True"),
        ({"host_blocks": 1.5}, "host_blocks=1.5"),
        ({"host_blocks": 1, "timeout_s": 0}, "timeout_s=0"),
        ({"host_blocks": 1, "stream_mib": -1}, "stream_mib=-1; it takes a number from 0 up"),
        ({"host_blocks": 1, "trace_capacity": 0}, "trace_capacity=0"),
        ({"host_blocks": 1, "async_load_tokens": -1}, "a whole number from 0 up"),
        ({"host_blocks": 1, "async_load_tokens": 0.5}, "async_load_tokens=0.5"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(given: dict[str, object], text: str) -> None:
    """The error names the key, the value and what it takes."""
    with pytest.raises(RequestError, match=text):
        Settings.read(given)


def test_an_unknown_key_is_refused_with_the_right_one() -> None:
    """A misspelt key would otherwise be a setting that does nothing."""
    with pytest.raises(UnknownNameError, match="did you mean 'host_gib'"):
        Settings.read({"host_gb": 4})
    with pytest.raises(UnknownNameError, match="store 'prompts'; did you mean 'prompt'"):
        Settings.read({"host_gib": 4, "store": "prompts"})


def test_sizes_become_blocks() -> None:
    """GiB are of one rank, and a part of a block does not count."""
    memory = Memory(64 * GIB, "this machine has")
    assert Settings.read({"host_gib": 1}).num_host_blocks(BLOCK, memory=memory) == 1024
    assert Settings.read({"host_gib": 0.0015}).num_host_blocks(BLOCK, memory=memory) == 1
    assert Settings.read({"host_blocks": 7}).num_host_blocks(BLOCK, memory=memory) == 7


def test_a_host_that_holds_nothing_or_too_much_is_refused() -> None:
    """Both say the sizes, in the unit that the user sets."""
    with pytest.raises(RequestError, match=r"holds no block: one is 1048576 bytes"):
        Settings.read({"host_gib": 0.0001}).num_host_blocks(BLOCK, memory=MACHINE)
    with pytest.raises(
        RequestError, match=r"each of 2 ranks is 2\.0 GiB, and this machine has 1\.0"
    ):
        Settings.read({"host_gib": 1}).num_host_blocks(BLOCK, memory=MACHINE, num_ranks=2)


@pytest.mark.parametrize(
    ("trace", "ranks", "path"),
    [
        (None, 2, None),
        ("t.json", 1, "t.json"),
        ("t.json.gz", 2, "t.rank1.json.gz"),
        ("t.json", 2, "t.rank1.json"),
        ("t", 2, "t.rank1"),
        ("{rank}.json", 2, "1.json"),
    ],
    ids=str,
)
def test_each_rank_has_a_timeline_of_its_own(
    trace: str | None, ranks: int, path: str | None
) -> None:
    """Ranks do not write over each other's files."""
    assert Settings(host_blocks=1, trace=trace).trace_path(1, ranks) == path
