"""Attention of layer 0 runs while later layers are still on their way: by a held copy, and by the trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.testing import Hooks
from offload.trace.read import timeline
from offload.trace.records import Copy, Layer
from offload.trace.timeline import Timeline
from tests.vllm import models
from tests.vllm.connect import driver, ours
from tests.vllm.rig import Answer, Engine, engine
from tests.vllm.tally import TALLY

pytestmark = pytest.mark.vllm

PROMPT = models.prompt(300, 1)
RELOADED = 288
LAST = models.LAYERS - 1
LINK = 2e6
"""Bytes per second. A layer of the prefix is 144 KiB in fp32, so it takes 74 ms; a layer computes in 1."""


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder."""
    return models.save("llama", folder / "layerwise")


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[Answer], list[Answer]]:
    """What an engine without a connector answers, first and from its own cache."""
    with engine(model) as bare:
        return bare.ask([PROMPT]), bare.ask([PROMPT])


@pytest.fixture
def held(model: Path, expected: object) -> Iterator[tuple[Engine, Hooks]]:
    """An engine whose copies a test can hold. `expected` has been closed by then."""
    hooks = Hooks()
    with engine(model, ours(driver=driver(hooks=hooks), timeout_s=30.0, stream_mib=0.0)) as made:
        yield made, hooks


def test_layer_by_layer_under_the_forward(
    held: tuple[Engine, Hooks], expected: tuple[list[Answer], list[Answer]]
) -> None:
    """Each layer's copy is let go only when the layer before it has run: whoever waited for more would hang."""
    made, hooks = held
    made.ask([PROMPT])
    made.forget()
    gates = [hooks.gate(stream="load", layer=layer) for layer in range(models.LAYERS)]
    hooks.delay(0.02, stream="load")  # whoever does not wait reads what was there before
    gates[0].open()
    ran: list[int] = []

    def after(layer: int) -> None:
        ran.append(layer)
        if layer < LAST:
            assert not gates[layer + 1].is_open or len(ran) > models.LAYERS
            gates[layer + 1].open()

    with made.after_each_layer(after):
        again = made.ask([PROMPT])
    assert ran[: models.LAYERS] == list(range(models.LAYERS))
    assert again[0].cached == RELOADED
    TALLY.same(again, expected[1])


def test_the_forward_does_not_wait_for_stores(
    held: tuple[Engine, Hooks], expected: tuple[list[Answer], list[Answer]]
) -> None:
    """All stores are held: a request is answered all the same, and stored when they are let go."""
    made, hooks = held
    gate = hooks.gate(stream="backup")
    TALLY.same(made.ask([PROMPT]), expected[0])
    assert gate.arrived == 1
    gate.open()
    made.forget()
    assert made.ask([PROMPT])[0].cached == RELOADED


def test_no_layer_is_stored_before_it_is_written(held: tuple[Engine, Hooks]) -> None:
    """When layer `i` has just run, no copy of a later layer has begun."""
    made, hooks = held
    seen: list[tuple[int, set[int]]] = []

    def after(layer: int) -> None:
        seen.append((layer, {op.layer for op in hooks.ops if op.stream == "backup"}))

    with made.after_each_layer(after):
        made.ask([models.prompt(200, 2)], count=1)
    assert [layer for layer, _ in seen] == list(range(models.LAYERS))
    for layer, begun in seen:
        assert all(stored <= layer for stored in begun)


def test_the_trace_shows_it(
    model: Path, expected: tuple[list[Answer], list[Answer]], tmp_path: Path
) -> None:
    """On a slow link, layer 0 computes before the last layer has landed, and the load's request has its name."""
    file = tmp_path / "vllm.trace.json.gz"
    connector = ours(driver=driver(link_bytes_per_second=LINK), trace=str(file))
    with engine(model, connector) as made:
        made.ask([PROMPT])
        made.forget()
        TALLY.same(made.ask([PROMPT]), expected[1])
    trace = timeline(file)
    (tags,) = [request.tags for request in trace.requests if request.direction == "load"]
    assert tags is not None
    # `generate` counts its requests, and the engine adds a few letters.
    assert re.fullmatch(r"\d+-\w+", str(tags["requests"]))
    landed = {copy.layer: copy for copy in _loads(trace)}
    assert sorted(landed) == list(range(models.LAYERS))
    first, last = landed[0], landed[LAST]
    began = [
        layer for layer in _layers(trace) if layer.start >= first.end and layer.start < last.end
    ]
    assert began, "no layer computed between the landing of the first layer and that of the last"
    assert began[0].layer == 0


def _loads(trace: Timeline) -> list[Copy]:
    return [copy for copy in trace.copies if copy.direction == "load"]


def _layers(trace: Timeline) -> list[Layer]:
    return sorted(trace.layers, key=lambda layer: layer.start)
