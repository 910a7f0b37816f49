"""What a user writes into `kv_connector_extra_config`, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from offload import RequestError, UnknownNameError
from offload.integrations.vllm.memory import Memory

GIB = 1 << 30

_VLLM_OWN = frozenset({"spec_name", "spec_module_path", "blocks_per_chunk", "block_size"})
"""Keys that vLLM reads from the same mapping."""


@attrs.frozen
class Settings:
    """The keys of `kv_connector_extra_config`. One of the first two is needed."""

    host_gib: float | None = None
    """GiB of host memory on each rank."""

    host_blocks: int | None = None
    """Or: how many blocks it holds."""

    timeout_s: float = 60.0
    """Seconds after which a load or a store fails, and after which any wait for one ends. Longer than the
    slowest load under load; shorter than a client waits."""

    store: Literal["all", "prompt", "none"] = "all"
    """Which full blocks are backed up."""

    stream_mib: float = 16.0
    """Stores from this size on leave layer by layer while the forward goes on; smaller ones as a whole at its
    end. 16 MiB take 1-2 ms on a link of 10-16 GB/s; starting 32 layers apart costs 2 ms more of a core than
    starting them together."""

    async_load_tokens: int | None = None
    """Loads of more tokens than this are done before their request is scheduled: nobody else in a batch waits for
    them, and the request itself waits for all layers. 0: every load. None: no load, all run under the forward."""

    io_backend: str = "auto"
    """How bytes move; see `python -m offload matrix`."""

    driver: str | None = None
    """`cuda`, `threads`, or one that a package has registered; None picks by the device."""

    kv_cache_layout: str | None = None
    """A layout to ask vLLM for, such as `LBHNC`. None: whatever its attention backend prefers."""

    trace: str | None = None
    """A file that a timeline of this rank is written to when vLLM shuts down: `.json` or `.json.gz`.
    With several ranks `{rank}` stands in it, or is put before the suffix."""

    trace_capacity: int = 65_536
    """Records that the timeline keeps, the newest."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Settings:
        """Return the settings of a mapping.

        Raises:
            UnknownNameError: A key is unknown.
            RequestError: A value is no such value, or the host has no size.
        """
        known = {field.name: field for field in attrs.fields(cls)}
        for key in given:
            if key not in known and key not in _VLLM_OWN:
                raise UnknownNameError("kv_connector_extra_config key", key, known)
        made = cls(**{key: value for key, value in given.items() if key in known})  # type: ignore[arg-type]
        made._check()
        return made

    def _check(self) -> None:
        if (self.host_gib is None) == (self.host_blocks is None):
            raise RequestError(
                "kv_connector_extra_config needs the size of host memory: 'host_gib' (GiB on each rank) or "
                f"'host_blocks' (a number of blocks), one of them. Got host_gib={self.host_gib!r} and "
                f"host_blocks={self.host_blocks!r}."
            )
        for name in ("host_gib", "timeout_s"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 < value < float("inf")):
                raise _wrong(name, value, "a number above 0")
        if not _is_number(self.stream_mib) or not self.stream_mib >= 0:
            raise _wrong("stream_mib", self.stream_mib, "a number from 0 up")
        for name, least in (("host_blocks", 1), ("trace_capacity", 1), ("async_load_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise _wrong(name, value, f"a whole number from {least} up")
        if self.store not in ("all", "prompt", "none"):
            raise UnknownNameError("store", self.store, ["all", "prompt", "none"])

    def num_host_blocks(self, block_bytes: int, *, memory: Memory, num_ranks: int = 1) -> int:
        """Return how many blocks each rank's host memory holds.

        Args:
            block_bytes: Of one block of this rank, over all its layers.
            memory: What there is.
            num_ranks: Ranks on this machine.

        Raises:
            RequestError: It holds none, or is more than there is.
        """
        count = self.host_blocks
        if count is None:
            assert self.host_gib is not None
            count = int(self.host_gib * GIB) // block_bytes
        if not count:
            raise RequestError(
                f"host_gib={self.host_gib} holds no block: one is {block_bytes} bytes on this rank. "
                f"Set host_gib to {block_bytes / GIB:.3g} or more; a useful size is that of the device's "
                "KV cache, or a few times it."
            )
        if count * block_bytes * num_ranks > memory.nbytes:
            raise RequestError(
                f"host memory for {count} blocks of {block_bytes} bytes on each of {num_ranks} ranks is "
                f"{count * block_bytes * num_ranks / GIB:.1f} GiB, and {memory.who} "
                f"{memory.nbytes / GIB:.1f} GiB. Set a smaller host_gib or host_blocks."
            )
        return count

    @property
    def stream_bytes(self) -> float:
        """Bytes of a store from which on it leaves layer by layer."""
        return self.stream_mib * (1 << 20)

    def trace_path(self, rank: int, num_ranks: int) -> str | None:
        """Return the file that a rank's timeline goes to."""
        if self.trace is None or "{rank}" in self.trace or num_ranks == 1:
            return None if self.trace is None else self.trace.replace("{rank}", str(rank))
        for suffix in (".json.gz", ".json"):
            if self.trace.endswith(suffix):
                return f"{self.trace.removesuffix(suffix)}.rank{rank}{suffix}"
        return f"{self.trace}.rank{rank}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(name: str, value: object, expected: str) -> RequestError:
    return RequestError(
        f"kv_connector_extra_config has {name}={value!r}; it takes {expected}.", value=value
    )
