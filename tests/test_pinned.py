"""Pinned memory on a CUDA that executes: chunks, all or nothing, and copies across chunks."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import pinned, pinned_keeper
from offload.backend import make_backend
from offload.core.kinds import Direction, Layout
from offload.errors import CudaError, OffloadError, OutOfMemoryError
from offload.pinned import _cpus_near, chunk_bounds, pinned_memory
from offload.pool import DevicePool, HostPool, Pool
from offload.spec import PoolSpec
from offload.testing_cuda import FakeCuda
from tests import oracle
from tests.backend.fake_stream import on_stream
from tests.backend.test_matrix import runs_of

SMALL = 64 * 1024
PATIENCE = 20.0
SPEC = PoolSpec.mha(num_layers=3, page_size=8, num_kv_heads=2, head_dim=32, v_head_dim=16)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let pools that ask for pinned memory get it from a fake, in chunks of 64 KiB."""
    made = FakeCuda()
    monkeypatch.setattr(pinned, "TorchCuda", lambda: made)
    monkeypatch.setattr(pinned, "CHUNK", SMALL)
    return made


def ended() -> None:
    """Wait until the threads that hold registrations have taken back what was let go."""
    for thread in threading.enumerate():
        if thread.name.startswith("offload-pinned"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} still holds a registration"


def test_memory_is_zeroed_registered_in_chunks_and_unregistered_in_reverse(
    fake: FakeCuda,
) -> None:
    """Chunks cover the memory without a gap; they go when the last view does."""
    made = pinned_memory(3 * SMALL + 100, granule=1024)
    base = made.memory.data_ptr()
    assert made.memory.numel() == 3 * SMALL + 100
    assert base % mmap.PAGESIZE == 0
    assert not made.memory.any()
    assert made.breaks == (SMALL, 2 * SMALL, 3 * SMALL)
    sizes = [SMALL, SMALL, SMALL, mmap.PAGESIZE]
    starts = [base + index * SMALL for index in range(4)]
    assert fake.registered == dict(zip(starts, sizes, strict=True))
    view = made.memory[5:]
    del made
    assert len(fake.registered) == 4
    del view
    ended()
    assert fake.registered == {}
    assert [call.arguments[0] for call in fake.named("unregister")] == starts[::-1]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_chunk_that_fails_leaves_nothing_registered(fake: FakeCuda, nth: int) -> None:
    """All or nothing."""
    fake.fail(1, nth=nth, name="register")
    with pytest.raises(CudaError):
        pinned_memory(3 * SMALL, granule=1024)
    assert fake.registered == {}
    assert len(fake.named("unregister")) == nth - 1


@pytest.mark.parametrize(("code", "kind"), [(2, OutOfMemoryError), (712, CudaError)])
def test_what_cuda_refuses_to_lock_is_an_error_of_ours(
    fake: FakeCuda, code: int, kind: type[OffloadError]
) -> None:
    """Too little memory is told as it is without a GPU; anything else by CUDA's own number."""
    fake.fail(code, nth=1, name="register")
    with pytest.raises(kind) as caught:
        HostPool.allocate(SPEC, num_pages=4, pinned=True)
    assert isinstance(caught.value, OffloadError)


@pytest.mark.parametrize("granule", [1, 1024, 1155, 4096, 12288, 37440, SMALL])
@pytest.mark.parametrize("nbytes", [1, 4096, SMALL, 5 * SMALL, 5 * SMALL + 4096])
def test_chunks_cover_everything_and_end_on_pages(granule: int, nbytes: int) -> None:
    """Bounds rise from 0 to the end in steps of at most a chunk, and on multiples where they can."""
    bounds = chunk_bounds(nbytes, granule=granule, chunk=SMALL)
    assert bounds[0] == 0
    assert bounds[-1] == nbytes
    inner = bounds[1:-1]
    assert all(a < b <= a + SMALL for a, b in itertools.pairwise(bounds))
    assert all(bound % mmap.PAGESIZE == 0 for bound in inner)
    if granule in (1, 1024, 4096, 12288, SMALL):
        assert all(bound % granule == 0 for bound in inner)


@pytest.mark.parametrize("device", [None, 0, 1, 3])
def test_a_callers_device_stays_what_it_is(fake: FakeCuda, device: int | None) -> None:
    """Whatever GPU the memory is for, the calling thread makes no call that chooses one."""
    fake.set_device(1)
    before = len(fake.named("set_device"))
    made = pinned_memory(SMALL, granule=1024, device=device)
    mine = threading.current_thread().name
    assert fake.current_device() == 1
    assert all(call.thread != mine for call in fake.named("set_device")[before:])
    assert {call.device for call in fake.named("register")} == {1 if device is None else device}
    del made


def test_it_is_unregistered_on_a_thread_that_has_its_device(fake: FakeCuda) -> None:
    """The last reference may go on a thread that never met CUDA, and has no context for the call."""
    kept = [pinned_memory(2 * SMALL, granule=1024, device=3)]
    dropper = threading.Thread(target=kept.clear, name="never-cuda")
    dropper.start()
    dropper.join(PATIENCE)
    ended()
    calls = fake.named("unregister")
    assert [call.device for call in calls] == [3, 3]
    assert {call.thread for call in calls} == {call.thread for call in fake.named("register")}
    assert fake.registered == {}


def test_registering_is_no_matter_to_a_capture_elsewhere(fake: FakeCuda) -> None:
    """A pool that is made, and one that goes, while another thread captures a graph."""
    first, done, captured = pinned_memory(SMALL, granule=1024), threading.Event(), threading.Event()

    def capture() -> None:
        with fake.capture():
            captured.set()
            done.wait(PATIENCE)

    capturing = threading.Thread(target=capture)
    capturing.start()
    captured.wait(PATIENCE)
    second = pinned_memory(SMALL, granule=1024)
    del first, second
    ended()
    done.set()
    capturing.join(PATIENCE)
    assert fake.registered == {}


def _unregistering_fails(fake: FakeCuda) -> None:
    fake.fail(201, name="unregister")


def _device_is_lost(fake: FakeCuda) -> None:
    fake.break_context(700)


@pytest.mark.parametrize("breaking", [_unregistering_fails, _device_is_lost])
def test_memory_that_cannot_be_unregistered_stays_mapped_and_that_is_logged(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture, breaking: Callable[[FakeCuda], None]
) -> None:
    """Unmapped, its addresses would be given out again under a registration that still stands."""
    made = pinned_memory(2 * SMALL, granule=1024)
    base = made.memory.data_ptr()
    breaking(fake)
    with caplog.at_level(logging.WARNING, logger="offload"):
        del made
        ended()
    assert len(fake.named("unregister")) == 2
    assert f"{base:x}-" in Path("/proc/self/maps").read_text()
    assert "stay mapped" in caplog.text
    pinned_keeper.KEPT.clear()


def test_what_was_let_go_is_unregistered_before_more_is_registered(fake: FakeCuda) -> None:
    """A pool in place of another never needs both to be locked at once."""
    for _ in range(3):
        pinned_memory(SMALL, granule=1024)
    ended()
    names = [call.name for call in fake.calls if call.name in ("register", "unregister")]
    assert names == ["register", "unregister"] * 3


def test_a_forked_child_leaves_the_registration_alone(fake: FakeCuda) -> None:
    """It has the mapping, and CUDA's state belongs to the parent."""
    made = pinned_memory(2 * SMALL, granule=1024)
    child = os.fork()
    if not child:
        del made
        os._exit(len(fake.named("unregister")))
    assert os.waitpid(child, 0)[1] == 0
    assert len(fake.registered) == 2
    del made
    ended()
    assert fake.registered == {}


def test_memory_for_a_pool_is_near_that_pools_gpu(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not near the GPU that happens to be current where the host pool is made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = DevicePool.allocate(SPEC, num_pages=4)
    where = torch.device("cuda:3")
    monkeypatch.setattr(DevicePool, "device", property(lambda _: where), raising=False)
    HostPool.like(device, num_pages=4)
    ended()
    assert {call.device for call in fake.named("register")} == {3}


def test_interpreter_exit_with_pinned_memory_alive_is_quiet() -> None:
    """A pool that lives until the process ends takes nothing down with it."""
    program = (
        "from offload import pinned\n"
        "from offload.testing_cuda import FakeCuda\n"
        "kept = pinned.pinned_memory(100_000, granule=1, calls=FakeCuda())\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_the_cores_near_a_gpu_come_from_its_numa_node(tmp_path: Path) -> None:
    """Two reads under /sys; where they say nothing, no core is preferred."""
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,12\n")
    assert _cpus_near("0000:1B:00.0", tmp_path) == {4, 5, 6, 12}
    (device / "numa_node").write_text("-1\n")
    assert _cpus_near("0000:1b:00.0", tmp_path) == frozenset()


@pytest.mark.parametrize("io_backend", ["memcpy_batch", "direct"])
@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT])
@pytest.mark.parametrize("direction", Direction)
def test_copies_are_cut_where_chunks_meet(
    fake: FakeCuda, io_backend: str, layout: Layout, direction: Direction
) -> None:
    """A run of pages over several chunks moves whole, in copies that each stay in one registration."""
    pages = 96
    device = DevicePool.allocate(SPEC, num_pages=pages)
    host = HostPool.allocate(SPEC, num_pages=pages, layout=layout, pinned=True)
    assert host.pinned
    assert all(part.breaks for part in host.geometry.components)
    oracle.fill(device, 1)
    oracle.fill(host, 2)
    source, destination = sides(direction, host, device)
    pairs = [(page, page) for page in range(pages)]
    wanted = [source.view(part.name, 1).clone() for part in host.geometry.components]
    with on_stream(fake):
        backend = make_backend(io_backend)
        prepared = backend.prepare(device, host, direction, runs_of(pairs))
        prepared.copy(1)
        fake.run()
    got = [destination.view(part.name, 1) for part in host.geometry.components]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    fake.check()


def sides(direction: Direction, host: HostPool, device: DevicePool) -> tuple[Pool, Pool]:
    """Return source and destination."""
    return (host, device) if direction is Direction.LOAD else (device, host)


def test_an_uncut_copy_across_chunks_is_refused(fake: FakeCuda) -> None:
    """The fake refuses what CUDA refuses, so the test above means something."""
    made = pinned_memory(2 * SMALL, granule=1024)
    other = torch.empty(2 * SMALL, dtype=torch.uint8)
    with on_stream(fake), pytest.raises(CudaError, match="crosses"):
        fake.copy(other, made.memory)
