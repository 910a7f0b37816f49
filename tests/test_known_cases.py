"""Faults that other projects had, with the tests that keep them out of this one.

`Kxx` is the number of a case here; sources are public reports: repository and issue or pull request.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parent


@attrs.frozen
class Case:
    """A fault, who reported it, and by which tests it is told here (file without `.py`: names)."""

    fault: str
    sources: tuple[str, ...]
    tests: dict[str, tuple[str, ...]]


CASES = {
    "K01": Case(
        "A layout and an io backend that do not fit: replaced in silence, or found out by the first copy",
        ("sgl-project/sglang#37122", "sgl-project/sglang#7704"),
        {
            "test_scenarios": ("test_k01_every_pair_copies_exactly_or_is_refused_at_submit",),
            "test_reported": (
                "test_every_pair_is_copied_or_refused_at_submit",
                "test_misspelt_names_are_told_the_choices",
                "test_verdicts_do_not_depend_on_assertions",
            ),
            "test_explain": ("test_pools_get_the_same_verdict",),
        },
    ),
    "K04": Case(
        "Row widths computed from a config, and not taken from the device pool",
        ("sgl-project/sglang#13431",),
        {
            "test_pool": ("test_binding_reports_both_widths",),
            "test_reported": ("test_row_widths_come_from_the_device_pool",),
        },
    ),
    "K06": Case(
        "fp8 converted on its way into a uint8 buffer",
        ("sgl-project/sglang#26701",),
        {
            "test_scenarios": ("test_k06_all_256_patterns_of_fp8_survive",),
            "test_pool": ("test_fp8_is_moved_as_bits", "test_other_dtypes_do_not_bind"),
            "test_reported": ("test_dtypes_of_equal_width_are_not_interchangeable",),
        },
    ),
    "K08": Case(
        "Layers awaited in another order than they were built in",
        ("huggingface/diffusers#11375",),
        {"test_scenarios": ("test_k08_layers_are_awaited_in_any_order",)},
    ),
    "K10": Case(
        "Indices that are torn, misaligned, out of range, or none at all",
        ("sgl-project/sglang#8404", "local-inference-lab/b12x#40", "sgl-project/sglang#11005"),
        {
            "test_scenarios": (
                "test_k10_slots_outside_the_contract_are_refused",
                "test_k10_a_thousand_empty_requests_leave_nothing",
            ),
            "test_reported": (
                "test_slots_outside_the_contract_name_the_first_bad_one",
                "test_pages_outside_the_pool_are_refused_at_submit",
                "test_empty_requests_complete_at_once",
            ),
        },
    ),
    "K14": Case(
        "Offsets beyond 2**31 taken in 32 bits",
        ("vllm-project/vllm#47671", "vllm-project/vllm#1486"),
        {
            "test_reported": ("test_offsets_beyond_two_to_the_31",),
            "test_pool": ("test_a_huge_pool_is_lazy_and_addressed_beyond_two_to_the_31",),
            "core/test_plan": ("test_offsets_beyond_two_to_the_31_do_not_wrap",),
        },
    ),
    "K16": Case(
        "A load overwrites pages that queued compute still reads, or is wiped by a queued zero-fill",
        ("vllm-project/vllm#47282", "vllm-project/vllm#50696"),
        {
            "test_scenarios": ("test_k16_a_load_waits_for_what_compute_has_queued",),
            "test_scheduler": ("test_work_queued_on_compute_later_is_not_waited_for",),
            "driver/test_cuda_scheduler": ("test_a_load_never_overtakes_compute_that_is_queued",),
        },
    ),
    "K17": Case(
        "A load reads host pages that a backup has not filled yet, and the reverse",
        ("NVIDIA/Megatron-LM#7399", "vllm-project/vllm#46014"),
        {
            "test_scenarios": ("test_k17_a_load_of_unfinished_backups_and_the_reverse",),
            "test_scenarios_threads": (
                "test_k17_on_threads_a_load_of_unfinished_backups_and_the_reverse",
            ),
            "driver/test_cuda_scheduler": (
                "test_a_load_of_pages_whose_backup_is_unfinished_gets_the_new_bytes",
            ),
        },
    ),
    "K19": Case(
        "Host pages evicted while a load reads them",
        ("sgl-project/sglang#31427", "sgl-project/sglang#26728"),
        {"test_scenarios": ("test_k19_pages_under_a_load_are_no_victims",)},
    ),
    "K22": Case(
        "A worker that dies of the first error; a thread more after every restart",
        ("sgl-project/sglang#38428", "sgl-project/sglang#36882"),
        {
            "test_scenarios": ("test_k22_one_error_fails_one_request",),
            "test_scenarios_threads": ("test_k22_twenty_restarts_with_a_failure_in_each",),
            "test_closing": ("test_twenty_schedulers_leave_nothing_behind",),
            "driver/test_threads": ("test_the_worker_lives_through_a_hundred_failures",),
        },
    ),
    "K24": Case(
        "A layer fails, and those who wait for later ones hang or compute on garbage",
        ("LMCache/LMCache#4816",),
        {
            "test_scenarios": ("test_k24_a_failure_in_the_middle_reaches_all_who_wait",),
            "test_scenarios_threads": ("test_k24_whichever_layer_fails_everybody_hears",),
        },
    ),
    "K26": Case(
        "What was cancelled in the queue runs all the same; a landing after the cancel breaks the loop",
        ("sgl-project/sglang#16369", "omnilib/aiosqlite#80"),
        {
            "test_scenarios_threads": (
                "test_k26_a_wait_that_ends_takes_its_queued_load_along",
                "test_k26_five_hundred_cancels_at_the_moment_of_landing",
            ),
        },
    ),
    "K29": Case(
        "The event loop is gone before the copy has finished",
        ("agronholm/anyio#1245", "python/cpython#96837", "zigpy/bellows#745"),
        {
            "test_closing": (
                "test_a_loop_that_ends_under_a_copy_says_nothing",
                "test_the_interpreter_exits_cleanly",
            ),
            "test_threads": ("test_a_loop_that_is_gone_ends_the_waits_of_threads",),
        },
    ),
    "K33": Case(
        "A fork inherits locked locks and no threads",
        ("getsentry/sentry-python#6159", "python/cpython#105464"),
        {
            "test_closing": ("test_the_interpreter_exits_cleanly",),
            "driver/test_threads": ("test_a_fork_hangs_nowhere",),
            "driver/test_cuda": ("test_in_a_forked_child_carry_raises_and_close_returns",),
        },
    ),
    "K34": Case(
        "Context variables of the caller are missing, or somebody else's, on the copy thread",
        ("infiniflow/ragflow#16247", "temporalio/sdk-python#263"),
        {
            "test_scenarios": ("test_k34_tags_are_those_of_submit_time",),
            "trace/test_end_to_end": ("test_labels_are_the_submitters",),
        },
    ),
    "K35": Case(
        "No back-pressure; urgent loads behind a queue of backups",
        ("vllm-project/vllm#50031", "sgl-project/sglang-jax#1411"),
        {
            "test_scenarios": (
                "test_k35_a_producer_is_held_to_the_bound",
                "test_k35_loads_go_before_queued_backups_and_backups_do_not_starve",
            ),
            "test_scenarios_threads": (
                "test_k35_a_thousand_backups_stay_within_the_bound",
                "test_k35_an_urgent_load_passes_twenty_backups",
                "test_k35_a_slow_consumer_costs_others_no_time",
                "test_k35_a_consumer_that_stops_stops_nobody",
            ),
        },
    ),
    "K36": Case(
        "A page freed twice has two owners; what was allocated is a view of the free list",
        ("LMCache/LMCache#5005", "sgl-project/sglang#29310"),
        {
            "test_scenarios": ("test_k36_pages_are_freed_once",),
            "core/test_pages": (
                "test_a_bad_free_changes_nothing",
                "test_a_returned_array_is_the_callers_own",
                "test_random_programs_give_each_page_to_one_owner",
            ),
        },
    ),
    "K38": Case(
        "An exhausted host pool loses the device copy; pinned memory takes twice what was asked",
        ("sgl-project/sglang#27108", "vllm-project/vllm#53042", "pytorch/pytorch#95823"),
        {
            "test_scenarios": ("test_k38_an_exhausted_host_pool_loses_nothing",),
            "core/test_pages": ("test_alloc_is_all_or_nothing",),
            "test_pool": ("test_host_pools_are_aligned_packed_and_adoptable",),
            "driver/test_gpu": ("test_host_pools_are_pinned",),
        },
    ),
    "K46": Case(
        "A trace in another unit, or on a clock that goes back",
        ("triton-lang/triton#7663", "numba/numba#8600"),
        {
            "trace/test_scenarios": (
                "test_units_are_microseconds",
                "test_native_values_are_a_thousand_times_the_files",
                "test_wall_clock_step_changes_nothing",
                "test_one_clock_for_all_of_a_request",
            ),
        },
    ),
    "K48": Case(
        "Slices that overlap on one lane are dropped by the viewer",
        ("google/perfetto#503", "google/perfetto#4280"),
        {
            "trace/test_scenarios": (
                "test_overlapping_copies_get_lanes_of_their_own",
                "test_wild_overlaps_pass_the_checker",
            ),
        },
    ),
    "K52": Case(
        "Traces without a bound, and files that were cut off",
        ("golang/go#11520", "google/trace-viewer#298"),
        {
            "trace/test_scenarios": (
                "test_ring_keeps_the_cap_and_counts_the_rest",
                "test_export_streams",
                "test_sigkill_leaves_the_old_file",
                "test_failed_export_leaves_nothing",
                "test_off_costs_no_allocation",
            ),
        },
    ),
}


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of a file's functions."""
    tree = ast.parse((ROOT / f"{file}.py").read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, functions))


@pytest.mark.parametrize("number", CASES)
def test_every_case_has_its_tests(number: str) -> None:
    """The tests that keep a known fault away are there, under the names that the table has."""
    for file, names in CASES[number].tests.items():
        assert set(names) <= functions_of(file), file


def test_every_numbered_test_is_in_the_table() -> None:
    """A test that is named after a case is listed with it."""
    for file in ("test_scenarios", "test_scenarios_threads"):
        for name in functions_of(file):
            if name.startswith("test_k"):
                assert name in CASES[name[5:8].upper()].tests[file]
