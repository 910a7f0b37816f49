"""Registered io backends and columns that are broken: they fail alone, are named, and hang nobody."""

from __future__ import annotations

import doctest
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import offload
from offload import registry
from offload.backend.cpu import CpuBackend
from offload.core.kinds import Direction
from offload.core.table import Rejection
from offload.errors import RequestError, TransferFailed, UnknownNameError, UnsupportedPairError
from offload.verdict import cells, explain
from tests.sched import SPEC, check_left, contents, pools

PATIENCE = 5.0


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a registry of its own, without the machine's entry points."""
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry(read=True))


def broken(*_: object) -> Any:
    """Raise."""
    raise ValueError("boom")


COLUMNS: dict[str, Callable[..., Any]] = {
    "raised ValueError('boom')": broken,
    "raised TypeError": lambda kind: "mine",
    "returned None": lambda *_: None,
    "returned 3": lambda *_: 3,
    "returned ''": lambda *_: "",
}


@pytest.mark.parametrize("said", COLUMNS)
def test_a_broken_column_rejects_and_harms_no_other_cell(said: str) -> None:
    """The matrix, `explain` and errors of other io backends read all columns."""
    registry.register_backend("rdma", CpuBackend, column=COLUMNS[said])
    verdict = explain(SPEC, layout="page_first", io_backend="rdma")
    assert not verdict.supported
    assert f"its column {said}" in str(verdict.reason)
    assert explain(SPEC, layout="page_first", io_backend="cpu").io_backends[-1] == "cpu"
    assert any(cell.supported for cell in cells())
    device, host = pools()
    with offload.start_scheduler(device, host) as scheduler:
        for name in ("rdma", "direct"):
            with pytest.raises(UnsupportedPairError):
                scheduler.load(host_pages=[0], device_pages=[0], io_backend=name)


@pytest.mark.parametrize("name", ["", None, 3])
def test_names_are_strings(name: str) -> None:
    """What is no name cannot be registered, looked up, or taken for the default."""
    with pytest.raises(RequestError, match="a name is a string"):
        registry.register_backend(name, CpuBackend, column=lambda *_: "mine")
    with pytest.raises(RequestError, match="a name is a string"):
        registry.register_layout(name, "p l t h d")
    wrongs: tuple[object, ...] = (name, [])
    for wrong in wrongs:
        with pytest.raises(UnknownNameError):
            registry.layout(wrong)  # type: ignore[arg-type]


def test_an_io_backend_that_cannot_be_a_key_is_unknown() -> None:
    """As every other misspelt one."""
    device, host = pools()
    with offload.start_scheduler(device, host) as scheduler, pytest.raises(UnknownNameError):
        scheduler.load(host_pages=[0], device_pages=[0], io_backend=[])  # type: ignore[arg-type]


def test_a_backend_that_cannot_be_made_is_refused_with_the_reason() -> None:
    """At submit, as one whose import fails is."""
    registry.register_backend("rdma", broken, column=lambda *_: "mine")
    with pytest.raises(UnsupportedPairError, match=r"could not be made \(ValueError\('boom'\)\)"):
        offload.open_scheduler(*pools(), io_backend="rdma")


@pytest.mark.parametrize("made", [object(), CpuBackend, None, 3])
def test_what_prepares_nothing_is_refused_when_the_scheduler_opens(made: object) -> None:
    """Not at the first copy; and the refusal offers neither it nor the pair that was asked for."""
    registry.register_backend("rdma", lambda: made, column=lambda *_: "mine")
    with pytest.raises(
        UnsupportedPairError, match=r"its factory made .*no method 'prepare'"
    ) as told:
        offload.open_scheduler(*pools(), io_backend="rdma")
    assert "rdma" not in told.value.io_backends
    assert told.value.layouts == ()


def test_a_broken_factory_is_not_offered_in_its_own_refusal() -> None:
    """For no layout: it would be as broken there. Its error is the cause, also of a group's member."""
    registry.register_backend("rdma", broken, column=lambda *_: "mine")
    group = offload.PoolGroup(
        layer_names=None, kv=offload.Pair(*pools()), more=offload.Pair(*pools())
    )
    for opened in (pools(), (group,)):
        with pytest.raises(UnsupportedPairError) as told:
            offload.open_scheduler(*opened, io_backend="rdma")
        assert "rdma" not in told.value.io_backends
        assert told.value.layouts == ()
        assert told.value.pair is None
        assert isinstance(told.value.__cause__, ValueError)
    assert told.value.pool == "kv"


def test_what_a_column_raised_is_the_cause() -> None:
    """With its traceback, when a scheduler opens and at a submit."""
    registry.register_backend("rdma", CpuBackend, column=broken)
    with pytest.raises(UnsupportedPairError) as opening:
        offload.open_scheduler(*pools(), io_backend="rdma")
    with (
        offload.start_scheduler(*pools()) as scheduler,
        pytest.raises(UnsupportedPairError) as submit,
    ):
        scheduler.load(host_pages=[0], device_pages=[0], io_backend="rdma")
    for told in (opening, submit):
        cause = told.value.__cause__
        assert isinstance(cause, ValueError)
        assert traceback.extract_tb(cause.__traceback__)[-1].name == "broken"


def test_the_documented_backend_copies() -> None:
    """The example in the docstring of `register_backend`, as it stands there."""
    names: dict[str, Any] = {"register_backend": registry.register_backend}
    examples = doctest.DocTestParser().get_examples(str(registry.register_backend.__doc__))
    for example in examples:
        exec(example.source, names)  # noqa: S102 - our own text
    assert examples
    device, host = pools()
    with offload.start_scheduler(device, host, io_backend="simple") as scheduler:
        scheduler.load(host_pages=[3, 5], device_pages=[1, 0]).result(PATIENCE)
        assert contents(device, [1, 0]) == contents(host, [3, 5])
        scheduler.backup(host_pages=[6], device_pages=[1]).result(PATIENCE)
    assert contents(host, [6]) == contents(host, [3])


class Proxy:
    """The copies of `cpu`, with one method of another's."""

    def __init__(self, inner: object, **other: object) -> None:
        self._inner = inner
        self.__dict__.update(other)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def backend(prepared: Callable[[object], object]) -> Callable[[], object]:
    """Return the factory of a backend that changes what `cpu` prepares."""

    class Changed:
        name = "rdma"

        def __init__(self) -> None:
            self._cpu = CpuBackend()

        def prepare(self, *arguments: Any) -> object:
            return prepared(self._cpu.prepare(*arguments))

    return Changed


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_ops", [broken, lambda layer: None])
def test_a_backend_that_cannot_count_its_copies_hangs_nobody(
    num_ops: Callable[[int], object], direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes have landed, so the transfer is done; that its copies are not counted is logged."""
    made = backend(lambda copies: Proxy(copies, num_ops=num_ops))
    registry.register_backend("rdma", made, column=lambda *_: "mine")
    device, host = pools()
    with (
        caplog.at_level(logging.WARNING, "offload"),
        offload.start_scheduler(device, host, io_backend="rdma") as scheduler,
    ):
        submit = scheduler.load if direction is Direction.LOAD else scheduler.backup
        submit(host_pages=[3], device_pages=[1]).result(PATIENCE)
    assert contents(device, [1]) == contents(host, [3])
    assert "copies landed that cannot be counted" in caplog.text
    check_left(scheduler._scheduler, device, host)


def test_a_backend_that_prepares_nothing_fails() -> None:
    """None would pass for a member that moves no pages: the transfer was done, and no byte had moved."""
    registry.register_backend("rdma", backend(lambda copies: None), column=lambda *_: "mine")
    pairs = {name: offload.Pair(*pools()) for name in ("one", "two")}
    group = offload.PoolGroup(layer_names=None, **pairs)
    with offload.start_scheduler(group, io_backend="rdma") as scheduler:
        load = scheduler.load(host_pages=[3], device_pages=[1])
        with pytest.raises(TransferFailed, match="'rdma' prepared None"):
            load.result(PATIENCE)


def test_rejections_are_still_taken() -> None:
    """A column that rejects is not a broken one."""
    registry.register_backend("rdma", CpuBackend, column=lambda *_: Rejection("it is asleep"))
    verdict = explain(SPEC, layout="page_first", io_backend="rdma")
    assert verdict.reason == "it is asleep"
