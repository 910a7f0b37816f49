"""The seam to CUDA: nobody goes around it, and it calls the CUDA driver with the right arguments."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import offload
from offload.driver import cuda_calls, cuda_library, cuda_torch
from offload.driver.cuda_calls import Words
from offload.driver.cuda_library import DriverLibrary
from offload.driver.cuda_torch import TorchCuda
from offload.errors import CudaError

ROOT = Path(offload.__file__).parent
QUESTION = "torch.cuda.is_available"
"""Pools may ask whether there is a GPU before anything is opened: it makes no context."""
SEAM = ROOT / "driver" / "cuda_torch.py"


def names(path: Path) -> set[str]:
    """Return every dotted name that a file reads or imports, each in full."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def goes_around(path: Path) -> list[str]:
    """Return the names in a file that reach CUDA."""
    return sorted(
        name
        for name in names(path)
        for root in ("torch.cuda", "torch._C._cuda", "cuda.bindings", "cuda.core")
        if name != QUESTION and (name == root or name.startswith(root + "."))
    )


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_module_reaches_cuda(path: Path) -> None:
    """All CUDA calls go through the one seam, so that a fake can stand in for all of them."""
    if path != SEAM:
        assert goes_around(path) == []


def test_the_lint_sees_the_seam() -> None:
    """The check above finds something where there is something."""
    assert "torch.cuda.Event" in goes_around(SEAM)


def across_a_pause(path: Path) -> list[int]:
    """Return the lines of blocks that make a stream current and hold an `await` or a `yield`."""
    blocks = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.With | ast.AsyncWith)
        and any(".using(" in ast.unparse(item.context_expr) for item in node.items)
    )
    pauses = ast.Await | ast.Yield | ast.YieldFrom | ast.AsyncFor | ast.AsyncWith
    return [
        block.lineno
        for block in blocks
        if any(isinstance(node, pauses) for line in block.body for node in ast.walk(line))
    ]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_stream_stays_current_across_a_pause(path: Path) -> None:
    """A current stream belongs to a thread: whoever ran in a pause would enqueue on it."""
    assert across_a_pause(path) == []


def test_the_lint_sees_a_pause(tmp_path: Path) -> None:
    """The check above finds something where there is something."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("async def f(calls, raw, x):\n    with calls.using(raw):\n        await x\n")
    assert across_a_pause(wrong) == [2]


UNWANTED = {
    "record_stream": "it delays reuse as the allocator likes; a batch keeps its tensors itself",
    "LaunchHostFunc": "it blocks its stream, may call no CUDA, and needs the interpreter lock",
}


@pytest.mark.parametrize("name", UNWANTED)
def test_calls_that_are_not_used(name: str) -> None:
    """Nobody uses what the driver has a better way for."""
    users = [path for path in ROOT.rglob("*.py") if name in path.read_text(encoding="utf-8")]
    assert users == [], UNWANTED[name]


Function = Callable[..., int]
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)


class Library:
    """A `libcuda` on paper: writes down calls, answers with success unless told otherwise."""

    def __init__(self, *, batch: bool = True) -> None:
        self.asked: list[tuple[bytes, int]] = []
        self.batches: list[tuple[object, ...]] = []
        self.copies: list[tuple[int, int, int, int]] = []
        self.result = 0
        self.mode = 0
        self._batch = _BATCH(self._batched) if batch else None

    def cuGetProcAddress_v2(
        self, symbol: bytes, address: object, version: ctypes.c_int, *_: object
    ) -> int:
        self.asked.append((symbol, version.value))
        if self._batch is None:
            return 500
        found = ctypes.cast(self._batch, ctypes.c_void_p)
        address._obj.value = found.value  # type: ignore[attr-defined]
        return 0

    def _batched(
        self, to: int, start: int, sizes: int, count: int, attributes: int, indices: int,
        num_attributes: int, failed: int, stream: int,
    ) -> int:  # fmt: skip
        read = [list((ctypes.c_uint64 * count).from_address(array)) for array in (to, start, sizes)]
        raw = list((ctypes.c_int * 6).from_address(attributes))
        first = ctypes.c_size_t.from_address(indices).value
        ctypes.c_size_t.from_address(failed).value = 0
        self.batches.append((*read, raw, first, num_attributes, stream))
        return self.result

    def cuMemcpyAsync(
        self, to: ctypes.c_uint64, start: ctypes.c_uint64, size: ctypes.c_size_t,
        stream: ctypes.c_void_p,
    ) -> int:  # fmt: skip
        self.copies.append((to.value, start.value, size.value, stream.value or 0))
        return self.result

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        given = mode._obj  # type: ignore[attr-defined]
        self.mode, given.value = given.value, self.mode
        return self.result

    def cuGetErrorString(self, result: object, text: object) -> int:
        text._obj.value = b"invalid argument"  # type: ignore[attr-defined]
        return 0


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


def test_the_batched_copy_is_asked_for_by_version_and_called_with_nine_arguments() -> None:
    """One ABI, one attribute in stream order, one index, which is zero."""
    library = Library()
    driver = DriverLibrary(library)
    assert library.asked == [(b"cuMemcpyBatchAsync", 12_080)]
    assert driver.has_batch_copy
    driver.copy_batch(words(1, 2), words(3, 1 << 40), words(5, 6), 77)
    stream_order = [1, 0, 0, 0, 0, 0]
    assert library.batches == [([1, 2], [3, 1 << 40], [5, 6], stream_order, 0, 1, 77)]
    assert ctypes.sizeof(cuda_library._CopyAttributes) == 24


def test_a_driver_without_the_batched_copy_gets_one_call_per_range() -> None:
    """The same bytes move by plain asynchronous copies."""
    library = Library(batch=False)
    driver = DriverLibrary(library)
    assert not driver.has_batch_copy
    driver.copy_batch(words(1, 2), words(3, 4), words(5, 6), 77)
    assert library.copies == [(1, 3, 5, 77), (2, 4, 6, 77)]


@pytest.mark.parametrize("batch", [True, False])
def test_a_refusal_is_an_error_with_its_code(batch: bool) -> None:
    """What the CUDA driver returned is in `error_code`, and its text in the message."""
    library = Library(batch=batch)
    driver = DriverLibrary(library)
    library.result = 1
    with pytest.raises(CudaError, match="invalid argument") as caught:
        driver.copy_batch(words(1), words(2), words(3), 77)
    assert cuda_calls.code(caught.value) == 1


def test_the_legacy_stream_never_reaches_the_batched_copy() -> None:
    """Handle 0 is refused here, in words, before CUDA refuses it."""
    with pytest.raises(CudaError, match="legacy"):
        DriverLibrary(Library()).copy_batch(words(1), words(2), words(3), 0)


def test_an_error_without_a_code_has_none() -> None:
    """Only CUDA's errors carry one."""
    assert cuda_calls.code(ValueError()) is None
    with pytest.raises(RuntimeError, match="no CUDA stream"):
        cuda_calls.here()


def on_paper() -> tuple[Library, TorchCuda]:
    """Return a `libcuda` on paper and the calls over it."""
    library = Library()
    return library, TorchCuda(DriverLibrary(library))


def test_a_thread_gets_its_capture_mode_back() -> None:
    """Relaxed inside the block, whatever happens there, and as it was after it; for good only when asked."""
    library, calls = on_paper()
    with calls.relaxed():
        assert library.mode == cuda_torch._RELAXED
        with calls.relaxed():
            pass
        assert library.mode == cuda_torch._RELAXED
    assert library.mode == 0
    with pytest.raises(ValueError, match="inside"), calls.relaxed():
        raise ValueError("inside")
    assert library.mode == 0
    calls.relax_capture()
    assert library.mode == cuda_torch._RELAXED


class GenericStream(torch.Stream):
    """A stream of a GPU as `torch.accelerator` gives it, on a machine that has none."""

    device = torch.device("cuda", 1)
    stream_id, device_index, device_type = 7, 1, 1


class GenericEvent(torch.Event):
    """An event of a GPU, likewise."""

    device = torch.device("cuda", 1)
    event_id = 0


def test_generic_handles_are_matched_by_the_type_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream becomes one of CUDA's, with a handle; an event is recorded once it has one. Others are not ours."""
    _, calls = on_paper()
    made: list[dict[str, object]] = []
    theirs = object()

    class Stream(torch.cuda.Stream):
        def __new__(cls, **which: object) -> object:  # type: ignore[misc]
            made.append(which)
            return theirs

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    assert calls.as_stream(GenericStream("cpu")) is theirs
    assert made == [{"stream_id": 7, "device_index": 1, "device_type": 1}]
    event = GenericEvent()
    assert calls.as_event(event) is event
    assert not calls.is_recorded(event)
    monkeypatch.setattr(GenericEvent, "event_id", 5)
    assert calls.is_recorded(event)
    assert calls.as_event(GenericStream("cpu")) is None
    assert calls.as_stream(event) is None
    for other in (torch.Stream("cpu"), torch.Event(), "now", 3):
        assert calls.as_stream(other) is None
        assert calls.as_event(other) is None
