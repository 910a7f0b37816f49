"""vLLM's KV tensors as a pool group, by their strides.

vLLM shows every layer as `[B, H, N, C]` (blocks, head slots, tokens, content: K and V packed, or one latent
row), whatever the order in memory; a layout such as LBHNC or BLNHC is a permutation of the strides. So no
layout is named here: any order whose blocks step evenly is adopted, and what has another shape than vLLM's
own specification of the layer is refused.

Layers of one shape and stride form a member of the group; a model with several kinds of layers has several.
Layers that share their cache with another are that layer under a second name. They stand in the order in which
the engine made them, whatever their names: a model may have two towers that both count from 0.
"""

# Axes: B blocks, H head slots, N tokens per kernel block, C content, r kernel blocks per block.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from offload import DevicePool, GeometryError, HostPool, Pair, PoolGroup, PoolSpec


@attrs.frozen
class Block:
    """A layer's part of a block, as vLLM specifies it."""

    num_heads: int
    num_tokens: int
    """Rows of each head; one for each token, unless a cache is compressed."""
    content_bytes: int
    page_bytes: int
    """Bytes of a block of the layer, padding included."""


@attrs.frozen
class Adopted:
    """vLLM's layers as device pools."""

    pools: tuple[tuple[DevicePool, tuple[int, ...]], ...]
    """Each pool with the model layers that it holds."""

    layer_of: Mapping[str, int]
    """By vLLM's layer name, the model layer."""

    @property
    def num_layers(self) -> int:
        """Layers with a cache of their own."""
        return sum(len(layers) for _, layers in self.pools)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(pool.spec.page_bytes for pool, _ in self.pools)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.pools[0][0].device

    def backed(self, num_host_blocks: int) -> PoolGroup:
        """Return the pools with host pools behind them; page-locked where there is a GPU."""
        pairs = {
            f"kv{number or ''}": Pair(
                pool,
                HostPool.allocate(
                    pool.spec,
                    num_pages=num_host_blocks,
                    axes=_host_axes(pool),
                    pinned=pool.device.type == "cuda",
                ),
                layers=layers,
            )
            for number, (pool, layers) in enumerate(self.pools)
        }
        return PoolGroup(layer_names=None, **pairs)


def adopt(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    *,
    blocks: Mapping[str, Block] | None = None,
    order: Sequence[str] = (),
) -> Adopted:
    """Return vLLM's registered caches as device pools.

    Args:
        num_blocks: Blocks that its scheduler hands out.
        blocks: By layer, what a block of it is. Layers that share another's cache may be missing.
        order: Layers in the order of the engine. What is not in it comes last, in the order of registration.

    Raises:
        GeometryError: A cache is no tensor of such blocks. Names the layer.
    """
    place = {name: number for number, name in enumerate(order)}
    own: dict[tuple[object, ...], int] = {}
    layer_of: dict[str, int] = {}
    caches: list[torch.Tensor] = []
    for name in sorted(kv_caches, key=lambda name: place.get(name, len(place))):
        cache = _blocks(name, kv_caches[name], num_blocks, (blocks or {}).get(name))
        key = (cache.data_ptr(), cache.shape, cache.stride())
        if key not in own:
            own[key] = len(caches)
            caches.append(cache)
        layer_of[name] = own[key]
    if not caches:
        raise GeometryError("KV caches", expected={"layers": "at least 1"}, got={"layers": 0})
    if blocks is not None:
        _check_all_specified(layer_of, blocks)
    return Adopted(_pools(caches), layer_of)


def _check_all_specified(layer_of: Mapping[str, int], blocks: Mapping[str, Block]) -> None:
    specified = {layer for name, layer in layer_of.items() if name in blocks}
    for name, layer in layer_of.items():
        if layer not in specified:
            raise GeometryError(
                f"KV cache of layer {name!r}",
                expected={"specification": "one in vLLM's group of KV caches"},
                got={"specification": "none"},
                remedy="Leave out the connector for this model.",
            )


def _pools(caches: Sequence[torch.Tensor]) -> tuple[tuple[DevicePool, tuple[int, ...]], ...]:
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, cache in enumerate(caches):
        alike.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(layer)
    return tuple(
        (_pool([caches[layer] for layer in layers]), tuple(layers)) for layers in alike.values()
    )


def _pool(caches: Sequence[torch.Tensor]) -> DevicePool:
    _, heads, tokens, content = caches[0].shape
    num_layers, dtype = len(caches), caches[0].dtype
    if heads == 1:
        spec = PoolSpec.mla(
            num_layers=num_layers, page_size=tokens, latent_dim=content, dtype=dtype
        )
        return DevicePool.adopt(spec, {"kv": list(caches)}, axes="p h t d")
    spec = PoolSpec.mha(
        num_layers=num_layers,
        page_size=tokens,
        num_kv_heads=heads,
        head_dim=content,
        v_head_dim=0,
        dtype=dtype,
    )
    return DevicePool.adopt(spec, {"k": list(caches)}, axes="p h t d")


def _blocks(name: str, cache: object, num_blocks: int, block: Block | None) -> torch.Tensor:
    """Return a layer's cache as `[B, H, N, C]` with one row per block of the scheduler."""
    if not isinstance(cache, torch.Tensor):
        raise GeometryError(
            f"KV cache of layer {name!r}",
            expected={"type": "a tensor [blocks, heads, tokens, content]"},
            got={"type": type(cache).__name__},
            remedy="Recurrent states are not offloaded: leave out the connector for this model.",
        )
    if cache.dim() != 4 or not num_blocks or cache.shape[0] % num_blocks:
        raise GeometryError(
            f"KV cache of layer {name!r}",
            expected={"shape": f"(a multiple of {num_blocks} blocks, heads, tokens, content)"},
            got={"shape": tuple(cache.shape)},
            remedy="Unset VLLM_KV_CACHE_LAYOUT, or set it to LBHNC or LBNHC.",
        )
    if block is not None:
        _check_block(name, cache, cache.shape[0] // num_blocks, block)
    if cache.shape[0] == num_blocks:
        return cache
    return _whole_blocks(name, cache, num_blocks)


def _check_block(name: str, cache: torch.Tensor, ratio: int, block: Block) -> None:
    """Refuse axes in another order than `[B, H, N, C]`, which four axes alone do not tell."""
    _, heads, tokens, content = cache.shape
    content_bytes = content * cache.itemsize
    nbytes = heads * tokens * ratio * content_bytes
    found = (
        ("heads", heads, block.num_heads),
        ("tokens", tokens * ratio, block.num_tokens),
        ("bytes of content", content_bytes, block.content_bytes),
        ("step from content to content", cache.stride(3), 1),
        ("bytes of a block", nbytes, min(nbytes, block.page_bytes)),
    )
    wrong = [each for each in found if each[1] != each[2]]
    if wrong:
        raise GeometryError(
            f"KV cache of layer {name!r}, against vLLM's specification of it",
            expected={what: expected for what, _, expected in wrong},
            got={what: got for what, got, _ in wrong},
            remedy="Unset VLLM_KV_CACHE_LAYOUT, choose another attention backend, or leave out the connector.",
        )


def _whole_blocks(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return kernel blocks joined to blocks: those of a block lie side by side, as heads or as tokens."""
    ratio = cache.shape[0] // num_blocks
    _, heads, tokens, content = cache.shape
    block, head, token, dim = cache.stride()
    steps = block * ratio
    if heads == 1 or head * heads == block:
        step = block if heads == 1 else head
        shape, stride = (num_blocks, ratio * heads, tokens, content), (steps, step, token, dim)
    elif token * tokens == block:
        shape, stride = (num_blocks, heads, ratio * tokens, content), (steps, head, token, dim)
    else:
        raise GeometryError(
            f"KV cache of layer {name!r}, whose blocks are split into {ratio} kernel blocks",
            expected={"strides": "kernel blocks side by side"},
            got={"strides": cache.stride()},
            remedy=f"Set --block-size to {tokens}, the kernel's own.",
        )
    return cache.as_strided(shape, stride)


def _host_axes(pool: DevicePool) -> str:
    """Return the order of host memory: layers apart, and blocks inside as the device has them.

    Then a block of a layer that lies together here lies together there, and neighbours form one run.
    """
    (part,) = pool.geometry.components
    inner = {"h": part.head_stride, "t": part.token_stride, "d": part.dim_stride}
    return " ".join(["l", "p", *sorted(inner, key=lambda letter: -inner[letter])])
