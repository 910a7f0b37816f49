"""The thread that registers memory for a GPU, and takes the registration back when the memory is let go.

Theory of operation
-------------------
A registration is made and undone by calls that need a thread whose current device is right, and that a graph
capture elsewhere forbids to threads that have not said otherwise. The caller's thread should keep its device,
and the one that drops the last reference may never have met CUDA, or be in the middle of a collection. So both
happen on a thread of the library's own, one per GPU, which lives as long as memory is registered through it.

A `Mapping` that dies puts itself into that thread's queue, which takes no lock; it is unmapped there, once it
is unregistered. One that cannot be unregistered stays mapped for good: the system would give its addresses out
again, under a registration that still stands. What is let go is taken back before more is registered.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from offload.driver.cuda_calls import CudaCalls
from offload.driver.helper import helper_thread
from offload.errors import told
from offload.logs import logger

Job = Callable[[], None]

KEPT: list[Mapping] = []
"""Mappings that could not be unregistered."""


class Mapping(mmap.mmap):
    """Shared memory that is unregistered before it is unmapped, by the process that registered it."""

    keeper: Keeper
    starts: list[int]
    """Addresses of its registrations, in order."""

    def __del__(self) -> None:
        keeper = getattr(self, "keeper", None)
        if keeper is not None and keeper.pid == os.getpid():
            keeper.let_go(self)


class Keeper:
    """A thread with a GPU as its device. Made by `keeper_of`."""

    def __init__(self, calls: CudaCalls, device: int) -> None:
        self.calls = calls
        self.device = device
        self.pid = os.getpid()
        self.held = 1
        """Mappings that have it, and those about to."""
        self._jobs: SimpleQueue[Job | Mapping] = SimpleQueue()
        self._thread = helper_thread(self._run, f"offload-pinned-{device}")
        self._thread.start()

    def register(self, mapping: Mapping, base: int, bounds: list[int], prefault: Job) -> None:
        """Register a mapping between these offsets, all of it or nothing; it has this keeper from then on.

        Args:
            base: Its address.
            prefault: Called on the thread, first.
        """
        done: Future[None] = Future()

        def job() -> None:
            try:
                self.calls.set_device(self.device)
                self.calls.relax_capture()
                prefault()
                self._register(mapping, base, bounds)
            except BaseException as error:  # noqa: BLE001 - raised where the caller waits
                done.set_exception(error)
                self._drop()
            else:
                done.set_result(None)

        self._jobs.put(job)
        done.result()

    def let_go(self, mapping: Mapping) -> None:
        """Unregister a mapping, then let it be unmapped. Any thread, a collection's included."""
        self._jobs.put(mapping)

    def _run(self) -> None:
        while self.held:
            job = self._jobs.get()
            if isinstance(job, Mapping):
                self._unregister(job)
                self._drop()
            else:
                job()
            del job  # unmapped here

    def _register(self, mapping: Mapping, base: int, bounds: list[int]) -> None:
        mapping.starts = []
        try:
            for start, end in itertools.pairwise(bounds):
                self.calls.register(base + start, end - start)
                mapping.starts.append(base + start)
        except BaseException:
            self._unregister(mapping)
            raise
        mapping.keeper = self

    def _unregister(self, mapping: Mapping) -> None:
        """Unregister its chunks, last first. One that cannot be keeps the whole mapping."""
        failed: list[BaseException] = []
        while mapping.starts:
            try:
                self.calls.unregister(mapping.starts.pop())
            except Exception as error:  # noqa: BLE001 - logged; the memory cannot be given back
                failed.append(error)
        if failed:
            KEPT.append(mapping)
            logger.warning(
                "%d bytes of page-locked memory stay mapped, as they could not be unregistered: %s",
                len(mapping),
                told(failed[0]),
            )

    def _drop(self) -> None:
        """Hold one mapping less; the thread ends with the last, and the next one gets another."""
        with _LOCK:
            self.held -= 1
            if not self.held:
                _KEEPERS.remove(self)


_LOCK = threading.Lock()
_KEEPERS: list[Keeper] = []


def keeper_of(calls: CudaCalls, device: int) -> Keeper:
    """Return the thread of a GPU, which counts on a mapping that the caller is about to register."""
    with _LOCK:
        for keeper in _KEEPERS:
            if keeper.calls is calls and (keeper.device, keeper.pid) == (device, os.getpid()):
                keeper.held += 1
                return keeper
        keeper = Keeper(calls, device)
        _KEEPERS.append(keeper)
        return keeper
