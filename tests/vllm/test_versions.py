"""Another vLLM than the tested one is refused by what it lacks; a newer one that lacks nothing is said to be untested."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

import offload.integrations.vllm as door
from offload import RequestError
from offload.integrations.vllm import versions

HOMES = "offload.integrations.vllm."
OURS = ("connector", "spec", "checks", "stats", "wire", "needs", "needs_spec")
"""The modules that import vLLM."""


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Put a vLLM without submodules in the place of the installed one, or none at all."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm" or name in {HOMES + each for each in OURS}:
            monkeypatch.delitem(sys.modules, name)
    if version is None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        return
    old = ModuleType("vllm")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)


@pytest.mark.parametrize("name", door.__all__)
@pytest.mark.parametrize(
    ("version", "says"), [("0.29.1", "this is 0.29.1"), (None, "none is installed")]
)
def test_another_vllm_is_refused_at_the_door(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, says: str
) -> None:
    """What vLLM's factory asks for raises our error, with the version that works and what is not there."""
    pretend(monkeypatch, version)
    with pytest.raises(RequestError, match=rf"works inside vLLM 0\.32, and {says}.*lacks: .*vllm"):
        getattr(door, name)


@pytest.mark.parametrize("module", OURS)
def test_every_module_refuses_by_itself(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Imported first and alone, each says the same."""
    pretend(monkeypatch, "0.29.1")
    with pytest.raises(RequestError, match=r"this is 0\.29\.1"):
        importlib.import_module(HOMES + module)


def test_what_vllm_itself_lacks_is_not_taken_for_it() -> None:
    """A package that vLLM needs and that is not installed keeps its own error."""
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), versions.needed():
        importlib.import_module("no_such_package")


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ("0.32.0", 0),
        ("0.32.5", 0),
        ("0.33.0", 1),
        ("1.0.0rc1", 1),
        ("0.9.0", 0),
        ("dev", 0),
    ],
)
def test_a_newer_vllm_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    warned: int,
) -> None:
    """One line, with both versions, however many connectors are made."""
    pretend(monkeypatch, version)
    versions._warn_if_untested.cache_clear()
    lines: list[str] = []
    monkeypatch.setattr(versions._LOG, "warning", lambda text, *args: lines.append(text % args))
    versions.warn_if_untested()
    versions.warn_if_untested()
    assert len(lines) == warned
    assert all(f"tested with vLLM 0.32, and this is {version}" in line for line in lines)
