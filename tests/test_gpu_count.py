"""The sentinel that always runs: it tells a run without a GPU from one that tested on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conftest import SKIPPED_GPU_TESTS


def test_gpu_tests_are_skipped_only_without_a_gpu(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """GPU tests run wherever there is a CUDA device; elsewhere the number skipped is reported."""
    skipped = request.config.stash[SKIPPED_GPU_TESTS]
    marked = [item for item in request.session.items if item.get_closest_marker("gpu")]
    record_property("gpu_tests_skipped", skipped)
    assert skipped == (0 if torch.cuda.is_available() else len(marked))
