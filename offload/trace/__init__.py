"""See it: record, export, report, draw. `Tracer` is the door; each file here is one step behind it.

records.py    what the ring holds
recorder.py   what records are made by
tracer.py     the same with windows, reports and exports: the door
forward.py    one forward pass, as the hooks see it
pools.py      how full the host pools are
timeline.py   a snapshot, sorted by kind; from a tracer or from a file
events.py     timeline -> trace events, in order (events_*.py: one kind each)
write.py      trace events -> a file, whole or not at all
overlay.py    ours and torch.profiler's in one file
report.py     the numbers
picture.py    the picture
check.py      is this trace one that readers take as it is?
view.py       hand one file to a viewer
"""

from __future__ import annotations

from offload.trace.clock import Anchor
from offload.trace.records import ASYNC_LANE, OpenRequest
from offload.trace.tracer import Tracer

__all__ = ["ASYNC_LANE", "Anchor", "OpenRequest", "Tracer"]
