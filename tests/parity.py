"""What another engine's offload copies and refuses, pool by pool, and what becomes of each pair here.

The facts were read in SGLang 0.5.23 (HiCache host pools and its cache controller): tensors as it allocates
them, pairs as it dispatches them. `theirs` says what happens there, `ours` what happens here: `COPIES`, or
the reason in a refusal at submit. Sizes are small; their ratios are not.
"""

# Axes: L layers, N token slots (P * T), P pages, T tokens per page, H heads, D and DV head dims, C latent dim,
# S and B bytes of an opaque row.

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import attrs
import torch

from offload import DevicePool, HostPool, Pair, PoolGroup, PoolSpec
from offload.core.kinds import Layout

L, P, T, H, D, DV, C, ROPE = 2, 5, 4, 2, 8, 4, 12, 4
N = P * T
INDEX_BYTES, V4_BYTES, STATE_BYTES, RING = T * 132, 576, 40, 8

LF, PF = Layout.LAYER_FIRST, Layout.PAGE_FIRST
PFD, PH, SPLIT = Layout.PAGE_FIRST_DIRECT, Layout.PAGE_HEAD, Layout.PAGE_FIRST_KV_SPLIT

Shapes = Mapping[Layout, Mapping[str, tuple[int, ...]]]
"""By layout, the tensors they allocate: by component; `k v` share one, stacked first."""


@attrs.frozen
class Part:
    """One pool of theirs: what it holds, and its host tensors' shapes. No shape: they refuse to build it."""

    spec: PoolSpec
    shapes: Shapes
    layers: tuple[int, ...] | None = None
    split: bool = False
    """Whether the device keeps the pieces of a row apart too."""

    def pair(self, layout: Layout) -> Pair:
        """Return the pools, the host's over tensors of their shape where they have one."""
        device = DevicePool.allocate(self.spec, num_pages=P)
        if self.split:
            pieces = {piece.name: piece.dim for part in self.spec.parts for piece in part.split()}
            apart = {
                name: [torch.zeros(N, 1, dim, dtype=torch.bfloat16) for _ in range(L)]
                for name, dim in pieces.items()
            }
            device = DevicePool.adopt(self.spec, apart)
        shapes = self.shapes.get(layout)
        if shapes is None:
            host = HostPool.allocate(self.spec, num_pages=P, layout=layout, pinned=False)
        else:
            host = HostPool.adopt(self.spec, _tensors(self.spec, shapes), layout=layout)
        return Pair(device, host, layers=self.layers)


def _tensors(spec: PoolSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    dtypes = {made.name: made.dtype for made in spec.components}
    found: dict[str, torch.Tensor] = {}
    for names, shape in shapes.items():
        first, *rest = names.split()
        dtype = dtypes.get(first, spec.components[0].dtype)
        whole = torch.zeros(prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)
        found |= (
            {name: whole[i] for i, name in enumerate([first, *rest])} if rest else {first: whole}
        )
    return found


def _opaque(nbytes: int, pages: int = P) -> Shapes:
    return {
        LF: {"row": (L, pages, nbytes)},
        PF: {"row": (pages, L, nbytes)},
        PFD: {"row": (pages, L, 1, nbytes)},
    }


def _rows(nbytes: int) -> PoolSpec:
    return PoolSpec.rows(num_layers=L, page_size=T, row_bytes=nbytes)


_MHA = PoolSpec.mha(num_layers=L, page_size=T, num_kv_heads=H, head_dim=D)
_MHA_SHAPES: Shapes = {
    LF: {"k v": (2, L, N, H, D)},
    PF: {"k v": (2, N, L, H, D)},
    PFD: {"k v": (2, P, L, T, H, D)},
    PH: {"k v": (2, P, H, T, L, D)},
}
_MLA = PoolSpec.mla(num_layers=L, page_size=T, latent_dim=C, rope_dim=ROPE)
_MLA_SHAPES: Shapes = {
    LF: {"kv": (L, N, 1, C)},
    PF: {"kv": (N, L, 1, C)},
    PFD: {"kv": (P, L, T, 1, C)},
    SPLIT: {"latent": (P, L, T, 1, C - ROPE), "rope": (P, L, T, 1, ROPE)},
}
_SPLIT_INDEX: Shapes = {SPLIT: {"kv": (P, L, T, 1, 6)}}
_SPLIT_SCALE: Shapes = {SPLIT: {"kv": (P, L, T, 1, 1)}}
_MAMBA = PoolSpec.state(
    num_layers=L,
    components={
        "temporal": ((2, 3, 4), torch.float32),
        "conv_0": ((3, 4), torch.bfloat16),
        "conv_1": ((3, 2), torch.bfloat16),
    },
)
_MAMBA_SHAPES: Mapping[str, tuple[int, ...]] = {
    "temporal": (P, L, 1, 2, 3, 4), "conv_0": (P, L, 1, 3, 4), "conv_1": (P, L, 1, 3, 2)
}  # fmt: skip
_DSA_SHAPES: Shapes = {
    LF: {"row": (L, P, INDEX_BYTES)},
    PF: {"row": (P, L, 1, INDEX_BYTES)},
    PFD: {"row": (P, L, 1, INDEX_BYTES)},
}

POOLS: Mapping[str, Mapping[str, Part]] = {
    "mha": {"kv": Part(_MHA, _MHA_SHAPES)},
    "asymmetric": {
        "kv": Part(
            PoolSpec.mha(num_layers=L, page_size=T, num_kv_heads=H, head_dim=D, v_head_dim=DV),
            {
                PF: {"k": (N, L, H, D), "v": (N, L, H, DV)},
                PFD: {"k": (P, L, T, H, D), "v": (P, L, T, H, DV)},
            },
        )
    },
    "k_only": {
        "k": Part(
            PoolSpec.mha(num_layers=L, page_size=T, num_kv_heads=H, head_dim=D, v_head_dim=0),
            {LF: {"k": (L, N, H, D)}, PF: {"k": (N, L, H, D)}, PFD: {"k": (P, L, T, H, D)}},
        )
    },
    "mxfp8": {
        "kv": Part(
            PoolSpec.mha(
                num_layers=L, page_size=T, num_kv_heads=H, head_dim=D, dtype=torch.float8_e4m3fn
            ),
            {PF: {"k v": (2, N, L, H, D)}},
        ),
        "k_scale": Part(_rows(16), {PF: {"row": (P, L, 16)}}),
        "v_scale": Part(_rows(16), {PF: {"row": (P, L, 16)}}),
    },
    "mla": {"kv": Part(_MLA, _MLA_SHAPES)},
    "mla_split": {
        "kv": Part(_MLA, _MLA_SHAPES, split=True),
        "index": Part(PoolSpec.mla(num_layers=L, page_size=T, latent_dim=6), _SPLIT_INDEX),
        "scale": Part(
            PoolSpec.mla(num_layers=L, page_size=T, latent_dim=1, dtype=torch.float32), _SPLIT_SCALE
        ),
    },
    "mla_sharded": {"kv": Part(_MLA, _MLA_SHAPES, layers=(1, 3))},
    "dsa": {"index": Part(_rows(INDEX_BYTES), _DSA_SHAPES)},
    "dsa_sharded": {"index": Part(_rows(INDEX_BYTES), _DSA_SHAPES, layers=(1, 3))},
    "dsa_not_8": {"index": Part(_rows(T * 33), {LF: {"row": (L, P, T * 33)}})},
    "dsa_odd": {"index": Part(_rows(33), {LF: {"row": (L, P, 33)}})},
    "v4_paged": {"c4": Part(_rows(V4_BYTES), _opaque(V4_BYTES))},
    "v4_state": {
        "state": Part(
            PoolSpec.state(
                num_layers=L, components={"row": ((STATE_BYTES,), torch.uint8)}, ring_size=RING
            ),
            _opaque(STATE_BYTES * RING),
        )
    },
    "qsa": {"index": Part(_rows(96 * T // 4), _opaque(96 * T // 4))},
    "mamba": {"state": Part(_MAMBA, {PF: _MAMBA_SHAPES, PFD: _MAMBA_SHAPES})},
    "envelope": {
        "page": Part(
            PoolSpec.rows(num_layers=1, page_size=T, row_bytes=640),
            {layout: {"row": (P, 640)} for layout in (LF, PF, PFD)},
        )
    },
    "nvfp4": {"page": Part(_rows(72), _opaque(72))},
    "hisparse": {"kv": Part(_MHA, {LF: {"k v": (2, L, N, H, D)}})},
}


def group(pool: str, layout: Layout) -> PoolGroup:
    """Return one of their pools, with whatever is copied along."""
    pairs = {name: part.pair(layout) for name, part in POOLS[pool].items()}
    return PoolGroup(layer_names=None, **pairs)


@attrs.frozen
class Row:
    """Pairs of one pool that share their fate."""

    pool: str
    layouts: str
    io_backend: str
    theirs: str
    ours: str

    @property
    def named(self) -> list[Layout]:
        """The layouts by name."""
        return [_SHORT[word] for word in self.layouts.split()]


_SHORT = {"lf": LF, "pf": PF, "pfd": PFD, "ph": PH, "split": SPLIT}

OK = "copies"
COPIES = "copies"
SHORT_RUNS = "one layer of one page is .* runs of .*'direct' copies one run"
NO_HEADS = "page_head splits token rows by head"
NO_PIECES = "page_first_kv_split stores pieces of a row apart"
ASCEND = "it needs an Ascend driver, and none is registered"
WORDS = "'kernel' moves words of at least 4"

ROWS = [
    Row("mha", "lf pf ph", "kernel", OK, COPIES),
    Row("mha", "pfd split", "kernel", "Unsupported layout at the first copy", COPIES),
    Row("mha", "lf pfd", "direct", OK, COPIES),
    Row("mha", "split", "direct", "refused by the constructor", COPIES),
    Row("mha", "pf ph", "direct", "Unsupported layout at the first copy", SHORT_RUNS),
    Row("mha", "pfd", "kernel_ascend", "copies on an NPU; TypeError on CUDA", ASCEND),
    Row("mha", "lf pf ph split", "kernel_ascend", "Unsupported layout at the first copy", ASCEND),
    Row("asymmetric", "pf", "kernel", OK, COPIES),
    Row("asymmetric", "pfd", "direct", OK, COPIES),
    Row("asymmetric", "pfd", "kernel", "Unsupported layout at the first copy", COPIES),
    Row("asymmetric", "pf", "direct", "Unsupported layout at the first copy", SHORT_RUNS),
    Row("asymmetric", "lf ph split", "kernel", "refused by the constructor", COPIES),
    Row("asymmetric", "lf split", "direct", "refused by the constructor", COPIES),
    Row("asymmetric", "lf pf pfd ph split", "kernel_ascend", "Unsupported IO backend", ASCEND),
    Row("k_only", "lf pf", "kernel", OK, COPIES),
    Row("k_only", "lf pfd", "direct", OK, COPIES),
    Row("k_only", "pf", "direct", "Unsupported layout at the first copy", SHORT_RUNS),
    Row("k_only", "pfd", "kernel", "Unsupported layout at the first copy", COPIES),
    Row("k_only", "ph split", "kernel", "refused by the constructor", COPIES),
    Row("mxfp8", "pf", "kernel", OK, COPIES),
    Row("mxfp8", "lf pfd", "kernel", "NotImplementedError in the constructor", COPIES),
    Row("mxfp8", "lf pfd", "direct", "NotImplementedError in the constructor", COPIES),
    Row("mxfp8", "pf", "direct", "Unsupported layout, by way of the parent", SHORT_RUNS),
    Row("mla", "lf pf", "kernel", OK, COPIES),
    Row("mla", "pfd", "kernel", "Unsupported layout at the first copy", COPIES),
    Row("mla", "lf pfd", "direct", OK, COPIES),
    Row("mla", "pf", "direct", "Unsupported layout at the first copy", SHORT_RUNS),
    Row("mla", "split", "kernel", "AttributeError in the constructor", COPIES),
    Row("mla", "split", "direct", "AttributeError in the constructor", SHORT_RUNS),
    Row("mla", "lf pf pfd", "kernel_ascend", "AttributeError at the first copy", ASCEND),
    Row("mla", "ph", "kernel", "refused by the constructor", NO_HEADS),
    Row("mla_split", "split", "kernel_ascend", "copies on an NPU", ASCEND),
    Row("mla_split", "split", "direct", "AttributeError off an NPU", COPIES),
    Row("mla_split", "split", "kernel", "AttributeError off an NPU", COPIES),
    Row("mla_sharded", "pf", "kernel", "refused without its JIT kernel", COPIES),
    Row("mla_sharded", "lf", "direct", OK, COPIES),
    Row("mla_sharded", "pfd", "direct", "only layer_first", COPIES),
    Row("mla_sharded", "pf", "direct", "only layer_first", SHORT_RUNS),
    Row("dsa", "lf pf", "kernel", OK, COPIES),
    Row("dsa", "pfd", "kernel", "Unsupported layout at the first copy", COPIES),
    Row("dsa", "lf pfd", "direct", OK, COPIES),
    Row("dsa", "pf", "direct", "Unsupported layout at the first copy", COPIES),
    Row("dsa", "lf pf pfd", "kernel_ascend", "Unsupported IO backend", ASCEND),
    Row("dsa", "ph", "kernel", "refused by the constructor", NO_HEADS),
    Row("dsa", "split", "direct", "refused by the constructor", NO_PIECES),
    Row("dsa_sharded", "pf", "kernel", "refused: no kernel per layer", COPIES),
    Row("dsa_not_8", "lf pf pfd", "kernel", "Unsupported IO backend: the wrong reason", COPIES),
    Row("dsa_odd", "lf pf pfd", "kernel", "Unsupported IO backend: the wrong reason", WORDS),
    Row("dsa_odd", "lf pf pfd", "direct", OK, COPIES),
    Row("v4_paged", "lf pf", "kernel", OK, COPIES),
    Row("v4_paged", "lf pfd", "direct", OK, COPIES),
    Row("v4_paged", "pf", "direct", "Unsupported V4 paged host layout/backend", COPIES),
    Row("v4_paged", "pfd", "kernel", "Unsupported V4 paged host layout/backend", COPIES),
    Row("v4_paged", "lf pf pfd", "kernel_ascend", "copies on an NPU; RuntimeError else", ASCEND),
    Row("v4_paged", "ph", "direct", "refused by the constructor", NO_HEADS),
    Row("v4_paged", "split", "kernel", "refused by the constructor", NO_PIECES),
    Row("v4_state", "lf pf", "kernel", OK, COPIES),
    Row("v4_state", "lf pfd", "direct", OK, COPIES),
    Row("v4_state", "pf", "direct", "Unsupported V4 state host layout/backend", COPIES),
    Row("v4_state", "pfd", "kernel", "Unsupported V4 state host layout/backend", COPIES),
    Row("v4_state", "lf pf pfd", "kernel_ascend", "NameError off an NPU", ASCEND),
    Row("qsa", "lf pf", "kernel", OK, COPIES),
    Row("qsa", "lf pfd", "direct", OK, COPIES),
    Row("qsa", "pf", "direct", "Unsupported V4 paged host layout/backend", COPIES),
    Row("mamba", "pf pfd", "kernel", OK, COPIES),
    Row("mamba", "pf pfd", "direct", "copies, but the launcher rewrites pf + direct", COPIES),
    Row("mamba", "pf pfd", "kernel_ascend", "copies on an NPU, all layers at the first", ASCEND),
    Row("mamba", "lf", "kernel", "AssertionError in the constructor", COPIES),
    Row("mamba", "lf", "direct", "AssertionError in the constructor", COPIES),
    Row("mamba", "ph", "kernel", "AssertionError in the constructor", NO_HEADS),
    Row("mamba", "split", "direct", "AssertionError in the constructor", NO_PIECES),
    Row("envelope", "lf pf pfd", "kernel", OK, COPIES),
    Row("envelope", "lf pfd", "direct", OK, COPIES),
    Row("envelope", "pf", "direct", "Unsupported layout for io backend", COPIES),
    Row("envelope", "ph", "kernel", "Unsupported layout", NO_HEADS),
    Row("envelope", "split", "kernel", "Unsupported layout", NO_PIECES),
    Row("envelope", "lf", "kernel_ascend", "Unsupported io_backend", ASCEND),
    Row("nvfp4", "lf pf pfd", "kernel", OK, COPIES),
    Row("nvfp4", "lf pf pfd", "direct", OK, COPIES),
    Row("nvfp4", "ph", "direct", "Unsupported host layout", NO_HEADS),
    Row("nvfp4", "split", "direct", "Unsupported host layout", NO_PIECES),
    Row("hisparse", "lf", "kernel", OK, COPIES),
    Row("hisparse", "lf", "direct", "requires the kernel backend", COPIES),
    Row("hisparse", "pf", "kernel", "layer_first alone", COPIES),
]
