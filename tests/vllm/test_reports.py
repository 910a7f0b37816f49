"""What users of vLLM's offloading have reported, and which test here would notice it; or why it is not ours.

Each row is one item of the public trackers. A test is `file::function`, below `tests/`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import attrs
import pytest

TESTS = Path(__file__).parents[1]


@attrs.frozen
class Report:
    """One report, and where it is answered."""

    items: str
    """Issues and pull requests."""

    symptom: str
    tests: Sequence[str] = ()
    why_not: str = ""
    """Why no test here can have it; empty where there are tests."""


ABORT = "vllm/test_aborts.py::test_an_abort_harms_nobody"
PREEMPT = "vllm/test_preemption.py::test_preempted_requests_come_back"
EVICT = "vllm/test_preemption.py::test_a_tiny_host_evicts"
RELOAD = "vllm/test_reload.py::test_a_second_pass_is_reloaded"
KINDS = "vllm/test_kinds.py::test_another_kind_is_reloaded"
FAIL = "vllm/test_failures.py::test_a_load_that_fails_is_computed_again"
HANG = "vllm/test_failures.py::test_a_load_that_hangs_is_given_up"
LAYERS = "vllm/test_layerwise.py::test_layer_by_layer_under_the_forward"
WRITTEN = "vllm/test_layerwise.py::test_no_layer_is_stored_before_it_is_written"
TRACE = "vllm/test_layerwise.py::test_the_trace_shows_it"
APART = "vllm/test_processes.py::test_apart"
REFUSED = "vllm/test_start.py::test_a_wrong_configuration_is_refused_at_start"
HELD = "vllm/test_plan.py::test_blocks_stay_until_every_rank_is_done"
EDGES = "driver/test_cuda_plants.py::test_each_edge_is_needed"
QUEUED = "driver/test_cuda_scheduler.py::test_a_load_never_overtakes_compute_that_is_queued"

REPORTS: Sequence[Report] = (
    Report("vllm#31210, #31341", "stores read before compute wrote", (WRITTEN, RELOAD, EDGES)),
    Report(
        "vllm#45704, #46278", "corrupted stored blocks: sources read too early", (WRITTEN, EDGES)
    ),
    Report("vllm#47282", "a load overtakes the last reader of its blocks", (QUEUED, EDGES)),
    Report("vllm#50696", "a load is wiped by zeroing that was queued before it", (QUEUED,)),
    Report("vllm#45357", "the same over RDMA", why_not="nothing here moves pages over a network"),
    Report("vllm#46951", "blocks of another connector are not fenced", (KINDS, HELD)),
    Report(
        "vllm#46014, #46082",
        "a crash when a preempted request returns while its blocks are stored",
        (PREEMPT, "vllm/test_plan.py::test_a_request_that_was_preempted_loads_what_it_had_stored"),
    ),
    Report("vllm#29870", "preemption loses blocks", (PREEMPT, HELD)),
    Report("vllm#49118", "aborting a queued request ends the engine", (ABORT,)),
    Report(
        "vllm#54914",
        "an assertion once the host evicts",
        (EVICT, "vllm/test_plan.py::test_random_engines_never_find_wrong_bytes"),
    ),
    Report("vllm#39732, #19329, #19330, #21534", "a load that fails ends the engine", (FAIL,)),
    Report("vllm#49829", "a request waits for a load for ever", (HANG,)),
    Report(
        "vllm#44294",
        "requests that share a prefix wait in a convoy",
        (RELOAD, "test_joining.py::test_joined_loads_move_the_bytes_once"),
    ),
    Report(
        "vllm#39491",
        "the batched copy fails on the legacy default stream",
        ("driver/test_cuda_calls.py::test_the_legacy_stream_never_reaches_the_batched_copy",),
    ),
    Report(
        "vllm#51080",
        "host memory of 512 GiB and more cannot be registered in one piece",
        ("test_pinned.py::test_chunks_cover_everything_and_end_on_pages",),
    ),
    Report(
        "vllm#42632",
        "pinning makes the start slow",
        why_not="the connector pins before serving too; an engine reports ready when it is ready",
    ),
    Report(
        "vllm#32993, #56410",
        "pinned allocations round up to a power of two",
        ("test_pinned.py::test_memory_is_zeroed_registered_in_chunks_and_unregistered_in_reverse",),
    ),
    Report(
        "vllm#48412, #49226",
        "fp8 KV with scales beside it is corrupted",
        (KINDS, "vllm/test_adopt.py::test_what_cannot_be_adopted_is_refused_by_name"),
    ),
    Report(
        "vllm#46888, #38554",
        "wrong strides and block counts of hybrid models",
        (KINDS, "vllm/test_adopt.py::test_every_layout_of_vllm_is_adopted"),
    ),
    Report(
        "vllm#50821",
        "ranks disagree about the number of host blocks",
        (APART, "vllm/test_settings.py::test_a_host_that_holds_nothing_or_too_much_is_refused"),
    ),
    Report(
        "vllm#46971, #52735, #52771",
        "drafts of MTP and EAGLE never hit",
        why_not="drafts that keep KV are refused at start, see offload/integrations/vllm/checks.py",
    ),
    Report(
        "vllm#33881, #36052",
        "generated blocks are not stored",
        ("vllm/test_reload.py::test_generated_blocks_are_stored_too", APART),
    ),
    Report(
        "vllm#38460, #42212, #48434, #57342, #57343, #57555",
        "many small copies are slow",
        (
            "backend/test_memcpy_batch.py::test_neighbours_are_one_copy",
            "vllm/test_worker.py::test_a_small_store_leaves_as_a_whole_behind_the_forward",
        ),
    ),
    Report(
        "vllm#43797",
        "stores of generated blocks are waste",
        ("vllm/test_requests.py::test_what_is_stored_can_be_chosen",),
    ),
    Report(
        "vllm#44577, #47783",
        "garbage with a packed layout",
        (KINDS, REFUSED, "vllm/test_adopt.py::test_the_table_has_every_order_of_vllm"),
    ),
    Report(
        "vllm#26329",
        "early connectors hang",
        (HANG, "vllm/test_worker.py::test_a_copy_that_never_comes_back_ends_the_engine"),
    ),
    Report(
        "vllm#33398, #48203, #49123", "loads and stores layer by layer are wanted", (LAYERS, TRACE)
    ),
    Report(
        "vllm#52859",
        "the life of a transfer cannot be seen",
        (TRACE, "vllm/test_worker.py::test_the_timeline_names_requests_and_shows_layers"),
    ),
    Report(
        "vllm-ascend#13501",
        "a window leaves a block whose copy is under way",
        (
            KINDS,
            "vllm/test_plan.py::test_blocks_that_a_window_has_left_are_neither_loaded_nor_stored",
            HELD,
        ),
    ),
)


@cache
def functions(path: Path) -> frozenset[str]:
    """Return the names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.items)
def test_every_report_has_its_tests_or_a_reason(report: Report) -> None:
    """The tests that are named exist; a report without any says why."""
    assert bool(report.tests) != bool(report.why_not)
    for test in report.tests:
        file, _, name = test.partition("::")
        assert name in functions(TESTS / file), test
