"""The doors: `open_scheduler` for an event loop, `start_scheduler` for engines without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from offload import registry
from offload.arguments import expect, refusal
from offload.blocking import BlockingScheduler
from offload.core.batch import Limits
from offload.core.kinds import AUTO
from offload.driver.base import Driver
from offload.errors import RequestError, UnknownNameError, shown
from offload.group import Pair, PoolGroup
from offload.pool import DevicePool, HostPool
from offload.route import Router
from offload.scheduler import Scheduler
from offload.shell import Shell
from offload.trace import Tracer

if TYPE_CHECKING:
    import torch

_CALL = "open_scheduler"


def open_scheduler(
    device: DevicePool | PoolGroup,
    host: HostPool | None = None,
    *,
    io_backend: str = AUTO,
    limits: Limits | None = None,
    tracer: Tracer | None = None,
    driver: str | Driver | None = None,
    compute_streams: Sequence[object] = (),
) -> Scheduler:
    """Return a scheduler to be entered with `async with`.

    Entering it takes the pools and the tracer, and raises `RequestError` where another open scheduler has them.
    Leaving the block cancels what is still queued and waits for what moves: await what must be done, or
    close with `aclose(drain=True)`.

    Args:
        device: The device pool; or a `PoolGroup`, and no `host`.
        host: The host pool that backs it.
        io_backend: How bytes move, unless a request says otherwise. `auto` takes the first that can, in
            the documented order; any other name is never replaced.
        limits: Back-pressure. None: unbounded.
        tracer: Records what happens. None: off.
        driver: `"cuda"`, `"threads"`, a registered name, or a driver; None picks by the device pool. A driver
            is the scheduler's from then on: it is closed when that is left.
        compute_streams: Streams that every submit is ordered after, besides the submitting thread's own
            (cuda).

    Raises:
        GeometryError: The pools do not fit each other.
        UnsupportedPairError: `io_backend` can copy these pools in neither direction.
        UnknownNameError: No such io backend or driver.
        RequestError: An argument is of the wrong type, or the members of a group are on several devices.
    """
    _check_arguments(limits=limits, tracer=tracer, driver=driver, compute_streams=compute_streams)
    group = _group(device, host)
    _check_one_device(group)
    router = Router.open(group, io_backend)
    made = _driver(group, driver, compute_streams)
    return Scheduler(Shell(group, router, made, Limits() if limits is None else limits, tracer))


_DRIVER = frozenset(name for name in {**vars(Driver), **Driver.__annotations__} if name[0] != "_")
"""What every driver has."""


def _check_arguments(
    *, limits: object, tracer: object, driver: object, compute_streams: object
) -> None:
    """Refuse arguments of the wrong type by their names.

    Raises:
        RequestError: One is.
    """
    expect(_CALL, "limits", limits, (Limits, type(None)), "a Limits, or None")
    expect(_CALL, "tracer", tracer, (Tracer, type(None)), "a Tracer, or None")
    if isinstance(compute_streams, (str, bytes)) or not isinstance(compute_streams, Sequence):
        raise refusal(_CALL, "compute_streams", compute_streams, "a sequence of streams")
    if driver is not None and not isinstance(driver, str) and not _is_driver(driver):
        raise refusal(
            _CALL, "driver", driver, "'cuda', 'threads', a registered name, a driver, or None"
        )


def _is_driver(made: object) -> bool:
    return not isinstance(made, type) and _DRIVER.issubset(dir(made))


def _group(device: DevicePool | PoolGroup, host: HostPool | None) -> PoolGroup:
    if isinstance(device, PoolGroup):
        if host is not None:
            raise RequestError("a PoolGroup has its host pools already; pass no host")
        return device
    if host is None:
        raise RequestError("a device pool needs the host pool that backs it: pass host")
    return PoolGroup(kv=Pair(device, host))


def _check_one_device(group: PoolGroup) -> None:
    """Refuse members on several devices: a driver has the streams of one.

    Raises:
        RequestError: The device pools are not all on one.
    """
    if len({member.device.device for member in group.members}) > 1:
        places = ", ".join(f"{m.name!r} on {m.device.device}" for m in group.members)
        raise RequestError(
            f"the members of this group are on several devices: {places}. A scheduler moves pages of one "
            "device: make a group and a scheduler for each."
        )


def _driver(
    group: PoolGroup, driver: str | Driver | None, compute_streams: Sequence[object]
) -> Driver:
    device = group.anchor.device.device
    if driver is None:
        driver = "cuda" if device.type == "cuda" else "threads"
    if not isinstance(driver, str):
        _check_its_device(driver, device)
        return driver
    if driver == "threads":
        from offload.driver.threads import ThreadsDriver

        return ThreadsDriver()
    if driver == "cuda":
        return _cuda(group, compute_streams)
    factory = registry.drivers().get(driver)
    if factory is None:
        raise UnknownNameError("driver", driver, ["cuda", "threads", *registry.drivers()])
    made = factory(device=device, compute_streams=compute_streams)
    if not _is_driver(made):
        raise RequestError(
            f"driver {driver!r}: what it registered made {shown(made)}, which is no driver.",
            value=made,
        )
    return cast("Driver", made)


def _check_its_device(driver: Driver, device: torch.device) -> None:
    """Refuse a driver of one GPU for pools of another: compute there would not be waited for.

    Raises:
        RequestError: The pools are on a GPU, and the driver is of another.
    """
    its = getattr(driver, "device", device) if driver.name == "cuda" else device
    if device.type == "cuda" and its != device:
        raise RequestError(
            f"the pools are on {device}, and the streams of {driver!r} are on {its}. Make the driver with "
            f"device={str(device)!r}, or pass none.",
            value=driver,
        )


def _cuda(group: PoolGroup, compute_streams: Sequence[object]) -> Driver:
    device = group.anchor.device.device
    if device.type != "cuda":
        raise RequestError(
            f"driver 'cuda' moves pages of a GPU, and the device pool is on {str(device)!r}. Use "
            "driver='threads', or allocate the pool with device='cuda'."
        )
    from offload.driver.cuda import CudaDriver

    return CudaDriver(device, compute_streams=compute_streams)


def start_scheduler(
    device: DevicePool | PoolGroup,
    host: HostPool | None = None,
    *,
    io_backend: str = AUTO,
    limits: Limits | None = None,
    tracer: Tracer | None = None,
    driver: str | Driver | None = None,
    compute_streams: Sequence[object] = (),
) -> BlockingScheduler:
    """Return a scheduler on a loop thread of its own, for engines without an event loop.

    Every call blocks instead of being awaited, from any thread. Close it, or use `with`. Arguments and
    errors are those of `open_scheduler`, and of entering it.
    """
    scheduler = open_scheduler(
        device, host, io_backend=io_backend, limits=limits, tracer=tracer, driver=driver,
        compute_streams=compute_streams,
    )  # fmt: skip
    return BlockingScheduler.start(scheduler)
