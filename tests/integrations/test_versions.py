"""Another transformers than the tested one is refused when the integration is imported, by what it lacks."""

from __future__ import annotations

import importlib
import sys

import pytest
import transformers.cache_utils
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from offload import RequestError
from offload.integrations.transformers.layers import StateLayer
from offload.integrations.transformers.versions import check, needed

HOME = "offload.integrations.transformers"
SAYS = rf"works with transformers 5\.23 or later.*this is {transformers.__version__}.*lacks: "


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the integration imported anew, in this test alone."""
    for name in list(sys.modules):
        if name == HOME or name.startswith(f"{HOME}."):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("module", ["", ".layers", ".kept"])
def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """One without a layer that caches of 5.23 have is named, with the version that works."""
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    with pytest.raises(RequestError, match=SAYS + "cannot import name 'DummyLayer'.*Install"):
        importlib.import_module(HOME + module)


def test_one_without_a_config_for_each_layer_is_refused() -> None:
    """The field is read when pools are made, so it would be missed late."""
    with pytest.raises(RequestError, match=SAYS + r"Old\.per_layer_config\."):
        check(type("Old", (), {}), LinearAttentionLayer, StateLayer)


def test_one_whose_layers_of_states_have_more_is_refused() -> None:
    """`StateLayer` does not call its base's constructor: it must have all that this one assigns."""

    class Newer:
        def __init__(self) -> None:
            self.device = None
            self.made_later = 1

    with pytest.raises(RequestError, match=SAYS + "Newer as it was: it has made_later too"):
        check(PreTrainedConfig, Newer, StateLayer)
    check(PreTrainedConfig, LinearAttentionLayer, StateLayer)


def test_what_transformers_itself_lacks_is_not_taken_for_it() -> None:
    """A package that it needs and that is not installed keeps its own error."""
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needed():
        importlib.import_module("no_such_package")
