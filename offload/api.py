"""The public names: what `import offload` offers. They come all at once, when the first of them is used."""

from __future__ import annotations

from offload import groups, layerwise, rules
from offload.blocking import BlockingScheduler
from offload.core.axes import Axes
from offload.core.batch import Limits, State
from offload.core.kinds import Direction, IoBackend, Layout, PoolKind
from offload.core.pages import PageAllocator
from offload.core.slots import pages_from_slots
from offload.core.table import Rejection
from offload.errors import (
    CudaError,
    GeometryError,
    InvalidTransitionError,
    NotATrace,
    OffloadError,
    OutOfMemoryError,
    OutOfPagesError,
    RequestError,
    SchedulerClosedError,
    TransferCancelled,
    TransferFailed,
    UnknownNameError,
    UnsupportedPairError,
)
from offload.group import GroupPages, PagePair, Pair, PoolGroup
from offload.opening import open_scheduler, start_scheduler
from offload.pool import DevicePool, HostPool
from offload.registry import register_backend, register_driver, register_layout
from offload.scheduler import Scheduler
from offload.spec import PoolSpec
from offload.statistics import DirectionStatistics, Statistics
from offload.trace import Tracer
from offload.transfer import Transfer
from offload.verdict import Verdict, explain

__all__ = [
    "Axes",
    "BlockingScheduler",
    "CudaError",
    "DevicePool",
    "Direction",
    "DirectionStatistics",
    "GeometryError",
    "GroupPages",
    "HostPool",
    "InvalidTransitionError",
    "IoBackend",
    "Layout",
    "Limits",
    "NotATrace",
    "OffloadError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PageAllocator",
    "PagePair",
    "Pair",
    "PoolGroup",
    "PoolKind",
    "PoolSpec",
    "Rejection",
    "RequestError",
    "Scheduler",
    "SchedulerClosedError",
    "State",
    "Statistics",
    "Tracer",
    "Transfer",
    "TransferCancelled",
    "TransferFailed",
    "UnknownNameError",
    "UnsupportedPairError",
    "Verdict",
    "explain",
    "groups",
    "layerwise",
    "open_scheduler",
    "pages_from_slots",
    "register_backend",
    "register_driver",
    "register_layout",
    "rules",
    "start_scheduler",
]
