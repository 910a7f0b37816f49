"""How bytes move: one file per io backend, found by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from offload import registry
from offload.backend.base import Backend
from offload.errors import UnknownNameError

_BUILT_IN = {
    "cpu": ("offload.backend.cpu", "CpuBackend"),
    "direct": ("offload.backend.direct", "DirectBackend"),
    "memcpy_batch": ("offload.backend.memcpy_batch", "MemcpyBatchBackend"),
    "kernel": ("offload.backend.kernel", "KernelBackend"),
    "staged": ("offload.backend.staged", "StagedBackend"),
}


_NEEDS = {"kernel": "triton", "staged": "triton"}


@cache
def missing() -> Mapping[str, str]:
    """Return, by io backend, the package that it needs and that is not installed."""
    return {name: package for name, package in _NEEDS.items() if find_spec(package) is None}


def make_backend(name: str) -> Backend:
    """Return a new backend by the name of its io backend. What it needs is imported only here.

    Raises:
        UnknownNameError: No io backend of that name can move bytes.
    """
    registered = registry.backends().get(name)
    if registered is not None:
        return cast("Backend", registered.factory())
    if name not in _BUILT_IN:
        raise UnknownNameError("io_backend", name, [*_BUILT_IN, *registry.backends()])
    module, made = _BUILT_IN[name]
    return cast("Backend", getattr(import_module(module), made)())
