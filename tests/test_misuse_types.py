"""Arguments of the wrong type: whatever is passed where, an error of ours names the argument, and nothing opens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import offload
from offload import registry
from offload.testing import ThreadsDriver

SPEC = offload.PoolSpec.mha(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8)
DEVICE = offload.DevicePool.allocate(SPEC, num_pages=8)
HOST = offload.HostPool.like(DEVICE, num_pages=8)
PAIR = offload.Pair(DEVICE, HOST)
GROUP = offload.PoolGroup(kv=PAIR)
HELD = {name: [torch.zeros(8, 2, 8, dtype=torch.bfloat16) for _ in range(2)] for name in "kv"}
TRACER = offload.Tracer()

ODD: dict[str, Callable[[], object]] = {
    "an integer": lambda: 3,
    "a number below 0": lambda: -1,
    "half": lambda: 1.5,
    "nan": lambda: float("nan"),
    "a string": lambda: "odd",
    "nothing": lambda: None,
    "true": lambda: True,
    "bytes": lambda: b"odd",
    "an object": object,
    "a list": list,
    "a list of numbers": lambda: [3],
    "a list of lists": lambda: [[], []],
    "a mapping": lambda: {"odd": 3},
    "an iterator": lambda: iter([1]),
    "a function": lambda: print,
    "a class": lambda: ThreadsDriver,
    "a tensor": lambda: torch.zeros(2),
}

NUMBER = {"an integer"}
MAYBE = {"nothing"}
CALLABLE = {"a function", "a class"}

CALLS: dict[str, tuple[Callable[..., object], dict[str, object], dict[str, set[str]]]] = {
    "open_scheduler": (
        offload.open_scheduler,
        {"device": DEVICE, "host": HOST},
        {
            "limits": MAYBE,
            "tracer": MAYBE,
            "driver": MAYBE,
            "compute_streams": {"a list", "a list of numbers", "a list of lists"},
        },
    ),
    "PoolSpec.mha": (
        offload.PoolSpec.mha,
        {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 8},
        {
            **dict.fromkeys(["num_layers", "page_size", "num_kv_heads", "head_dim"], NUMBER),
            "v_head_dim": NUMBER | MAYBE,
            "layer_names": MAYBE,
        },
    ),
    "PoolSpec.mla": (
        offload.PoolSpec.mla,
        {"num_layers": 2, "page_size": 4, "latent_dim": 8},
        {
            **dict.fromkeys(["num_layers", "page_size", "latent_dim", "rope_dim"], NUMBER),
            "layer_names": MAYBE,
        },
    ),
    "PoolSpec.rows": (
        offload.PoolSpec.rows,
        {"num_layers": 2, "page_size": 6, "row_bytes": 8},
        {
            **dict.fromkeys(["num_layers", "page_size", "row_bytes"], NUMBER),
            "slot_page_size": NUMBER | MAYBE,
            "layer_names": MAYBE,
        },
    ),
    "PoolSpec.state": (
        offload.PoolSpec.state,
        {"num_layers": 2, "components": {"a": ((3,), torch.float32)}},
        {"num_layers": NUMBER, "ring_size": NUMBER, "layer_names": MAYBE},
    ),
    "PoolSpec": (
        offload.PoolSpec,
        {
            "kind": SPEC.kind,
            "num_layers": 2,
            "page_size": 4,
            "components": SPEC.components,
        },
        {"num_layers": NUMBER, "page_size": NUMBER, "layer_names": MAYBE},
    ),
    "DevicePool.allocate": (
        offload.DevicePool.allocate,
        {"spec": SPEC, "num_pages": 2},
        {"num_pages": NUMBER},
    ),
    "DevicePool.adopt": (
        offload.DevicePool.adopt,
        {"spec": SPEC, "tensors": HELD},
        {"axes": MAYBE},
    ),
    "HostPool.like": (
        offload.HostPool.like,
        {"device": DEVICE, "num_pages": 2},
        {"num_pages": NUMBER, "layout": MAYBE, "page_align": NUMBER | MAYBE},
    ),
    "HostPool.allocate": (
        offload.HostPool.allocate,
        {"spec": SPEC, "num_pages": 2},
        {
            "num_pages": NUMBER,
            "layout": MAYBE,
            "axes": MAYBE,
            "pinned": MAYBE,
            "page_align": NUMBER | MAYBE,
        },
    ),
    "HostPool.adopt": (
        offload.HostPool.adopt,
        {"spec": SPEC, "tensors": HELD, "axes": "pt h d"},
        {"layout": MAYBE},
    ),
    "Pair": (
        offload.Pair,
        {"device": DEVICE, "host": HOST},
        {"pages": CALLABLE, "follows": {"a string"} | MAYBE, "layers": MAYBE},
    ),
    "Pair.backed": (
        offload.Pair.backed,
        {"device": DEVICE, "num_host_pages": 2},
        {
            "num_host_pages": NUMBER,
            "layout": MAYBE,
            "pages": CALLABLE,
            "follows": {"a string"} | MAYBE,
            "layers": MAYBE,
        },
    ),
    "PoolGroup": (
        lambda layer_names=None, kv=PAIR: offload.PoolGroup(layer_names=layer_names, kv=kv),
        {},
        {"layer_names": MAYBE},
    ),
    "PoolGroup.alloc": (
        lambda side="host", n=0, members=None: GROUP.alloc(side, n, members),
        {},
        {"n": {"an integer", "true"}, "members": MAYBE},
    ),
    "PoolGroup.free": (
        lambda side="host", pages=None: GROUP.free(
            side, GROUP.alloc("host", 0) if pages is None else pages
        ),
        {},
        {"pages": MAYBE},
    ),
    "explain": (
        offload.explain,
        {"spec": SPEC, "layout": "page_first"},
        {"device": MAYBE},
    ),
    "PageAllocator": (
        lambda num_pages=4: offload.PageAllocator(num_pages),
        {},
        {"num_pages": NUMBER},
    ),
    "rules.trailing": (offload.rules.trailing, {}, {"count": NUMBER}),
    "rules.ratio": (offload.rules.ratio, {"pages": 1}, {"pages": NUMBER, "per": NUMBER}),
    "Tracer": (
        offload.Tracer,
        {},
        {
            "capacity": NUMBER,
            "rank": NUMBER,
            "labels": CALLABLE | MAYBE,
            "active": {"true"},
        },
    ),
    "Tracer.export": (
        TRACER.export,
        {"path": "trace.json"},
        {"overlay": MAYBE},
    ),
    "Tracer.svg": (
        TRACER.svg,
        {"path": "out.svg"},
        {"path": {"a string"}, "steps": NUMBER | MAYBE},
    ),
}

ARGUMENTS = [
    (call, argument)
    for call, (made, _, _) in CALLS.items()
    for argument in inspect.signature(made).parameters
]


@pytest.mark.parametrize(("call", "argument"), ARGUMENTS)
def test_what_an_argument_does_not_take_is_an_error_of_ours(
    call: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither passed over in silence, nor told by whatever Python raises somewhere below."""
    monkeypatch.chdir(tmp_path)
    made, right, taken = CALLS[call]
    passed, texts = set(), []
    for odd, make in ODD.items():
        try:
            made(**{**right, argument: make()})
        except (offload.OffloadError, FileNotFoundError) as error:
            texts.append(str(error))
        else:
            passed.add(odd)
    assert passed == taken.get(argument, set())
    assert [text for text in texts if "0x" in text or "tensor(" in text] == []


def test_what_cannot_be_called_is_not_registered() -> None:
    """A factory or a column of the wrong type is told at once, and not when somebody asks for the name."""
    for odd in ("numpy", None, 3):
        with pytest.raises(
            offload.RequestError, match=r"register_driver: factory is .* a function"
        ):
            offload.register_driver("odd", odd)  # type: ignore[arg-type]
        with pytest.raises(offload.RequestError, match=r"register_backend: factory is"):
            offload.register_backend("odd", odd, column=print)  # type: ignore[arg-type]
        with pytest.raises(offload.RequestError, match=r"register_backend: column is"):
            offload.register_backend("odd", print, column=odd)  # type: ignore[arg-type]
    assert "odd" not in {**registry.drivers(), **registry.backends()}


@pytest.mark.parametrize("pool", [offload.DevicePool, offload.HostPool])
def test_a_pool_s_class_says_what_makes_pools(pool: type[offload.DevicePool]) -> None:
    """Called as if it made one, it names what does."""
    with pytest.raises(offload.RequestError, match=rf"{pool.__name__}\.allocate\(spec, num_pages="):
        pool(SPEC, num_pages=8)


def test_layerwise_names_what_is_no_transfer() -> None:
    """A fence of something else, or a tracer that is none, is told before a forward runs."""
    with pytest.raises(offload.RequestError, match="fence takes transfers, and got 'load'"):
        offload.layerwise.fence("load", 0)  # type: ignore[arg-type]
    with pytest.raises(
        offload.RequestError, match="attach: tracer is 3; it takes a Tracer, or None"
    ):
        offload.layerwise.attach([torch.nn.Identity()], tracer=3)  # type: ignore[arg-type]


TOLD = {
    "a number for a driver": (
        {"driver": 3},
        "open_scheduler: driver is 3; it takes 'cuda', 'threads', a registered name, a driver, or None.",
    ),
    "a driver's class": (
        {"driver": ThreadsDriver},
        (
            "open_scheduler: driver is the class ThreadsDriver; it takes 'cuda', 'threads', a registered "
            "name, a driver, or None."
        ),
    ),
    "a mapping for limits": (
        {"limits": {"max_queued_bytes": 3}},
        "open_scheduler: limits is a dict; it takes a Limits, or None.",
    ),
    "a path for a tracer": (
        {"tracer": "trace.json"},
        "open_scheduler: tracer is 'trace.json'; it takes a Tracer, or None.",
    ),
    "one stream": (
        {"compute_streams": 7},
        "open_scheduler: compute_streams is 7; it takes a sequence of streams.",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), TOLD.values(), ids=TOLD.keys())
def test_a_refused_argument_is_told_by_name_and_value(wrong: dict[str, object], said: str) -> None:
    """The text names the call, the argument, what it is and what it takes."""
    with pytest.raises(offload.RequestError) as caught:
        offload.open_scheduler(DEVICE, HOST, **wrong)  # type: ignore[arg-type]
    assert str(caught.value) == said
    (value,) = wrong.values()
    assert caught.value.value is value
