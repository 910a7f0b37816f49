"""Where copies run beside a model on the CPU: on cores that its compute threads are not bound to.

vLLM binds a worker's compute threads to cores, and keeps some free of them. A thread starts on the cores of
the thread that made it, so that without this our copies would take turns with the layers that they are
to hide behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def spare_cores() -> frozenset[int]:
    """Return the cores that this process may use and the calling thread may not; none where it may use all."""
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()
    allowed: list[set[int]] = []

    def ask() -> None:
        # The system cuts this down to what the process may use at all, for this thread alone.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        allowed.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return frozenset(allowed[0] - os.sched_getaffinity(0))


@contextmanager
def on_spare_cores() -> Iterator[None]:
    """Have threads that are made in this block, and those that they make, run on spare cores, if there are any."""
    spare = spare_cores()
    if not spare:
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, spare)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
