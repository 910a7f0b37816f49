"""Every pair that is refused is refused inside the submit, and what the refusal offers is then accepted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import offload
from offload.core.kinds import Direction, IoBackend, Layout
from offload.route import Router
from tests import oracle
from tests.backend.test_matrix import HOST_PAGES, SPECS, pools, supported
from tests.sched import contents

PATIENCE = 20.0
Made = tuple[offload.DevicePool, offload.HostPool]


def _submit(
    scheduler: offload.BlockingScheduler, direction: Direction, io_backend: str
) -> offload.Transfer:
    verb = scheduler.load if direction is Direction.LOAD else scheduler.backup
    return verb(host_pages=[1, 4], device_pages=[3, 0], io_backend=io_backend)


def refusals(
    scheduler: offload.BlockingScheduler, made: Made
) -> Iterator[tuple[Direction, IoBackend, offload.UnsupportedPairError]]:
    """Yield every io backend that a submit refuses, each way; nothing has moved by that."""
    device, host = made
    before = [flat.clone() for pool in made for flat in oracle.flats(pool)]
    for io_backend in IoBackend:
        for direction in Direction:
            try:
                _submit(scheduler, direction, io_backend).result(PATIENCE)
            except offload.UnsupportedPairError as error:
                yield direction, io_backend, error
            else:
                for layer in range(device.num_layers):
                    assert contents(host, [1, 4], [layer]) == contents(device, [3, 0], [layer])
                after = [flat for pool in made for flat in oracle.flats(pool)]
                for flat, kept in zip(after, before, strict=True):
                    flat.copy_(kept)
            after = [flat for pool in made for flat in oracle.flats(pool)]
            assert all(a.equal(b) for a, b in zip(after, before, strict=True))


def check_offers(
    scheduler: offload.BlockingScheduler,
    made: Made,
    found: tuple[Direction, IoBackend, offload.UnsupportedPairError],
) -> None:
    """Submit with each io backend that is offered; resolve in each layout that is."""
    (device, host), (direction, io_backend, error) = made, found
    assert (error.io_backend, error.layout) == (io_backend, host.geometry.label)
    assert io_backend not in error.io_backends
    assert host.geometry.label not in error.layouts
    for other in error.io_backends:
        _submit(scheduler, direction, other).result(PATIENCE)
    offers = [(io_backend.value, layout) for layout in error.layouts]
    for name, layout in offers if error.pair is None else [*offers, error.pair]:
        there = offload.HostPool.allocate(
            device.spec, num_pages=HOST_PAGES, layout=layout, pinned=False
        )
        there.pinned = host.pinned
        group = offload.PoolGroup(kv=offload.Pair(device, there))
        Router.open(group, "auto").route(direction, name)


def having(name: str) -> set[Layout]:
    """Return the layouts that have a meaning for a kind: `cpu` copies all of them."""
    return {each for each in Layout if supported(name, each, IoBackend.CPU, Direction.LOAD)}


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", SPECS)
def test_offers_of_refusals_are_accepted_in_host_memory(name: str, layout: Layout) -> None:
    """On pools in host memory: columns of a GPU are refused, and those of geometry."""
    made = pools(name, layout)
    if layout not in having(name):
        with pytest.raises(offload.UnsupportedPairError) as caught:
            offload.start_scheduler(*made)
        assert set(caught.value.layouts) == having(name)
        return
    with offload.start_scheduler(*made) as scheduler:
        found = list(refusals(scheduler, made))
        assert {name for _, name, _ in found} >= {*IoBackend} - {"direct", "cpu"}
        for each in found:
            check_offers(scheduler, made, each)
