"""Whether classes and objects have what is used of them: names, and calls that they take. Imports no vLLM.

A name that is gone would be found when it is first used: in the middle of serving, or when a load first breaks.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Protocol


def missing_names(owner: type, names: Iterable[str]) -> list[str]:
    """Return which attributes neither the class nor its constructor gives to an instance."""
    there = _given(owner)
    return [f"{owner.__name__}.{name}" for name in names if name not in there]


def missing_writes(owner: type, names: Iterable[str]) -> list[str]:
    """Return which attributes of an instance cannot be written."""
    there = _given(owner)
    return [
        f"{owner.__name__}.{name}, to be written"
        for name in names
        if name not in there or (_is_property(owner, name) and getattr(owner, name).fset is None)
    ]


def missing_call(owner: object, name: str, *arguments: str) -> list[str]:
    """Return the call, if an object or class does not take it with so many positional arguments.

    Args:
        owner: A class stands for its instances.
        arguments: Names, for the error's text.
    """
    label = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    text = f"{label}.{name}({', '.join(arguments)})"
    method = getattr(owner, name, None)
    if not callable(method):
        return [text]
    itself = (None,) if isinstance(owner, type) else ()
    try:
        inspect.signature(method).bind(*itself, *arguments)
    except TypeError:
        return [text]
    return []


def missing_fields(owner: type, names: Sequence[str]) -> list[str]:
    """Return which keywords a class is not made with."""
    try:
        inspect.signature(owner).bind(**dict.fromkeys(names))
    except TypeError as error:
        return [f"{owner.__name__}({', '.join(f'{name}=' for name in names)}): {error}"]
    return []


def unknown_hooks(ours: type, base: type, own: Collection[str] = ()) -> list[str]:
    """Return which public methods of ours override nothing, or are called by the base's users in another way.

    Whoever calls the base would never call the first.

    Args:
        own: Those that only we call.
    """
    found = []
    for name, member in vars(ours).items():
        hook = callable(_plain(member)) or isinstance(member, property)
        if not hook or name.startswith("_") or name in own:
            continue
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None or isinstance(theirs, property) is not isinstance(member, property):
            found.append(f"{base.__name__}.{name}")
        elif not isinstance(member, property):
            found += _other_parameters(base.__name__, name, _plain(member), _plain(theirs))
    return found


class _Counted(Protocol):
    block_id: int
    ref_cnt: int


class _Pool(Protocol):
    @property
    def blocks(self) -> Sequence[_Counted]: ...

    @property
    def null_block(self) -> _Counted: ...


def missing_of_pool(pool: object) -> list[str]:
    """Return what vLLM's block pool lacks. Tries its counts on the null block, which nobody is ever given."""
    name = type(pool).__name__
    found = [
        *missing_call(pool, "touch", "blocks"),
        *missing_call(pool, "free_blocks", "ordered_blocks"),
        *missing_call(pool, "evict_blocks", "block_ids"),
        *(f"{name}.{each}" for each in ("blocks", "null_block") if not hasattr(pool, each)),
    ]
    return found or list(_wrong_blocks(name, pool))  # type: ignore[arg-type]


def _wrong_blocks(name: str, pool: _Pool) -> Iterator[str]:
    null = pool.null_block
    for attribute in ("block_id", "ref_cnt"):
        if not isinstance(getattr(null, attribute, None), int):
            yield f"{name}.null_block.{attribute}, a number"
            return
    last = pool.blocks[-1]
    if pool.blocks[null.block_id] is not null or last.block_id + 1 != len(pool.blocks):
        yield f"{name}.blocks by block_id"
        return
    if getattr(last, "pool", None) not in (None, pool):
        yield f"{name}.blocks of this pool alone"
        return
    before = null.ref_cnt
    pool.touch([null])  # type: ignore[attr-defined]
    touched = null.ref_cnt
    pool.free_blocks([null])  # type: ignore[attr-defined]
    if (touched, null.ref_cnt) != (before + 1, before):
        yield f"{name}.touch and free_blocks that count users in ref_cnt"


def _given(owner: type) -> set[str]:
    """Return the attributes of an instance: the class's own, its fields, and what its constructor assigns."""
    there = set(dir(owner))
    for each in owner.__mro__:
        there.update(getattr(each, "__annotations__", ()))
        made = vars(each).get("__init__")
        if isinstance(made, FunctionType):
            there |= {op.argval for op in dis.get_instructions(made) if op.opname == "STORE_ATTR"}
    return there


def _is_property(owner: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(owner, name, None), property)


def _plain(member: object) -> object:
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _other_parameters(base: str, name: str, mine: object, theirs: object) -> list[str]:
    """Return the hook, if ours does not take each of its parameters, by place and by name."""
    asked = inspect.signature(theirs).parameters  # type: ignore[arg-type]
    taken = inspect.signature(mine).parameters  # type: ignore[arg-type]
    named = [key for key, each in asked.items() if each.kind is not each.VAR_KEYWORD and each.kind is not each.VAR_POSITIONAL]  # fmt: skip
    if named == [key for key in taken if key in asked and key in named]:
        return []
    return [f"{base}.{name}({', '.join(taken)}), which has ({', '.join(asked)})"]
