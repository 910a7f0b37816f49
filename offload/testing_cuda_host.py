"""The host's side of `FakeCuda`: what CUDA keeps per thread, and what each call leaves behind.

Theory of operation
-------------------
A thread has a current device, a current stream on each device, a capture mode, and a context of the CUDA
driver or none. None of these says where a kernel runs: torch launches on the device of the tensors, so
`compute(device=1)` runs on device 1 whatever the thread's current device is.

* A context appears on a device when a thread makes that current, or uses a stream of it. It is never given
  back, and on a GPU it is half a gigabyte.
* The CUDA driver's own calls for memory want a thread that has a context.
* A call that a graph capture forbids fails on a thread that did not relax its mode, and, as on a GPU, the
  capture of the *other* thread is invalid from then on: it is told so when it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import cast

from offload.driver.cuda_calls import RawStream
from offload.errors import CudaError
from offload.testing_cuda_model import Call, Capture, FakeStream, Rule, ThreadState


class FakeHost:
    """Threads, their devices and captures, and the calls that fail."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Every call so far."""
        self.faults: list[str] = []
        """What a GPU would have done silently: races, freed arguments, lost waits, spoiled captures."""
        self.contexts: set[int] = set()
        """Devices on which some call has made a context."""
        self.broken: int | None = None
        """The code that every call returns, once a sticky error has happened."""
        self._changed = threading.Condition(threading.RLock())
        self._thread = ThreadState()
        self._streams: list[FakeStream] = []
        self._default: dict[int, FakeStream] = {}
        self._rules: list[Rule] = []
        self._captures: list[Capture] = []

    # ---- what a test does ---------------------------------------------------------------------------

    def named(self, name: str) -> list[Call]:
        """Return the calls of this name."""
        return [call for call in self.calls if call.name == name]

    def fail(
        self, error_code: int = 1, *, nth: int = 1, name: str | None = None, sticky: bool = False
    ) -> None:
        """Fail the nth call from now on, of this name or of any; sticky fails all later ones too."""
        self._rules.append(Rule(nth, name, error_code, sticky))

    def forgive(self) -> None:
        """Let the calls that were to fail succeed."""
        self._rules.clear()

    def break_context(self, error_code: int = 700) -> None:
        """Fail every call from now on, as after an illegal access on the device."""
        with self._changed:
            self.broken = error_code
            self._changed.notify_all()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Let the calling thread's current stream capture a graph, in global mode.

        Raises:
            CudaError: At the end, when a call of another thread has made the capture invalid.
        """
        capture = Capture(self._current(), threading.get_ident())
        self._thread.capture = capture
        self._captures.append(capture)
        try:
            yield
        finally:
            self._thread.capture = None
            self._captures.remove(capture)
        if capture.spoiled is not None:
            raise CudaError("capture", 901, f"{capture.spoiled} made it invalid")

    # ---- the calling thread -------------------------------------------------------------------------

    def set_device(self, device: int) -> None:
        self._thread.device, self._thread.bound = device, True
        self._call("set_device", device, on=device)

    def current_device(self) -> int:
        return self._thread.device

    def pci_address(self, device: int) -> str:
        return f"ffff:ff:{device:02x}.0"

    def relax_capture(self) -> None:
        self._call("relax_capture")
        self._thread.relaxed = True

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        before, self._thread.relaxed = self._thread.relaxed, True
        try:
            yield
        finally:
            self._thread.relaxed = before

    @contextlib.contextmanager
    def using(self, stream: RawStream) -> Iterator[None]:
        mine = cast("FakeStream", stream)
        before, self._thread.device = self._thread.device, mine.device
        self._thread.bound = True
        self._thread.streams.append(mine)
        try:
            yield
        finally:
            self._thread.streams.pop()
            self._thread.device = before

    def current_stream(self, device: int) -> RawStream:
        return self._current(device)

    def capturing(self, device: int) -> bool:
        capture = self._thread.capture
        return capture is not None and capture.stream is self._current(device)

    # ---- what calls do ------------------------------------------------------------------------------

    def _current(self, device: int | None = None) -> FakeStream:
        """Return the calling thread's current stream of a device; None: of its current one."""
        device = self._thread.device if device is None else device
        for stream in reversed(self._thread.streams):
            if stream.device == device:
                return stream
        return self._lasting(device)

    def _lasting(self, device: int) -> FakeStream:
        """Return a device's default stream."""
        with self._changed:
            if device not in self._default:
                self._default[device] = self._make(0, device)
            return self._default[device]

    def _make(self, handle: int, device: int) -> FakeStream:
        stream = FakeStream(device, handle, number=len(self._streams))
        self._streams.append(stream)
        return stream

    def _captured(self, stream: FakeStream) -> bool:
        return any(capture.stream is stream for capture in self._captures)

    def _call(
        self,
        name: str,
        *arguments: object,
        unsafe: bool = False,
        on: int | None = None,
        bound: bool = False,
    ) -> None:
        """Note a call and fail it when a rule, a capture or a broken context says so.

        Args:
            unsafe: Whether a capture forbids it.
            on: The device on which it makes a context, when there is none.
            bound: Whether it wants a thread that has a context.
        """
        state = self._thread
        stream = state.streams[-1].cuda_stream if state.streams else 0
        thread = threading.current_thread().name
        with self._changed:
            self.calls.append(Call(name, thread, state.device, stream, arguments))
            if on is not None:
                self.contexts.add(on)
            if self.broken is not None:
                raise CudaError(name, self.broken)
            for rule in self._rules[:]:
                if rule.name in (None, name):
                    rule.nth -= 1
                    if rule.nth == 0:
                        self._rules.remove(rule)
                        self._fail(name, rule)
            if bound and not state.bound:
                raise CudaError(name, 201, "the calling thread has no context")
            if unsafe and not state.relaxed:
                self._spoil(name, thread)

    def _spoil(self, name: str, thread: str) -> None:
        """Break every capture under way, and refuse the call that did."""
        if not self._captures:
            return
        for capture in self._captures:
            capture.spoiled = f"{name} on {thread}"
        self.faults.append(f"capture: {name} on {thread} made it invalid")
        raise CudaError(name, 900, "a thread captures a graph in global mode")

    def _fail(self, name: str, rule: Rule) -> None:
        if rule.sticky:
            self.break_context(rule.error_code)
        raise CudaError(name, rule.error_code)
