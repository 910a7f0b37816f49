"""Device memory that the library takes for itself: on a stream that lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from offload.driver.cuda_library import DriverLibrary
from offload.driver.cuda_torch import TorchCuda
from tests.driver.test_cuda_calls import Library


def test_staging_memory_is_taken_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the stream that will use it waits for what the default stream had queued."""
    log: list[tuple[object, ...]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append((self.name, "waits for", other.name))

    @contextlib.contextmanager
    def using(stream: Stream) -> Iterator[None]:
        log.append(("enter", stream.name))
        yield
        log.append(("leave", stream.name))

    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream("default"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("ours"))
    monkeypatch.setattr(torch.cuda, "stream", using)
    memory = TorchCuda(DriverLibrary(Library())).device_memory(64, torch.device("cpu"))
    assert (memory.dtype, memory.numel()) == (torch.uint8, 64)
    assert log == [("enter", "default"), ("leave", "default"), ("ours", "waits for", "default")]
