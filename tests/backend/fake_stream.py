"""CUDA backends on a CUDA that executes: one check for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.backend.base import Backend, JoinsLayers
from offload.core.kinds import Direction, IoBackend, Layout
from offload.driver import cuda_calls
from offload.driver.cuda_calls import Launch
from offload.pool import Pool
from offload.testing_cuda import FakeCuda
from tests import oracle
from tests.backend.test_matrix import SPECS, pools, runs_of, supported

Cell = tuple[str, Layout, Direction]


def cells(io_backend: IoBackend) -> list[Cell]:
    """Return the cells of the matrix that an io backend can copy."""
    return [
        (name, layout, direction)
        for name in SPECS
        for layout in Layout
        for direction in Direction
        if supported(name, layout, io_backend, direction)
    ]


class Watching(FakeCuda):
    """Notes every launch that it is given."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.launches: list[Launch] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        super().launch(launch)

    @property
    def names(self) -> list[str]:
        """What was launched, by the kernel's name."""
        return [launch.kernel.__name__ for launch in self.launches]


@contextmanager
def on_stream(fake: FakeCuda) -> Iterator[None]:
    """Let this thread work for a stream of the fake."""
    before = cuda_calls._BOUND.calls
    cuda_calls.bind(fake)
    try:
        with fake.using(fake.new_stream()):
            yield
    finally:
        cuda_calls._BOUND.calls = before


def check(
    fake: FakeCuda,
    backend: Backend,
    cell: Cell,
    pairs: list[tuple[int, int]],
    *,
    layers_at_once: bool = False,
    page_align: int | None = None,
) -> None:
    """Copy two layers, compare every byte of both pools with what the oracle makes of it.

    Args:
        page_align: Pad the host pool's pages; the padding holds bytes too, and is compared.
    """
    name, layout, direction = cell
    device, host = pools(name, layout, page_align=page_align)
    wanted, host_wanted = pools(name, layout, page_align=page_align)
    with on_stream(fake):
        prepared = backend.prepare(device, host, direction, runs_of(pairs))
        for layer in (2, 0):
            assert prepared.nbytes(layer) == len(pairs) * device.spec.layer_bytes
            if not layers_at_once:
                prepared.copy(layer)
        if layers_at_once:
            assert isinstance(backend, JoinsLayers)
            backend.copy_layers(prepared, (2, 0))
            assert len(fake.named("launch")) == prepared.num_ops(0)
        assert oracle.same_bytes(device, wanted)
        assert oracle.same_bytes(host, host_wanted), "nothing moves before it is stepped"
        fake.run()
    sides: tuple[Pool, Pool] = (host_wanted, wanted)
    source, destination = sides if direction is Direction.LOAD else sides[::-1]
    oracle.copy(source, destination, pairs, [2, 0])
    assert oracle.same_bytes(device, wanted)
    assert oracle.same_bytes(host, host_wanted)
    fake.check()
