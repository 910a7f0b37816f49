"""An installed package that brings an io backend, a driver and a layout, used through the public door.

Its folder gets the metadata that an installer writes, and everything runs in a process of its own: entry
points are read from the path, once per process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENTRY_POINTS = {
    "offload.backends": "backwards = backwards:register_backend",
    "offload.drivers": "loud = backwards:register_driver",
    "offload.layouts": "head_first = backwards:register_layout",
}


def install(folder: Path) -> None:
    """Put the package into a folder as an installer does."""
    shutil.copy(HERE / "plugin" / "backwards.py", folder)
    info = folder / "backwards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards\nVersion: 1.0\n")
    points = (f"[{group}]\n{entry}\n" for group, entry in ENTRY_POINTS.items())
    (info / "entry_points.txt").write_text("".join(points))


def test_an_installed_package_adds_a_backend_a_driver_and_a_layout(tmp_path: Path) -> None:
    """Its names work in `open_scheduler`, pools, `explain` and the matrix; bytes move through its code."""
    install(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "plugin" / "use.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "backwards" in done.stdout.splitlines()[0] + done.stdout.splitlines()[1]
