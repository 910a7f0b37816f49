"""What `make mutants` makes of its counts."""

from __future__ import annotations

import pytest

from tests.mutants import verdict

NOTHING = dict.fromkeys(("killed", "timeout", "segfault", "survived", "no_tests"), 0)


@pytest.mark.parametrize(
    ("counts", "enough"),
    [
        ({"killed": 90, "survived": 10}, True),
        ({"killed": 89, "survived": 11}, False),
        ({"killed": 80, "timeout": 8, "segfault": 2, "survived": 10}, True),
        ({"killed": 89, "no_tests": 11}, False),
        ({"killed": 89, "survived": 0}, False),
    ],
)
def test_nine_of_ten_are_to_be_noticed(counts: dict[str, int], enough: bool) -> None:
    """Killed, or late, of all: what no test runs, or what has no verdict yet, is not noticed."""
    text, found = verdict({**NOTHING, **counts, "total": 100})
    assert found is enough
    assert text.startswith(f"100 mutants: {90 if enough else 89} noticed")
    untold = 100 - sum(counts.values())
    assert text.endswith(f"{untold} without a verdict")
