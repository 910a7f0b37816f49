"""Random programs against the scheduler, on the simulator and on threads: `python -m tests.soak`.

`model` says what every page must hold, `world` draws pools and drivers, `steps`, `forward` and `crowd` are what a
program may do, `player` runs one and judges it, `shrink` makes a failing one small, `plants` are faults
that must be found.
"""
