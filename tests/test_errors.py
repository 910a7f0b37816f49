"""One golden text per class, the fields behind it, and a way through pickle."""

from __future__ import annotations

import copy
import pickle

import pytest

from offload import errors
from offload.core.kinds import Direction, IoBackend, Layout, PoolKind, parse
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
    left_behind,
    one_of,
    sized,
)

DRAINING = "its pages stay locked until the copies already issued have landed."
LANDED = f"Layers that had landed are usable; {DRAINING}"


def pair_error(**changes: object) -> UnsupportedPairError:
    """Return a refusal, with some fields changed."""
    fields = {
        "kind": PoolKind.MHA,
        "layout": Layout.PAGE_FIRST,
        "io_backend": IoBackend.DIRECT,
        "direction": Direction.LOAD,
        "reason": "it rains",
    }
    return UnsupportedPairError(**{**fields, **changes})  # type: ignore[arg-type]


GOLDEN: dict[str, tuple[OffloadError, str]] = {
    "both ways out": (
        pair_error(io_backends=("kernel", "cpu"), layouts=("layer_first",)),
        (
            "io_backend 'direct' cannot load layout 'page_first' (mha): it rains. Keep 'page_first' and "
            "use io_backend 'kernel' or 'cpu'; or keep 'direct' and use layout 'layer_first'."
        ),
    ),
    "another io backend": (
        pair_error(io_backends=("cpu",), direction=Direction.BACKUP),
        (
            "io_backend 'direct' cannot back up layout 'page_first' (mha): it rains. Keep 'page_first' "
            "and use io_backend 'cpu'."
        ),
    ),
    "another layout": (
        pair_error(layouts=("page_head",), pool="draft"),
        (
            "io_backend 'direct' cannot load layout 'page_first' (mha, pool 'draft'): it rains. Keep "
            "'direct' and use layout 'page_head'."
        ),
    ),
    "another pair": (
        pair_error(pair=("cpu", "page_head")),
        (
            "io_backend 'direct' cannot load layout 'page_first' (mha): it rains. No other io backend "
            "copies 'page_first' here, and 'direct' copies no other layout. Use io_backend 'cpu' with "
            "layout 'page_head'."
        ),
    ),
    "no way out": (
        pair_error(),
        (
            "io_backend 'direct' cannot load layout 'page_first' (mha): it rains. No other io backend "
            "copies 'page_first' here, and 'direct' copies no other layout."
        ),
    ),
    "unknown, close": (
        UnknownNameError("io_backend", "kernal", IoBackend),
        (
            "unknown io_backend 'kernal'; did you mean 'kernel'? Choices: 'direct', 'memcpy_batch', "
            "'kernel', 'staged', 'cpu', 'kernel_ascend'."
        ),
    ),
    "unknown, far": (
        UnknownNameError("direction", "sideways", Direction),
        "unknown direction 'sideways'. Choices: 'load', 'backup'.",
    ),
    "geometry": (
        GeometryError(
            "host pool",
            expected={"kv row": 40, "dtype": "f16"},
            got={"kv row": 32, "dtype": "u8"},
            remedy="Derive it.",
        ),
        "host pool: kv row is 32, expected 40; dtype is u8, expected f16. Derive it.",
    ),
    "misdeclared": (
        GeometryError.misdeclared(
            "host pool 'kv'",
            declared="page_first",
            shape=(4096, 32, 8, 128),
            got=(32, 4096, 8, 128),
            looks_like="layer_first",
            nbytes=268435456,
        ),
        (
            "host pool 'kv' is declared 'page_first', shape (4096, 32, 8, 128), but its tensor has shape "
            "(32, 4096, 8, 128), which is 'layer_first'. Both need 268435456 bytes, so copies would run "
            "and read other layers' bytes. Pass layout='layer_first', or allocate with "
            "HostPool.allocate(layout='page_first')."
        ),
    ),
    "out of range": (
        RequestError.out_of_range("device page", value=8, position=2, bound=8),
        "device page 8 at position 2 is out of range. The pool has device pages 0 to 7.",
    ),
    "written twice": (
        RequestError.written_twice("load", page=3, sources=(7, 9), position=1),
        "load writes device page 3 twice (from host pages 7 and 9). Each device page may appear once.",
    ),
    "lengths": (
        RequestError.lengths(host_pages=2, device_pages=3),
        (
            "host_pages has 2 pages and device_pages has 3. Page i of one goes to page i of the other, so "
            "both need the same number."
        ),
    ),
    "out of pages": (
        OutOfPagesError(needed=5, free=1, locked=1),
        (
            "5 pages are needed, 1 is free and 1 is locked. Free pages that are no longer used, or make "
            "the pool larger."
        ),
    ),
    "locked pages come back": (
        OutOfPagesError(needed=5, free=3, locked=2),
        (
            "5 pages are needed, 3 are free and 2 are locked. Locked pages come back when their copies "
            "have landed: await idle(), then retry."
        ),
    ),
    "a single page": (
        OutOfPagesError(needed=1, free=0, locked=0, pool="kv"),
        (
            "1 page of pool 'kv' is needed, 0 are free and 0 are locked. Free pages that are no longer "
            "used, or make the pool larger."
        ),
    ),
    "scattered pages": (
        OutOfPagesError(needed=3, free=4, contiguous=True),
        (
            "3 contiguous pages are needed, 4 are free and 0 are locked. No run of free pages is that "
            "long: allocate without contiguous=True."
        ),
    ),
    "out of memory": (
        OutOfMemoryError("HostPool.allocate", num_pages=3, nbytes=3 << 40, where="this machine"),
        (
            "HostPool.allocate: 3 pages take 3298534883328 bytes (3072.0 GiB), and this machine does not "
            "have them. Pass a smaller num_pages."
        ),
    ),
    "closed": (
        SchedulerClosedError("load"),
        (
            "cannot load: the scheduler is closed. Nothing was queued. Submit before the block that "
            "opened it ends, or open another."
        ),
    ),
    "lost": (
        SchedulerClosedError(
            "wait for idle pages", gone="the device is lost", remedy="Use another."
        ),
        "cannot wait for idle pages: the device is lost. Use another.",
    ),
    "failed": (
        TransferFailed(
            "load 12", layer=3, cause=RuntimeError("boom"), leaves=left_behind("load", landed=3)
        ),
        f"load 12 failed at layer 3: RuntimeError: boom. {LANDED}",
    ),
    "failed at once": (
        TransferFailed("load 12", cause=OSError("no."), leaves=left_behind("load", landed=0)),
        f"load 12 failed: OSError: no. No layer had landed; {DRAINING}",
    ),
    "failed with another": (
        TransferFailed(
            "load 6",
            cause=TransferFailed.source("backup 5", "host page 4 is torn. Back it up again."),
            leaves=left_behind("load", landed=None),
        ),
        "load 6 failed: host page 4 is torn. Back it up again. Nothing was copied.",
    ),
    "cancelled": (
        TransferCancelled("load 12", leaves=left_behind("load", landed=1)),
        f"load 12 was cancelled. {LANDED}",
    ),
    "backup cancelled half way": (
        TransferCancelled("backup 5", leaves=left_behind("backup", landed=2)),
        (
            "backup 5 was cancelled. Its host pages hold part of it, and cannot be loaded until they are "
            f"backed up again; {DRAINING}"
        ),
    ),
    "failed with its device": (
        TransferFailed("load 5", leaves=left_behind("load", landed=0, lost=True)),
        "load 5 failed. No layer had landed; its pages stay locked for ever.",
    ),
    "backup failed at once": (
        TransferFailed("backup 5", leaves=left_behind("backup", landed=0)),
        (
            "backup 5 failed. Its host pages may hold part of it, and cannot be loaded until they are "
            f"backed up again; {DRAINING}"
        ),
    ),
    "cuda": (
        CudaError("cuMemHostRegister", 712, "part of it is registered already"),
        "cuMemHostRegister returned CUDA error 712 (part of it is registered already)",
    ),
    "no trace": (NotATrace("a.json is not a trace"), "a.json is not a trace"),
    "transition": (
        InvalidTransitionError(event="Landed", state="queued", story=("submitted", "cancelled")),
        (
            "event 'Landed' in state 'queued' has no transition. This is a bug in offload: report it "
            "with this story: submitted; cancelled."
        ),
    ),
}


@pytest.mark.parametrize(("error", "text"), GOLDEN.values(), ids=GOLDEN.keys())
def test_texts(error: OffloadError, text: str) -> None:
    """Each class builds its text from its fields."""
    assert str(error) == text


@pytest.mark.parametrize(("error", "text"), GOLDEN.values(), ids=GOLDEN.keys())
def test_errors_survive_pickle_and_copy(error: OffloadError, text: str) -> None:
    """Another process gets the same class, text and fields."""
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == text
        assert other.__dict__ == error.__dict__


def test_every_class_has_a_golden_text() -> None:
    """No error class is left without a text here."""
    classes = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, OffloadError)
    }
    assert classes - {type(error) for error, _ in GOLDEN.values()} == {OffloadError}


def test_classes_are_at_home_in_one_place() -> None:
    """A traceback and a pickle name `offload.errors`, in whatever file a class is written."""
    homes = {vars(errors)[name].__module__ for name in errors.__all__}
    assert homes == {"offload.errors"}


def test_ancestry() -> None:
    """Faults of the caller are ValueErrors; a cancelled transfer is a failed one."""
    faults = {UnsupportedPairError, UnknownNameError, GeometryError, RequestError, NotATrace}
    assert all(issubclass(each, ValueError) for each in faults)
    others = {OutOfPagesError, SchedulerClosedError, TransferFailed, InvalidTransitionError}
    assert not any(issubclass(each, ValueError) for each in others)
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(CudaError, RuntimeError)
    assert issubclass(TransferCancelled, TransferFailed)


def test_a_failure_carries_its_cause() -> None:
    """What broke is the error's cause."""
    cause = RuntimeError("boom")
    assert TransferFailed("load 1", cause=cause).__cause__ is cause


def test_parse_takes_names_and_members() -> None:
    """A name or a member gives the member; anything else is an unknown name."""
    assert parse(Layout, "page_head") is parse(Layout, Layout.PAGE_HEAD) is Layout.PAGE_HEAD
    for wrong in ("page", "", "PAGE_HEAD", None, 3):
        with pytest.raises(UnknownNameError, match="unknown layout"):
            parse(Layout, wrong)  # type: ignore[arg-type]


def test_parse_lists_further_choices() -> None:
    """Names that are handled elsewhere are among the choices."""
    with pytest.raises(UnknownNameError, match=r"did you mean 'auto'.*'auto', 'direct'"):
        parse(IoBackend, "aut", also=("auto",))


def test_sizes_have_a_unit_that_fits() -> None:
    """The largest of which there is one; nothing is 0.0 of something."""
    assert [sized(n) for n in (0, 999, 1000, 88_100_000, 3.2e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "88.1 MB",
        "3200.0 GB",
    ]


def test_names_as_prose() -> None:
    """Lists of names read as English."""
    assert [one_of("a"), one_of("ab"), one_of("abc", word="and")] == [
        "'a'",
        "'a' or 'b'",
        "'a', 'b' and 'c'",
    ]
