"""Threads of offload: they end with the process, and begin with nothing of whoever starts them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import Context


def helper_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Return a daemon thread that is not started.

    It sees no context variable of the thread that starts it, which Python hands on where it is free-threaded: to
    whom they belong is long gone while it runs, and async libraries take it for one of their own tasks.
    """
    if sys.version_info >= (3, 14):
        return threading.Thread(target=target, name=name, daemon=True, context=Context())
    return threading.Thread(target=Context().run, args=(target,), name=name, daemon=True)
