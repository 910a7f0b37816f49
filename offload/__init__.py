"""Moves KV-cache pages between device memory and host memory while a language model serves.

`offload/api.py` lists the names. They are imported when the first of them is used: loading torch takes longer than
most commands of `python -m offload`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from offload.api import *
    from offload.api import __all__ as __all__
else:  # not for type checkers: they would let every name pass

    def __getattr__(name: str) -> object:
        """Import the public names, or the module of this name."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'offload' has no attribute {name!r}", name=name)
        if find_spec(f"offload.{name}"):
            return import_module(f"offload.{name}")
        api = import_module("offload.api")
        globals().update(__all__=api.__all__, **{each: getattr(api, each) for each in api.__all__})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module 'offload' has no attribute {name!r}", name=name) from None

    def __dir__() -> list[str]:
        return list(import_module("offload.api").__all__)


logging.getLogger(__name__).addHandler(logging.NullHandler())
