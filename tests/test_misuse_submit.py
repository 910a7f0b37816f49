"""Odd values in every argument of a submit: a number of any kind is one, all else is refused by name, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import offload
from tests.sched import pools

PATIENCE = 20.0

ODD: dict[str, Callable[[], object]] = {
    "a tensor of two": lambda: torch.zeros(2),
    "a tensor of one": lambda: torch.zeros(1),
    "a tensor of none": lambda: torch.zeros(0),
    "a scalar tensor": lambda: torch.tensor(0.0),
    "a tensor of bools": lambda: torch.tensor([True, False]),
    "an array of two": lambda: np.zeros(2),
    "an array of one": lambda: np.ones(1),
    "an array of objects": lambda: np.array([object(), 1], object),
    "a scalar array": lambda: np.array(1.0),
    "a numpy float": lambda: np.float64(0),
    "a numpy integer": lambda: np.int64(1),
    "a numpy bool": lambda: np.True_,
    "an integer": lambda: 1,
    "an integer beyond floats": lambda: 10**400,
    "nan": lambda: float("nan"),
    "a complex number": lambda: 1j,
    "true": lambda: True,
    "nothing": lambda: None,
    "a string": lambda: "x",
    "strings": lambda: ["compute"],
    "a list": lambda: [1, 2],
    "a mapping": lambda: {"a": 1},
    "an object": object,
    "a class": lambda: threading.Event,
}
NUMBERS = {
    "a scalar tensor",
    "a scalar array",
    "a numpy float",
    "a numpy integer",
    "a numpy bool",
    "an integer",
    "true",
}
TAKEN: dict[str, set[str]] = {
    "priority": NUMBERS,
    "deadline": {"nothing"},
    "join": {"true"},
    "streaming": {"true"},
    "members": {"nothing"},
    "timeout": NUMBERS | {"nothing"},
    "io_backend": {"nothing"},
    "after": {"a tensor of none"},  # a sequence of nothing
}
"""By argument, what is no mistake; the clock has passed all those deadlines."""


@pytest.fixture(scope="module")
def scheduler() -> Iterator[offload.BlockingScheduler]:
    """A scheduler that outlives every refusal."""
    with offload.start_scheduler(*pools()) as scheduler:
        yield scheduler


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("argument", TAKEN)
def test_an_odd_argument_of_a_submit(
    scheduler: offload.BlockingScheduler, argument: str, odd: str
) -> None:
    """It is taken for what it is, or refused with its name before anything was queued."""
    submit = scheduler.backup if argument == "streaming" else scheduler.load
    given: dict[str, object] = {argument: ODD[odd]()}
    before = scheduler.statistics()
    if odd in TAKEN[argument]:
        transfer = submit(host_pages=[0], device_pages=[0], **given)  # type: ignore[arg-type]
        for layer in range(4) if argument == "streaming" else ():
            transfer.layer_written(layer)
        transfer.result(PATIENCE)
    else:
        with pytest.raises(offload.OffloadError, match=argument[:6]) as caught:
            submit(host_pages=[0], device_pages=[0], **given)  # type: ignore[arg-type]
        assert isinstance(caught.value, (offload.RequestError, offload.UnknownNameError))
        assert scheduler.statistics() == before
