"""vLLM's KV tensors as pools: every layout by its strides, and what is refused."""

# Axes: L layers, B blocks, H head slots, N tokens, C content.

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from offload import GeometryError, start_scheduler
from offload.integrations.vllm.adopt import Block, adopt

SIZES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 6}

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's names of memory orders; what it registers is always [B, H, N, C]."""


def caches(
    layout: str, dtype: torch.dtype = torch.float32, **sizes: int
) -> dict[str, torch.Tensor]:
    """Return one view [B, H, N, C] per layer of one block of memory in that order, numbered through."""
    size = SIZES | sizes
    count = 1
    for letter in layout:
        count *= size[letter]
    memory = torch.arange(count, dtype=torch.int32).to(dtype)
    memory = memory.view([size[letter] for letter in layout])
    whole = memory.permute([layout.index(letter) for letter in "LBHNC"])
    return {f"model.layers.{layer}.attn": whole[layer] for layer in range(size["L"])}


def round_trip(given: dict[str, torch.Tensor], num_blocks: int) -> None:
    """Back up two blocks, wipe them, load them elsewhere; compare with copies made by indexing."""
    adopted = adopt(given, num_blocks)
    rows = {name: _rows(cache, num_blocks) for name, cache in given.items()}
    before = {name: cache.clone() for name, cache in rows.items()}
    with start_scheduler(adopted.backed(4)) as scheduler:
        scheduler.backup(device_pages=[3, 1], host_pages=[0, 2], timeout=5).result(5)
        for cache in rows.values():
            cache[[1, 3]] = 0
        scheduler.load(host_pages=[0, 2], device_pages=[4, 1], timeout=5).result(5)
    for name, cache in rows.items():
        expected = before[name].clone()
        expected[4], expected[1], expected[3] = before[name][3], before[name][1], 0
        assert torch.equal(cache, expected)


def _rows(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a cache with one row per block; kernel blocks joined."""
    return cache.view(num_blocks, -1, *cache.shape[1:]) if cache.shape[0] != num_blocks else cache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [2, 1], ids=["heads", "latent"])
def test_every_layout_of_vllm_is_adopted(layout: str, heads: int) -> None:
    """Six memory orders, and one head slot as latent attention has it, come back as they were."""
    round_trip(caches(layout, H=heads), SIZES["B"])


def test_the_table_has_every_order_of_vllm() -> None:
    """Content is innermost, and heads stand before or after tokens, with layers and blocks around them."""
    orders = {"".join(order) for order in permutations("LBHN")}
    assert {layout[:-1] for layout in LAYOUTS} <= orders


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_every_width_of_element_is_moved_as_bits(dtype: torch.dtype) -> None:
    """Quantised caches hold scales between their numbers; nothing is converted."""
    given = {name: cache.view(dtype) for name, cache in caches("LBHNC", torch.float32).items()}
    adopted = adopt(given, SIZES["B"])
    before = [cache.view(torch.uint8).clone() for cache in given.values()]
    with start_scheduler(adopted.backed(1)) as scheduler:
        scheduler.backup(device_pages=[2], host_pages=[0], timeout=5).result(5)
        scheduler.load(host_pages=[0], device_pages=[0], timeout=5).result(5)
    for cache, old in zip(given.values(), before, strict=True):
        assert torch.equal(cache.view(torch.uint8)[0], old[2])


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_joined(layout: str) -> None:
    """Where attention splits a block into smaller ones, our page is still the scheduler's block."""
    round_trip(caches(layout, B=15), 5)


def test_layers_stand_in_the_order_of_the_engine() -> None:
    """Layer 10 comes after layer 9, whatever the order of registration and of names."""
    given = caches("LBHNC", L=11)
    shuffled = dict(sorted(given.items(), reverse=True))
    layers = adopt(shuffled, SIZES["B"], order=["embedding", *given]).layer_of
    assert [layers[name] for name in given] == list(range(11))


def test_two_towers_that_count_from_0_do_not_take_turns() -> None:
    """The first number of a name says nothing across towers; one that the engine does not list comes last."""
    names = [f"{tower}.layers.{layer}.attn" for tower in ("talker", "draft") for layer in (0, 1)]
    given = dict(zip([*names, "another.attn"], caches("LBHNC", L=5).values(), strict=True))
    adopted = adopt(given, SIZES["B"], order=names)
    assert adopted.layer_of == {name: number for number, name in enumerate(given)}


BLOCK = Block(2, 4, 24, 192)
"""What `caches` has, in fp32."""

OTHERS = {
    "tokens before heads": (torch.zeros(5, 4, 2, 6), "heads is 4, expected 2; tokens are 2, expected 4"),
    "content before tokens": (torch.zeros(5, 2, 6, 4).transpose(2, 3), "step from content to content is 4, expected 1"),
    "K and V before blocks": (torch.zeros(10, 4, 2, 3), "heads is 4, expected 2"),
    "another dtype": (torch.zeros(5, 2, 4, 6, dtype=torch.bfloat16), "bytes of content is 12, expected 24"),
    "half a block": (torch.zeros(5, 2, 2, 6), "tokens are 2, expected 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_four_axes_in_another_order_are_refused(name: str) -> None:
    """The number of axes and of blocks fits; what vLLM specifies of the layer does not."""
    cache, text = OTHERS[name]
    with pytest.raises(GeometryError, match=text) as caught:
        adopt({"a": cache}, 5, blocks={"a": BLOCK})
    assert "'a'" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("layout", "split"), [*((layout, 1) for layout in LAYOUTS), ("LBHNC", 2), ("LBNHC", 2)]
)
def test_what_vllm_specifies_is_adopted(layout: str, split: int) -> None:
    """Every order in memory, and blocks that attention splits; padding makes a block larger than its rows."""
    given = caches(layout, B=5 * split, N=4 // split)
    blocks = dict.fromkeys(given, Block(2, 4, 24, 256))
    assert adopt(given, 5, blocks=blocks).num_layers == 3


def test_a_layer_that_vllm_does_not_specify_is_refused_unless_it_shares() -> None:
    """A second name for a cache needs no specification; a cache of its own does."""
    given = caches("LBHNC")
    given["second"] = given["model.layers.1.attn"]
    blocks = {name: BLOCK for name in given if name != "second"}
    assert adopt(given, 5, blocks=blocks).num_layers == 3
    del blocks["model.layers.2.attn"]
    with pytest.raises(GeometryError, match=r"'model\.layers\.2\.attn'.*specification is none"):
        adopt(given, 5, blocks=blocks)


def test_shared_caches_are_one_layer_with_two_names() -> None:
    """A layer that reads another's cache is neither copied nor counted twice."""
    given = caches("LBHNC")
    given["model.layers.9.attn"] = given["model.layers.1.attn"]
    adopted = adopt(given, SIZES["B"])
    assert adopted.num_layers == 3
    assert adopted.layer_of["model.layers.9.attn"] == 1


def test_layers_of_several_shapes_are_members_of_a_group() -> None:
    """An indexer's cache beside a latent one: one job moves both, and layers keep their places."""
    wide, narrow = caches("LBHNC", H=1), caches("LBHNC", H=1, C=2, L=2)
    given = {
        **wide,
        "model.layers.1.indexer": narrow["model.layers.0.attn"],
        "model.layers.2.indexer": narrow["model.layers.1.attn"],
    }
    adopted = adopt(given, SIZES["B"], order=sorted(given))
    assert [layers for _, layers in adopted.pools] == [(0, 1, 3), (2, 4)]
    assert adopted.block_bytes == 4 * 4 * (3 * 6 + 2 * 2)
    round_trip(given, SIZES["B"])


def test_layers_packed_into_one_block_are_told_apart() -> None:
    """vllm#44577, vllm#47783: block-outermost memory in which latent and indexer rows take turns."""
    blocks, tokens = SIZES["B"], SIZES["N"]
    widths = [6, 2, 6, 2]
    memory = torch.arange(blocks * tokens * sum(widths), dtype=torch.float32).view(blocks, -1)
    given: dict[str, torch.Tensor] = {}
    start = 0
    for number, width in enumerate(widths):
        rows = memory[:, start : start + tokens * width]
        sort = "indexer" if number % 2 else "attn"
        given[f"model.layers.{number // 2}.{sort}"] = rows.unflatten(1, (1, tokens, width))  # type: ignore[no-untyped-call]
        start += tokens * width
    assert [layers for _, layers in adopt(given, blocks).pools] == [(0, 2), (1, 3)]
    round_trip(given, blocks)


def test_host_memory_lies_as_the_device_has_it() -> None:
    """A block of one layer is one run on both sides, whichever of heads and tokens comes first."""
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        group = adopt(caches(layout), SIZES["B"]).backed(2)
        (part,) = group.anchor.host.geometry.components
        assert part.runs.count == 1, layout


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        ([torch.zeros(5, 2)], "type is list, expected a tensor"),
        (torch.zeros(5, 2, 4), r"shape is \(5, 2, 4\)"),
        (torch.zeros(6, 2, 4, 6), r"shape is \(6, 2, 4, 6\), expected \(a multiple of 5 blocks"),
        (torch.zeros(10, 3, 4, 6)[:, :2], "kernel blocks side by side"),
    ],
    ids=["states", "3d", "blocks", "kernel"],
)
def test_what_cannot_be_adopted_is_refused_by_name(cache: object, text: str) -> None:
    """The error names the layer, and says what to set."""
    with pytest.raises(GeometryError, match=text) as caught:
        adopt({"model.layers.4.mixer": cache}, 5)  # type: ignore[dict-item]
    assert "'model.layers.4.mixer'" in str(caught.value)
    assert caught.value.remedy


def test_no_caches_at_all_are_refused() -> None:
    """A rank without attention layers has nothing to carry."""
    with pytest.raises(GeometryError, match="layers is 0, expected at least 1"):
        adopt({}, 5)
