"""What tests of code that uses offload need: virtual time, races found, copies held, slowed and broken.

`SimDriver` runs a scheduler on a virtual clock, in a single thread, the same way every time; pass it as
`driver=` to `open_scheduler`. With `detect_races=True` it reports accesses to the same page that nothing
orders: put your own reads and writes on `sim.compute(...)`. `Hooks` goes to `SimDriver(hooks=...)` or
`ThreadsDriver(hooks=...)` and holds, delays, breaks or records layer copies. `FakeCuda` goes to
`CudaDriver(calls=...)` and is a CUDA that executes late, in every legal order, and reports races.

Example:
    >>> sim = SimDriver(seed=0, detect_races=True)
    >>> async with open_scheduler(device, host, driver=sim) as scheduler:
    ...     load = await scheduler.load(host_pages=[0], device_pages=[1])
    ...     await sim.advance_to_layer(2)
    ...     assert not load.done
    ...     await sim.run_until_idle()
    ...     assert load.done
"""

from __future__ import annotations

from offload.driver.hooks import Gate, Hooks, Op
from offload.driver.sim import SimDriver
from offload.driver.sim_races import Race, RaceError
from offload.driver.threads import ThreadsDriver
from offload.testing_cuda import FakeCuda

__all__ = ["FakeCuda", "Gate", "Hooks", "Op", "Race", "RaceError", "SimDriver", "ThreadsDriver"]
