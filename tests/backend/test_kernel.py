"""The Triton kernel without a GPU: its cases under the interpreter, its machine code by compiling it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra `kernel` is not installed")

from offload.backend.kernel_shape import Shape
from offload.core.kinds import IoBackend, Layout
from offload.core.table import BUILT
from tests.backend.fake_stream import cells
from tests.backend.test_matrix import ON_CPU, SPECS, pools
from tests.test_groups import MADE

ARCHITECTURES = (80, 90, 100)


LEAST = {
    "interpreted": len(cells(IoBackend.KERNEL)) + len(cells(IoBackend.STAGED)),
    "interpreted_scheduler": 2 * len(MADE) + len(SPECS),
}
"""By file, fewer tests than it has: each has its own process."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LEAST)
def test_kernels_under_the_interpreter(name: str) -> None:
    """All cases of a file pass, in a process where Triton interprets."""
    path = Path(__file__).with_name(f"{name}.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=path.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= LEAST[name]
    assert "skipped in" not in run.stdout


@cache
def shape_of(name: str, layout: Layout) -> Shape:
    """Return the rows of a pool of the matrix, for aligned memory."""
    device, host = pools(name, layout)
    ours = host.geometry.components[0]
    theirs = device.geometry.component(ours.name)
    return Shape.of(ours, theirs, [16])


def compiled(kernel: str, shape: Shape, architecture: int) -> str:
    """Return the PTX of a kernel for a shape. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offload.backend import kernel_triton

    function = getattr(kernel_triton, kernel)
    word = shape.dtype.itemsize
    constants = shape.constants(16 * shape.nbytes, 48 * shape.nbytes)
    if kernel == "copy_layers":
        constants |= {"WORD": kernel_triton.WORDS[word], "ALIGNMENT": shape.unit_bytes}
    kinds = dict.fromkeys(("source", "destination"), {8: "*i64", 4: "*i32"}[word])
    kinds |= dict.fromkeys(("source_pages", "destination_pages", "sources", "destinations"), "*i64")
    kinds |= {
        param.name: param.annotation_type for param in function.params if param.annotation_type
    }
    names = function.arg_names
    aligned = [name for name in ("source", "destination") if name in names]
    source = ASTSource(
        function,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return str(made.asm["ptx"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["copy_rows", "copy_layers"])
@pytest.mark.parametrize(
    ("name", "layout", "access"),
    [
        ("mla_packed", Layout.PAGE_FIRST, "v2.b64"),  # 656-byte rows
        ("mha_fp8", Layout.PAGE_HEAD, "v2.b64"),  # 16-byte heads
        ("mla", Layout.PAGE_FIRST, "b64"),  # 72-byte rows
        ("rows", Layout.PAGE_FIRST, "b32"),  # 132-byte rows
    ],
)
def test_rows_move_in_the_widest_words(
    name: str,
    layout: Layout,
    access: str,
    kernel: str,
    architecture: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled for each architecture, loads and stores are as wide as the rows allow."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(kernel, shape_of(name, layout), architecture)
    assert set(re.findall(r"st\.global\.([\w.]+)", ptx)) == {access}
    assert access in re.findall(r"ld\.global\.([\w.]+)", ptx)


def test_what_grows_with_a_pool_makes_no_other_variant() -> None:
    """A base behind 2**31 words, or a million pages, runs the code that was compiled for small ones."""
    from offload.backend import kernel_triton

    for function in (kernel_triton.copy_rows, kernel_triton.copy_layers):
        numbers = [
            p for p in function.params if p.name.endswith(("_base", "num_pages", "num_layers"))
        ]
        assert numbers
        assert {(p.annotation_type, p.do_not_specialize) for p in numbers} == {("i64", True)}


def test_programs_are_few() -> None:
    """However many pages there are, a launch takes a bounded part of the device."""
    shape = shape_of("mla", Layout.PAGE_FIRST)
    assert shape.programs(1) == 1
    assert shape.programs(1_000_000) == shape.programs(1_000, 61) == 16


def test_every_built_column_has_a_test_of_its_cells() -> None:
    """Direct and cpu in `test_matrix.py`, the others on a CUDA that executes."""
    assert {*ON_CPU, IoBackend.MEMCPY_BATCH, IoBackend.KERNEL, IoBackend.STAGED} == BUILT
