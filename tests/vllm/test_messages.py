"""What crosses between processes: plans one way, outcomes the other."""

from __future__ import annotations

import pickle

import attrs

from offload.integrations.vllm.messages import Job, Outcomes, StepPlan

JOB = Job(3, (7, 8), (1, 0), ("a", "b"), 5)


def test_messages_survive_a_process_boundary() -> None:
    """They are pickled once a step, and hold nothing that belongs to one process."""
    plan = StepPlan(load=JOB, store=attrs.evolve(JOB, number=4))
    assert pickle.loads(pickle.dumps(plan)) == plan
    outcomes = Outcomes({1: 1}, {2: 1})
    assert pickle.loads(pickle.dumps(outcomes)) == outcomes


def test_outcomes_add_up_over_ranks() -> None:
    """A job has ended when all ranks have said so, in whatever step."""
    total = Outcomes({1: 1, 2: 1}) + Outcomes({1: 1}, {2: 1})
    assert total == Outcomes({1: 2, 2: 1}, {2: 1})
    assert not Outcomes()
    assert Outcomes(failed={1: 1})


def test_a_tag_names_requests_and_counts_the_rest() -> None:
    """A trace of a wide step stays readable."""
    assert JOB.tag == "a,b,+3"
    assert attrs.evolve(JOB, num_requests=2).tag == "a,b"
