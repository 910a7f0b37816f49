"""Tensors without bytes to copy, and components that are none: refused as geometry."""

from __future__ import annotations

import pytest
import torch

from offload import DevicePool, GeometryError, HostPool, PoolSpec, UnknownNameError

SPEC = PoolSpec.mla(num_layers=1, page_size=4, latent_dim=16)


def made(rows: int, device: str = "cpu") -> torch.Tensor:
    """Return a tensor as an engine makes it."""
    return torch.zeros(rows, 1, 16, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (made(32, "meta"), "on the meta device"),
        (made(0), "empty"),
        (made(32).to_sparse(), "sparse_coo"),
    ],
)
def test_tensors_without_bytes_are_refused(tensor: torch.Tensor, got: str) -> None:
    """By what they are; not by a shape that is as expected, nor by whatever numpy says of them."""
    with pytest.raises(GeometryError, match=got):
        DevicePool.adopt(SPEC, {"kv": [tensor]})
    with pytest.raises(GeometryError, match=got):
        HostPool.adopt(SPEC, {"kv": tensor}, axes="pt h d")


@pytest.mark.parametrize("components", [{"a": 3}, {"a": ((3,),)}, {"a": (3, torch.uint8)}, [1]])
def test_components_that_cannot_be_read_are_refused(components: object) -> None:
    """With an example of what they are."""
    with pytest.raises(GeometryError, match="a mapping such as"):
        PoolSpec.state(num_layers=1, components=components)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"layout": ""}, {"layout": []}, {"axes": ""}, {"page_align": 0}])
def test_what_is_empty_is_not_the_default(wrong: dict[str, str]) -> None:
    """An empty name is misspelt, and no alignment is one byte or more."""
    with pytest.raises((GeometryError, UnknownNameError)):
        HostPool.allocate(SPEC, num_pages=4, pinned=False, **wrong)  # type: ignore[arg-type]
