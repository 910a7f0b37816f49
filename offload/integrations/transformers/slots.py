"""Where a session keeps what a layer keeps: strides over the device pools' own memory."""

# Axes: S tokens of a pool or a session, H kv heads, D and Dv head dims of K and V, X an indexer's dim.

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from offload import DevicePool, GeometryError
from offload.integrations.transformers.kept import Kept, KeptLayer
from offload.integrations.transformers.plan import MemberPlan, Sort


@attrs.frozen(eq=False)
class Slots:
    """One layer's tensors, of a whole pool or of one session; None or empty where it keeps no such thing.

    Shapes:
        keys: [1, H, S, D]; values: [1, H, S, Dv]; indexer: [1, S, X]. A state, of a pool: [slots, ...];
        of a session: [1, ...].
    """

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    indexer: torch.Tensor | None = None
    conv: Mapping[int, torch.Tensor] = attrs.field(factory=dict)
    recurrent: Mapping[int, torch.Tensor] = attrs.field(factory=dict)

    def cut(self, start: int, length: int, slot: int | None) -> Slots:
        """Return those of one session: a run of tokens, and a slot."""
        return Slots(
            keys=None if self.keys is None else self.keys.narrow(2, start, length),
            values=None if self.values is None else self.values.narrow(2, start, length),
            indexer=None if self.indexer is None else self.indexer.narrow(1, start, length),
            conv=_cut(self.conv, slot),
            recurrent=_cut(self.recurrent, slot),
        )


def _cut(states: Mapping[int, torch.Tensor], slot: int | None) -> dict[int, torch.Tensor]:
    return {} if slot is None else {i: state[slot : slot + 1] for i, state in states.items()}


def pool_slots(
    kept: Kept, devices: Mapping[str, DevicePool], members: Mapping[str, MemberPlan]
) -> list[Slots]:
    """Return the slots of whole pools, by model layer.

    Raises:
        GeometryError: A pool's order of axes has no such strides.
    """
    found = [Slots() for _ in kept.layers]
    for name, member in members.items():
        for pool_layer, layer in enumerate(member.layers):
            add = _ADD[member.sort]
            found[layer] = add(found[layer], devices[name], pool_layer, kept.layers[layer])
    return found


def _add_attention(slots: Slots, device: DevicePool, layer: int, kept: KeptLayer) -> Slots:
    assert kept.attention is not None
    parts = [_flat(device, part.name, layer, part.dtype, keep=2) for part in device.spec.components]
    if kept.attention.latent:
        sizes = [kept.attention.key_dim, kept.attention.value_dim]
        parts = list(torch.split(parts[0], sizes, dim=-1))
    keys, values = (part.transpose(0, 1).unsqueeze(0) for part in parts)
    return attrs.evolve(slots, keys=keys, values=values)


def _add_indexer(slots: Slots, device: DevicePool, layer: int, kept: KeptLayer) -> Slots:
    assert kept.indexer is not None
    rows = _flat(device, "row", layer, kept.indexer.dtype, keep=1)
    return attrs.evolve(slots, indexer=rows.view(-1, kept.indexer.dim).unsqueeze(0))


def _add_state(slots: Slots, device: DevicePool, layer: int, kept: KeptLayer) -> Slots:
    states: dict[str, dict[int, torch.Tensor]] = {"conv": {}, "recurrent": {}}
    for part in kept.state or ():
        rows = _flat(device, part.name, layer, part.dtype, keep=1)
        states[part.role][part.number] = rows.view(-1, *part.shape)
    return attrs.evolve(slots, conv=states["conv"], recurrent=states["recurrent"])


_ADD: dict[Sort, Callable[[Slots, DevicePool, int, KeptLayer], Slots]] = {
    "kv": _add_attention,
    "indexer": _add_indexer,
    "state": _add_state,
}


def _flat(
    device: DevicePool, component: str, layer: int, dtype: torch.dtype, *, keep: int
) -> torch.Tensor:
    """Return a layer of a component with its pages folded into one axis before the last `keep`."""
    pages = device.view(component, layer)
    try:
        return pages.view(-1, *pages.shape[-keep:]).view(dtype)
    except RuntimeError:
        raise GeometryError(
            f"component {component!r} of the device pool",
            expected={"axes": "tokens of neighbouring pages at one stride, such as 'p t h d'"},
            got={"axes": f"strides {pages.stride()} of shape {tuple(pages.shape)} [P, T, H, D]"},
            remedy="DevicePool.allocate makes such a pool.",
        ) from None
