"""Which vLLM this works with. Another one is refused by what it lacks, and never by its number: builds from source
call themselves anything. Imports no vLLM by itself.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from offload import RequestError

_LOG = logging.getLogger("vllm.offload")  # below vLLM's own, which has the handlers

TESTED = (0, 32)
"""The vLLM that the tests run in. None before it has all that is used."""

WORKS = "0.32"


@contextmanager
def needed() -> Iterator[None]:
    """Have imports of vLLM that fail in this block say which version works.

    Raises:
        RequestError: A module or a name of vLLM is not there.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise  # something that vLLM itself needs
        raise refused([str(error).partition(" (")[0]]) from error


def refused(lacking: Sequence[str]) -> RequestError:
    """Return the error for a vLLM that is not the one that this stands on.

    Args:
        lacking: What is not there, or is there in another shape.
    """
    found = version()
    this = "none is installed" if found is None else f"this is {found}"
    return RequestError(
        f"offload works inside vLLM {WORKS}, and {this}. What it lacks: {'; '.join(lacking)}. Install vLLM {WORKS}, "
        "or leave out the connector.",
        value=found,
    )


def version() -> str | None:
    """Return what the imported vLLM calls itself; None where there is none."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return None if found is None else str(found)


def warn_if_untested() -> None:
    """Say once, where vLLM is newer than the one that the tests run in, which one that is."""
    found = version()
    if found is not None:
        _warn_if_untested(found)


@cache
def _warn_if_untested(found: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) > TESTED:
        _LOG.warning(
            "offload is tested with vLLM %s, and this is %s. All that it uses of vLLM is there; compare a few "
            "answers with those of an engine without the connector.",
            WORKS,
            found,
        )
