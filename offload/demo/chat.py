"""One conversation as token ids, and one answer of a model to it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from transformers import Cache, PreTrainedModel

STANDS_FOR_ANSWER = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the demo needs of a tokenizer."""

    eos_token_id: int

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> object: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> object: ...


@attrs.define(eq=False)
class Conversation:
    """The tokens of a chat so far. Only ever appended to, so a cache of any prefix stays right."""

    tokenizer: Tokenizer
    text: str
    """What the user shows before the first question."""

    ids: list[int] = attrs.field(factory=list)

    def ask(self, question: str) -> None:
        """Append what comes between the last answer and the next one."""
        self.ids += self.encoded(question, first=not self.ids)

    def encoded(self, question: str, *, first: bool) -> list[int]:
        """Return the tokens of a turn of the user, as the model's chat template writes it."""
        if first:
            rendered = self._render([("user", f"{self.text}\n\n{question}")])
        else:
            # The template decides what stands between two turns: render both, keep what follows.
            whole = [("user", "-"), ("assistant", STANDS_FOR_ANSWER), ("user", question)]
            rendered = self._render(whole).partition(STANDS_FOR_ANSWER)[2]
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def reply(self, tokens: tuple[int, ...]) -> None:
        """Append an answer. Its end mark belongs to the next turn's template."""
        self.ids += [token for token in tokens if token != self.tokenizer.eos_token_id]

    def text_of(self, tokens: tuple[int, ...]) -> str:
        """Return an answer as text."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _render(self, messages: list[tuple[str, str]]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        rendered = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


@attrs.frozen
class Answer:
    """What the model said, and how it came to it."""

    tokens: tuple[int, ...]
    logits: tuple[str, ...]
    """A digest of the logits of every step: equal digests are equal bits."""

    first_token: float
    """When the first token was known, on `time.perf_counter`'s clock."""


def answer(
    model: PreTrainedModel,
    cache: Cache,
    chunk: list[int],
    *,
    max_new_tokens: int,
    eos_token_id: int,
    told: Callable[[int], None],
) -> Answer:
    """Run the chunk behind what the cache holds, then decode greedily. Blocks: call it in a thread.

    Args:
        told: Called with the number of tokens after each.
    """
    # The setting belongs to a thread: a worker would open a team of its own otherwise.
    torch.set_num_threads(1)
    tokens: list[int] = []
    digests: list[str] = []
    first_token = 0.0
    with torch.inference_mode():
        while True:
            ids = torch.tensor([chunk])
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
            first_token = first_token or time.perf_counter()
            tokens.append(token)
            digests.append(_digest(logits))
            told(len(tokens))
            if token == eos_token_id or len(tokens) == max_new_tokens:
                return Answer(tuple(tokens), tuple(digests), first_token)
            chunk = [token]


def _digest(logits: torch.Tensor) -> str:
    raw = logits.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()
