"""Prompts: a text, and the questions that a user asks about it, one per turn.

A prompt file is plain text. Lines that begin with `>>>` are the questions, in order; a file without
any gets three that fit every text.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import attrs

MARK = ">>>"
QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Which person or thing matters most in it, and why?",
    "How does it end?",
)


@attrs.frozen
class Prompt:
    """One chat to come."""

    name: str
    text: str
    questions: tuple[str, ...]

    def shortened(self, words: int) -> Prompt:
        """Return this prompt with the first words of its text alone."""
        return attrs.evolve(self, text=" ".join(self.text.split()[:words]))

    def turns(self, count: int) -> tuple[str, ...]:
        """Return so many questions, starting over when there are fewer."""
        return tuple(self.questions[turn % len(self.questions)] for turn in range(count))


def parse(name: str, content: str) -> Prompt:
    """Return the prompt that a file holds.

    Raises:
        ValueError: It holds no text.
    """
    lines = content.splitlines()
    questions = [line.removeprefix(MARK).strip() for line in lines if line.startswith(MARK)]
    text = "\n".join(line for line in lines if not line.startswith(MARK)).strip()
    if not text:
        raise ValueError(f"prompt {name!r} holds no text")
    return Prompt(name, text, tuple(questions) or QUESTIONS)


def built_in() -> list[Prompt]:
    """Return the prompts that come with the demo, by name."""
    folder = files("offload.demo") / "prompts"
    found = [file for file in folder.iterdir() if file.name.endswith(".txt")]
    return [
        parse(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
        for file in sorted(found, key=lambda file: file.name)
    ]


def read(paths: list[Path]) -> list[Prompt]:
    """Return the prompts in these files.

    Raises:
        OSError, ValueError: A file cannot be read, or holds no text.
    """
    return [parse(path.stem, path.read_text(encoding="utf-8")) for path in paths]
