"""The demo from weights to files: one model, one plan, three ways of serving it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import attrs
import torch
import transformers
from transformers import PreTrainedModel

import offload
from offload.demo import prompt, weights
from offload.demo.chat import Tokenizer
from offload.demo.results import Results, combine
from offload.demo.serve import Heartbeat, Plan, Server, Turn
from offload.demo.table import Progress, report
from offload.driver.threads import ThreadsDriver
from offload.integrations.transformers import Sessions, session_pools

PAGE_SIZE = 16
PICTURED = 2
"""Forward passes in the picture: the last one that met a load, and the one before."""
RESIDENTS = 2
"""Sessions that the device pool holds while loading: one computes, one arrives or leaves."""


@attrs.frozen
class Options:
    """What the command line asks for."""

    prompt_files: tuple[Path, ...]
    chats: int
    turns: int
    words: int | None
    """Words of each text that are used; None: all."""

    max_new_tokens: int
    layout: str
    link_bytes_per_second: float | None
    out: Path


def main(options: Options) -> int:
    """Run everything, print it, write it. 0 when loaded equals resident, 1 when not, 2 when it cannot run."""
    try:
        prompts = _prompts(options)
        gguf = weights.gguf_file()
    except (OSError, ValueError, weights.WeightsMissing) as error:
        print(f"offload demo: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # One core computes, another copies; with two, they fight.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    print(
        "Weights: SmolLM2-135M-Instruct. The first start converts them (half a minute).", flush=True
    )
    model, tokenizer = weights.load(weights.converted(gguf))
    plan = Plan(tuple(prompts), options.turns, options.max_new_tokens)
    results = run(model, tokenizer, plan, options)
    print(report(results))
    _say_where(options.out)
    return 0 if results.identical_text else 1


def run(model: PreTrainedModel, tokenizer: Tokenizer, plan: Plan, options: Options) -> Results:
    """Serve the plan three ways, write the files, and return the comparison."""
    progress = Progress(sys.stderr)
    tracer = offload.Tracer()
    server = Server(model, tokenizer, plan, progress, layers_of(model), tracer)
    heartbeat = Heartbeat()
    driver = ThreadsDriver(options.link_bytes_per_second)

    async def body() -> Results:
        await anyio.to_thread.run_sync(_warm_up, model)
        progress.begin("loaded", plan.count)
        async with (
            sessions(server, options.layout, RESIDENTS, driver, tracer) as some,
            _beating(heartbeat),
        ):
            loaded = await server.cached(some, residents=RESIDENTS, evict=True)
        server.tracer = None  # The trace shows the serving loop; what follows is there to compare.
        progress.begin("resident", plan.count)
        chats = len(plan.prompts)
        async with sessions(server, options.layout, chats, ThreadsDriver(), None) as all_of_them:
            resident = await server.cached(all_of_them, residents=chats, evict=False)
        progress.begin("recomputed", plan.count)
        recomputed = await server.recomputed(_replies(loaded))
        progress.end()
        return combine(
            loaded=loaded,
            resident=resident,
            recomputed=recomputed,
            stalls=stalls(tracer),
            longest_loop_gap_s=heartbeat.longest_gap_s,
        )

    results = anyio.run(body)
    options.out.mkdir(parents=True, exist_ok=True)
    results.write(options.out / "demo.json")
    tracer.export(options.out / "demo.trace.json.gz")
    tracer.svg(options.out / "demo.svg", steps=PICTURED)
    return results


def _warm_up(model: PreTrainedModel) -> None:
    """Read the weights into memory once, so that no measured turn pays for it."""
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers of a model, in order: its one list of that many modules."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


def stalls(tracer: offload.Tracer) -> defaultdict[int, float]:
    """Return the seconds that forwards waited, by load."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for wait in tracer.timeline().waits:
        if wait.direction == offload.Direction.LOAD and wait.layer >= 0:
            seconds[wait.request] += (wait.end - wait.start) / 1e9
    return seconds


@asynccontextmanager
async def sessions(
    server: Server,
    layout: str,
    residents: int,
    driver: ThreadsDriver,
    tracer: offload.Tracer | None,
) -> AsyncIterator[Sessions]:
    """Open sessions on a device pool that holds `residents` of the plan's longest chat."""
    pages = -(-server.max_tokens() // PAGE_SIZE)
    pools = session_pools(
        server.model,
        page_size=PAGE_SIZE,
        num_pages=pages * residents,
        num_host_pages=pages * len(server.plan.prompts) + residents,  # as many backups run at once
        layout=layout,
    )
    async with offload.open_scheduler(pools, driver=driver, tracer=tracer) as scheduler:
        yield Sessions(scheduler)


@asynccontextmanager
async def _beating(heartbeat: Heartbeat) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(heartbeat.run)
        yield
        group.cancel_scope.cancel()


def _replies(turns: list[Turn]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(turn.chat, turn.turn): turn.answer.tokens for turn in turns}


def _prompts(options: Options) -> list[prompt.Prompt]:
    """Return as many prompts as there are chats: the user's own first."""
    own = prompt.read(list(options.prompt_files))
    chats = max(options.chats, len(own))
    built_in = [each for each in prompt.built_in() if each.name not in {p.name for p in own}]
    found = (own + built_in)[:chats]
    if len(found) < chats:
        raise ValueError(
            f"{chats} chats need as many texts, and there are {len(found)}: add --prompt-file"
        )
    return [each if options.words is None else each.shortened(options.words) for each in found]


def _say_where(out: Path) -> None:
    print(
        f"\nWrote {out / 'demo.json'}, {out / 'demo.svg'} (a picture of the overlap) and "
        f"{out / 'demo.trace.json.gz'}: open https://ui.perfetto.dev and drop the file on the page "
        "(it stays on your machine)."
    )
