"""The serving loop: chats that take turns on a device pool too small for all of them.

    turn:  wait for room -> load what the chat left on the host -> forward, layer by layer behind the load
           -> answer -> evict in the background, while the next chat's turn runs

Forwards run in a worker thread, one at a time; the loop stays free for everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
import attrs
import torch
from transformers import DynamicCache, PreTrainedModel

from offload import Tracer, layerwise
from offload.demo.chat import Answer, Conversation, Tokenizer, answer
from offload.demo.prompt import Prompt
from offload.integrations.transformers import Session, Sessions


class Audience(Protocol):
    """Who is told how it goes."""

    def told(self, chat: str, turn: int, tokens: int, limit: int) -> None:
        """Hear of one more token, on the thread that computes."""

    def finished(self, chat: str, turn: int, ttft_s: float, text: str) -> None:
        """Hear of a finished turn."""


@attrs.frozen
class Plan:
    """What every way of serving does alike."""

    prompts: tuple[Prompt, ...]
    turns: int
    max_new_tokens: int

    @property
    def count(self) -> int:
        """Turns of all chats."""
        return self.turns * len(self.prompts)

    def schedule(self) -> Iterator[tuple[int, int]]:
        """Yield (turn, chat) in the order they run: all chats' first turns, then all second ones."""
        for turn in range(self.turns):
            for chat in range(len(self.prompts)):
                yield turn, chat


@attrs.frozen
class Turn:
    """One measured turn."""

    chat: str
    turn: int
    """From 1."""

    prefix_tokens: int
    """Tokens cached before it."""

    new_tokens: int
    """Tokens of the chunk that ran in its first forward."""

    answer: Answer
    ttft_s: float
    """From the question to the first token, loading and waiting for room included."""

    bytes_loaded: int = 0
    request: int | None = None
    """The load's number in the trace."""


@attrs.define(eq=False)
class Served:
    """One chat while it is served."""

    prompt: Prompt
    conversation: Conversation
    session: Session | None = None


@attrs.define(eq=False)
class Server:
    """A model, its plan, and who is told about progress."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    plan: Plan
    audience: Audience
    layers: Sequence[torch.nn.Module]
    """The model's decoder layers, in order."""

    tracer: Tracer | None = None
    """Draws the forwards of cached turns."""

    def max_tokens(self) -> int:
        """Return the tokens of the longest chat, all its turns and answers included."""
        return max(self._tokens(prompt) for prompt in self.plan.prompts)

    def _tokens(self, prompt: Prompt) -> int:
        conversation = Conversation(self.tokenizer, prompt.text)
        for question in prompt.turns(self.plan.turns):
            conversation.ask(question)
        return len(conversation.ids) + self.plan.turns * self.plan.max_new_tokens

    async def cached(self, sessions: Sessions, *, residents: int, evict: bool) -> list[Turn]:
        """Serve the plan from session caches and return its turns.

        Args:
            residents: Sessions that the device pool holds at once.
            evict: Back up and evict each chat after its turn; False keeps all on the device.
        """
        room = anyio.Semaphore(residents)
        chats = [self._chat(prompt) for prompt in self.plan.prompts]
        done: list[Turn] = []
        async with anyio.create_task_group() as background:
            for turn, chat in self.plan.schedule():
                served = chats[chat]
                done.append(await self._turn(served, turn, sessions, room))
                if evict:
                    background.start_soon(self._evict, served, room)
        for served in chats:
            if served.session is not None:
                served.session.close()
        return done

    async def _turn(
        self, served: Served, turn: int, sessions: Sessions, room: anyio.Semaphore
    ) -> Turn:
        conversation = served.conversation
        conversation.ask(served.prompt.turns(self.plan.turns)[turn])
        started = time.perf_counter()
        transfer = None
        if served.session is None:
            await room.acquire()
            served.session = sessions.open(max_tokens=self.max_tokens())
        elif not served.session.resident:
            await room.acquire()
            transfer = await served.session.load()
        session = served.session
        prefix = session.tokens
        chunk = conversation.ids[prefix:]
        # The cache waits for its own layers; the hooks are there to draw the forward in the trace.
        hooks = layerwise.attach(self.layers, load=transfer, tracer=self.tracer)
        with session.use() as cache, hooks:
            said = await self._forward(served, turn, partial(answer, self.model, cache, chunk))
        if transfer is not None:
            await transfer
        conversation.reply(said.tokens)
        return self._finished(
            served,
            Turn(
                chat=served.prompt.name,
                turn=turn + 1,
                prefix_tokens=prefix,
                new_tokens=len(chunk),
                answer=said,
                ttft_s=said.first_token - started,
                bytes_loaded=transfer.nbytes if transfer is not None else 0,
                request=transfer.id if transfer is not None else None,
            ),
        )

    def _finished(self, served: Served, turn: Turn) -> Turn:
        text = served.conversation.text_of(turn.answer.tokens)
        self.audience.finished(turn.chat, turn.turn, turn.ttft_s, text)
        return turn

    async def _evict(self, served: Served, room: anyio.Semaphore) -> None:
        assert served.session is not None
        await served.session.evict()
        if self.tracer is not None:
            self.tracer.mark("evict", chat=served.prompt.name)
        room.release()

    async def recomputed(self, replies: dict[tuple[str, int], tuple[int, ...]]) -> list[Turn]:
        """Serve the plan without a cache between turns: every turn runs its whole prefix again.

        Args:
            replies: By (chat, turn), the answers that the conversations go on with, so that every
                way of serving sees the same prefixes.
        """
        chats = [self._chat(prompt) for prompt in self.plan.prompts]
        done: list[Turn] = []
        for turn, chat in self.plan.schedule():
            served = chats[chat]
            served.conversation.ask(served.prompt.turns(self.plan.turns)[turn])
            started = time.perf_counter()
            ids = list(served.conversation.ids)
            cache = DynamicCache(config=self.model.config)
            said = await self._forward(served, turn, partial(answer, self.model, cache, ids))
            name = served.prompt.name
            ttft_s = said.first_token - started
            done.append(self._finished(served, Turn(name, turn + 1, 0, len(ids), said, ttft_s)))
            served.conversation.reply(replies[name, turn + 1])
        return done

    def _chat(self, prompt: Prompt) -> Served:
        return Served(prompt, Conversation(self.tokenizer, prompt.text))

    async def _forward(self, served: Served, turn: int, run: Callable[..., Answer]) -> Answer:
        limit = self.plan.max_new_tokens
        work = partial(
            run,
            max_new_tokens=limit,
            eos_token_id=self.tokenizer.eos_token_id,
            told=lambda count: self.audience.told(served.prompt.name, turn + 1, count, limit),
        )
        return await anyio.to_thread.run_sync(work)


@attrs.define(eq=False)
class Heartbeat:
    """How long the loop was ever kept from running: a task that sleeps and looks at the clock."""

    interval: float = 0.005
    longest_gap_s: float = 0.0
    """The longest time by which a beat came late."""

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            start = time.perf_counter()
            await anyio.sleep(self.interval)
            late = time.perf_counter() - start - self.interval
            self.longest_gap_s = max(self.longest_gap_s, late)
