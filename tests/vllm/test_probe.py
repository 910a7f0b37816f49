"""What is used of vLLM's private parts is looked at when an engine starts: a name or a call that is gone is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import pytest

import offload
from offload.integrations.vllm import probe
from tests.vllm.symbolic import Block, Pool


class Asked:
    """Stands for a class of an engine."""

    annotated: int

    def __init__(self) -> None:
        self.assigned = 1

    @property
    def read_only(self) -> int:
        """Never written."""
        return 1

    def call(self, one: int, other: int = 0) -> None:
        """Take one or two."""


def test_names_come_from_the_class_and_from_its_constructor() -> None:
    """Whatever gives an instance its attributes counts; what nothing gives is named."""
    names = ("annotated", "assigned", "read_only", "call", "gone")
    assert probe.missing_names(Asked, names) == ["Asked.gone"]
    assert probe.missing_writes(Asked, ("assigned", "annotated")) == []
    assert probe.missing_writes(Asked, ("read_only", "gone")) == [
        "Asked.read_only, to be written",
        "Asked.gone, to be written",
    ]


@pytest.mark.parametrize("owner", [Asked, Asked()], ids=["class", "object"])
def test_calls_are_tried_by_their_signature(owner: object) -> None:
    """A call with too many or too few arguments is named as it is made."""
    assert probe.missing_call(owner, "call", "one") == []
    assert probe.missing_call(owner, "call", "one", "other") == []
    assert probe.missing_call(owner, "call") == ["Asked.call()"]
    assert probe.missing_call(owner, "call", "a", "b", "c") == ["Asked.call(a, b, c)"]
    assert probe.missing_call(owner, "gone", "a") == ["Asked.gone(a)"]


def test_fields_are_keywords_of_the_constructor() -> None:
    """The error says which keyword is not taken."""
    made = attrs.make_class("Made", ["first", "second"])
    assert probe.missing_fields(made, ("first", "second")) == []
    (said,) = probe.missing_fields(made, ("first", "third"))
    assert said.startswith("Made(first=, third=): ")


class Base:
    """An engine's class for connectors."""

    @property
    def flag(self) -> bool:
        """Whether."""
        return False

    def hook(self, request: object, count: int) -> None:
        """Hear of a request."""

    @classmethod
    def make(cls, config: object) -> None:
        """Make one."""


class Good(Base):
    """A connector."""

    extra = 3

    @property
    def flag(self) -> bool:
        """Whether."""
        return True

    def hook(self, request: object, count: int, *, more: int = 0) -> None:
        """Hear of a request."""

    @classmethod
    def make(cls, config: object) -> None:
        """Make one."""

    def _own(self) -> None: ...


def test_hooks_are_those_of_the_base() -> None:
    """The same names with the same parameters; what is private is ours."""
    assert probe.unknown_hooks(Good, Base) == []


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"hooked": lambda self, request: None}, "Base.hooked"),
        ({"hook": lambda self, request: None}, r"Base.hook\(self, request\), which has \(self, request, count\)"),
        ({"hook": lambda self, count, request: None}, "which has"),
        ({"flag": lambda self: True}, "Base.flag"),
        ({"hook": property(lambda self: 1)}, "Base.hook"),
        ({"make": classmethod(lambda cls: None)}, r"Base.make\(cls\), which has \(cls, config\)"),
    ],
    ids=["unknown", "fewer", "order", "property", "no property", "class method"],
)  # fmt: skip
def test_a_hook_that_would_not_be_called_is_named(members: dict[str, Any], says: str) -> None:
    """Nobody calls what the base does not have, or calls it with what is not taken."""
    (said,) = probe.unknown_hooks(type("Mine", (Base,), members), Base)
    assert re.search(says, said)


def test_the_pool_of_a_good_engine_is_taken_as_it_is() -> None:
    """Its null block is counted up and down, and nothing else changes."""
    pool = Pool.of(4)
    before = [block.ref_cnt for block in pool.blocks], list(pool.free)
    assert probe.missing_of_pool(pool) == []
    assert ([block.ref_cnt for block in pool.blocks], list(pool.free)) == before


class Renamed(Pool):
    """A pool whose frees have another name."""

    free_blocks = None  # type: ignore[assignment]


class TwoArguments(Pool):
    """A pool that wants to know who touches."""

    def touch(self, blocks: Sequence[Block], who: str) -> None:  # type: ignore[override]
        """Count."""


class Uncounted(Pool):
    """A pool that counts elsewhere."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count nothing."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Count nothing."""


@attrs.define(eq=False)
class Owned(Block):
    """A block that names its pool."""

    pool: object = None


def foreign() -> Pool:
    """Return a pool with blocks that name another one."""
    blocks: list[Block] = [Owned(number, pool="another") for number in range(4)]
    return Pool(blocks, blocks[1:])


def renumbered() -> Pool:
    """Return a pool whose blocks do not stand at their ids."""
    pool = Pool.of(4)
    pool.blocks.append(Block(9))
    return pool


def nameless() -> Pool:
    """Return a pool whose blocks are counted under another name."""
    pool = Pool.of(4)
    pool.blocks[0] = object()  # type: ignore[call-overload]
    return pool


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Renamed.of(4), ["Renamed.free_blocks(ordered_blocks)"]),
        (lambda: TwoArguments.of(4), ["TwoArguments.touch(blocks)"]),
        (lambda: Uncounted.of(4), ["Uncounted.touch and free_blocks that count users in ref_cnt"]),
        (foreign, ["Pool.blocks of this pool alone"]),
        (renumbered, ["Pool.blocks by block_id"]),
        (nameless, ["Pool.null_block.block_id, a number"]),
    ],
    ids=["renamed", "signature", "counts", "foreign", "ids", "blocks"],
)  # fmt: skip
def test_another_pool_is_named_by_what_it_lacks(made: Callable[[], Pool], says: list[str]) -> None:
    """Else a rename would be found in the middle of serving, or corrupt vLLM's counts."""
    assert probe.missing_of_pool(made()) == says


@pytest.mark.vllm
def test_the_tested_vllm_has_everything() -> None:
    """Both lists, against the real classes, and a real block pool."""
    from vllm.v1.core.block_pool import BlockPool

    from offload.integrations.vllm import needs, needs_spec
    from offload.integrations.vllm.connector import OffloadConnector
    from offload.integrations.vllm.spec import OffloadSpec, OffloadWorker

    needs.check_connector(OffloadConnector)
    needs_spec.check_spec(OffloadSpec, OffloadWorker)
    pool = BlockPool(8, enable_caching=True, hash_block_size=32)
    free = pool.get_num_free_blocks()
    needs.check_pool(pool)
    assert pool.get_num_free_blocks() == free
    assert [block.ref_cnt for block in pool.blocks] == [0] * 8


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("home", "owner", "name"),
    [
        ("vllm.v1.core.block_pool", "BlockPool", "touch"),
        ("vllm.v1.core.block_pool", "BlockPool", "evict_blocks"),
        ("vllm.v1.core.sched.output", "KVConnectorBlockState", "get_block_ids"),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "KVConnectorBase_V1",
            "has_pending_push_work",
        ),
        ("vllm.v1.kv_offload.base", "OffloadingWorker", "submit_load"),
    ],
)
def test_a_name_that_is_gone_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, home: str, owner: str, name: str
) -> None:
    """The error says what is missing and which version works; no engine gets as far as a request."""
    from vllm.v1.core.block_pool import BlockPool

    from offload.integrations.vllm import needs, needs_spec
    from offload.integrations.vllm.connector import OffloadConnector
    from offload.integrations.vllm.spec import OffloadSpec, OffloadWorker

    pool = BlockPool(8, enable_caching=True, hash_block_size=32)

    def start() -> None:
        needs.check_connector(OffloadConnector)
        needs_spec.check_spec(OffloadSpec, OffloadWorker)
        needs.check_pool(pool)

    monkeypatch.delattr(getattr(importlib.import_module(home), owner), name)
    says = rf"works inside vLLM 0\.32, .*lacks: {owner}\.{name}"
    with pytest.raises(offload.RequestError, match=says):
        start()
