"""What a pool holds: the sizes of one layer of one page, for the four kinds of pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import attrs
import torch

from offload.arguments import distinct_names, expect, integer, layer_number, positive
from offload.core.geometry import Component
from offload.core.kinds import PoolKind
from offload.errors import GeometryError, UnknownNameError, counted, shown


@attrs.frozen
class ComponentSpec:
    """One component of one layer of one page, with its dtype."""

    component: Component
    dtype: torch.dtype

    row_shape: tuple[int, ...]
    """Shape of one token's (row's) elements, as engines allocate it: `(H, D)`, `(64, 128)`."""

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name


@attrs.frozen(slots=False, match_args=False)  # `help` shows what is ours, and little of attrs
class PoolSpec:
    """Kind, sizes and dtypes of a pool; the same for the device's and the host's.

    Build one with `mha`, `mla`, `rows` or `state`.
    """

    kind: PoolKind
    num_layers: int

    page_size: int
    """Token slots in a page; 1 for `state`, whose page is one slot."""

    components: tuple[ComponentSpec, ...]

    layer_names: tuple[str, ...] | None = None
    """A name for each layer, or None; every call that takes a layer takes either."""

    def __attrs_post_init__(self) -> None:
        expect("PoolSpec", "kind", self.kind, PoolKind, "a PoolKind")
        call = f"PoolSpec.{self.kind}"
        positive(call, num_layers=self.num_layers, page_size=self.page_size)
        given: object = self.components
        made = given if isinstance(given, tuple) and given else (given,)
        for each in made:
            expect(call, "components", each, ComponentSpec, "a tuple of ComponentSpec")
        if self.layer_names is not None:
            distinct_names(call, self.layer_names, self.num_layers)

    def __repr__(self) -> str:
        rows = (
            f"{c.name} {list(c.row_shape)} {str(c.dtype).removeprefix('torch.')}"
            for c in self.components
        )
        pages = f"{counted(self.num_layers, 'layer')}, pages of {self.page_size}"
        return f"<PoolSpec {self.kind.value}: {pages}, {', '.join(rows)}>"

    @classmethod
    def mha(
        cls,
        *,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        layer_names: Sequence[str] | None = None,
    ) -> PoolSpec:
        """Return keys and values per head.

        Args:
            v_head_dim: None: as `head_dim`. 0: there is no `v`.

        Shapes:
            k: [T, H, D] and v: [T, H, Dv] for each layer of a page.

        Raises:
            GeometryError: A size is not a positive integer.
        """
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        positive("PoolSpec.mha", num_layers=num_layers, **sizes)
        dims = {"k": head_dim, "v": head_dim if v_head_dim is None else v_head_dim}
        if integer("PoolSpec.mha", "v_head_dim", dims["v"]) == 0:
            del dims["v"]
        else:
            positive("PoolSpec.mha", v_head_dim=dims["v"])
        made = [
            _component("PoolSpec.mha", name, page_size, (num_kv_heads, dim), dtype, num_kv_heads)
            for name, dim in dims.items()
        ]
        return cls._made(PoolKind.MHA, num_layers, page_size, made, layer_names)

    @classmethod
    def mla(
        cls,
        *,
        num_layers: int,
        page_size: int,
        latent_dim: int,
        rope_dim: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        layer_names: Sequence[str] | None = None,
    ) -> PoolSpec:
        """Return one latent row per token.

        Args:
            latent_dim: Elements of the whole row, the rope part included.
            rope_dim: Its last elements, which `page_first_kv_split` stores apart; 0: not split.

        Shapes:
            kv: [T, 1, C] for each layer of a page.

        Raises:
            GeometryError: A size is not a positive integer, or the rope part is not smaller.
        """
        sizes = {"num_layers": num_layers, "page_size": page_size, "latent_dim": latent_dim}
        positive("PoolSpec.mla", **sizes)
        if not 0 <= integer("PoolSpec.mla", "rope_dim", rope_dim) < latent_dim:
            raise GeometryError(
                "PoolSpec.mla",
                expected={
                    "rope_dim": f"0 to {latent_dim - 1}, as latent_dim={latent_dim} counts it"
                },
                got={"rope_dim": rope_dim},
            )
        parts = (("latent", latent_dim - rope_dim), ("rope", rope_dim)) if rope_dim else ()
        made = _component("PoolSpec.mla", "kv", page_size, (1, latent_dim), dtype, 1)
        made = attrs.evolve(made, component=attrs.evolve(made.component, parts=parts))
        return cls._made(PoolKind.MLA, num_layers, page_size, [made], layer_names)

    @classmethod
    def rows(
        cls,
        *,
        num_layers: int,
        page_size: int,
        row_bytes: int,
        slot_page_size: int | None = None,
        layer_names: Sequence[str] | None = None,
    ) -> PoolSpec:
        """Return opaque rows of bytes.

        Args:
            page_size: Token slots in a page.
            slot_page_size: Token slots that share one row; None: `page_size`, one row per page.

        Shapes:
            row: [page_size / slot_page_size, row_bytes] of uint8 for each layer of a page.

        Raises:
            GeometryError: A size is not a positive integer, or rows do not fill a page.
        """
        shared = page_size if slot_page_size is None else slot_page_size
        sizes = {"num_layers": num_layers, "page_size": page_size, "row_bytes": row_bytes}
        positive("PoolSpec.rows", **sizes, slot_page_size=shared)
        if page_size % shared:
            raise GeometryError(
                "PoolSpec.rows",
                expected={"slot_page_size": f"a divisor of page_size={page_size}"},
                got={"slot_page_size": shared},
            )
        made = _component("PoolSpec.rows", "row", page_size // shared, (row_bytes,), torch.uint8, 1)
        return cls._made(PoolKind.ROWS, num_layers, page_size, [made], layer_names)

    @classmethod
    def state(
        cls,
        *,
        num_layers: int,
        components: Mapping[str, tuple[Sequence[int], torch.dtype]],
        ring_size: int = 1,
        layer_names: Sequence[str] | None = None,
    ) -> PoolSpec:
        """Return state rows: a page is one slot, of several components.

        Args:
            components: By name, the shape and dtype of one row.
            ring_size: Rows that one slot keeps.

        Shapes:
            Each component: [ring_size, *shape] for each layer of a page.

        Raises:
            GeometryError: A size is not a positive integer, or there is no component.
        """
        positive("PoolSpec.state", num_layers=num_layers, ring_size=ring_size)
        given: object = components
        if isinstance(given, Mapping) and not given:
            raise GeometryError(
                "PoolSpec.state", expected={"components": "one or more"}, got={"components": 0}
            )
        try:
            named = [(name, tuple(shape), dtype) for name, (shape, dtype) in components.items()]
        except (AttributeError, TypeError, ValueError):
            raise GeometryError(
                "PoolSpec.state",
                expected={"components": "a mapping such as {'ssm': ((64, 128), torch.float32)}"},
                got={"components": shown(components)},
            ) from None
        made = [
            _component("PoolSpec.state", name, ring_size, shape, dtype, 1)
            for name, shape, dtype in named
        ]
        return cls._made(PoolKind.STATE, num_layers, 1, made, layer_names)

    @classmethod
    def _made(
        cls,
        kind: PoolKind,
        num_layers: int,
        page_size: int,
        components: Sequence[ComponentSpec],
        layer_names: Sequence[str] | None,
    ) -> PoolSpec:
        names = (
            None
            if layer_names is None
            else distinct_names(f"PoolSpec.{kind}", layer_names, num_layers)
        )
        return cls(kind, num_layers, page_size, tuple(components), names)

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        """The components by sizes alone, for `offload.core`."""
        return tuple(spec.component for spec in self.components)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page, over all components."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and components, without padding."""
        return self.layer_bytes * self.num_layers

    def layer_index(self, layer: int | str) -> int:
        """Return the index of a layer that is given by index or by name.

        Raises:
            RequestError: It is neither a name nor one of `0 .. num_layers - 1`.
            UnknownNameError: No layer has that name.
        """
        if isinstance(layer, str):
            names = self.layer_names or ()
            if layer not in names:
                raise UnknownNameError.layer(layer, names, num_layers=self.num_layers)
            return names.index(layer)
        return layer_number(layer, self.num_layers)


def _component(
    subject: str,
    name: str,
    tokens: int,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    heads: int,
) -> ComponentSpec:
    if not isinstance(dtype, torch.dtype):
        raise GeometryError(
            f"{subject}, component {name!r}",
            expected={"dtype": "a torch.dtype"},
            got={"dtype": shown(dtype)},
        )
    for size in row_shape:
        positive(f"{subject}, component {name!r}", shape=size)
    dim = prod(row_shape) // heads
    part = Component(name, tokens=tokens, heads=heads, dim=dim, itemsize=dtype.itemsize)
    return ComponentSpec(part, dtype, row_shape)
