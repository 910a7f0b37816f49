"""What Perfetto's trace processor must answer about a trace of ours; each check returns what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from offload.trace import Tracer
from offload.trace.read import load
from tests.readers.tools import ask, errors
from tests.trace.story import START

Edges = Mapping[tuple[str, str], int]


def complaints(path: Path) -> list[str]:
    """The engine raises no statistic of severity error or data loss."""
    return [f"{name}: {value}" for name, value in errors(path).items()]


def arrivals(path: Path) -> list[str]:
    """There is one slice per X, b and i event, one value per key of a C event, and no negative length."""
    events = load(path)["traceEvents"]
    phases = Counter(event["ph"] for event in events)
    expected = {
        "slices": phases["X"] + phases["b"] + phases["i"],
        "negative": 0,
        "counters": sum(len(event["args"]) for event in events if event["ph"] == "C"),
    }
    answers = ask(
        path,
        [
            "select count(*) as n from slice",
            "select count(*) as n from slice where dur < 0",
            "select count(*) as n from counter",
        ],
    )
    found = dict(zip(expected, (rows[0]["n"] for rows in answers), strict=True))
    return [f"{key}: {found[key]}, not {n}" for key, n in expected.items() if found[key] != n]


def times(path: Path, tracer: Tracer) -> list[str]:
    """Start and length of every copy are the recorded integers; a leaf is one nanosecond short."""
    sql = "select ts, dur from slice where category in ('offload.load', 'offload.backup') order by ts, dur"
    copies = tracer.timeline().copies
    expected = Counter((copy.start - START, copy.end - copy.start - 1) for copy in copies)
    found = Counter((row["ts"], row["dur"]) for row in ask(path, [sql])[0])
    return [f"{one} is missing" for one in expected - found] + [
        f"{one} is new" for one in found - expected
    ]


def flows(path: Path, expected: Edges) -> list[str]:
    """Every arrow of ours leads from the slice and to the slice that it should, and forward."""
    joined = "from flow join slice a on slice_out = a.id join slice b on slice_in = b.id"
    edges, backward = ask(
        path,
        [
            f"select a.category as source, b.category as target, count(*) as n {joined} group by 1, 2",
            f"select count(*) as n {joined} where b.ts < a.ts",
        ],
    )
    found = {(row["source"], row["target"]): row["n"] for row in edges}
    wrong = [
        f"{edge}: {found.get(edge)}, not {n}"
        for edge, n in expected.items()
        if found.get(edge) != n
    ]
    wrong += [f"{edge}: {n}, not expected" for edge, n in found.items() if edge not in expected]
    return wrong + ["backward"] * backward[0]["n"]


def counters_end_at_zero(path: Path) -> list[str]:
    """When everything has settled nothing is in flight and nothing is queued."""
    sql = (
        "select t.name as name, c.value as value from counter c join track t on c.track_id = t.id "
        "where t.name glob 'bytes in flight*' or t.name glob 'queue*' order by c.ts, c.id"
    )
    last = {row["name"]: row["value"] for row in ask(path, [sql])[0]}
    names = {"bytes in flight h2d", "bytes in flight d2h", "queue load", "queue backup"}
    wrong = [f"no counter {name}" for name in sorted(names - last.keys())]
    return wrong + [f"{name} ends at {value}" for name, value in last.items() if value]


def sums(path: Path, tracer: Tracer) -> list[str]:
    """Every number of the report that is a sum is what SQL adds up from the file."""
    report = tracer.report()
    copies = "category in ('offload.load', 'offload.backup')"
    arg = "select sum(extract_arg(arg_set_id, 'args.{}')) as n from slice where {}"
    waits = "from slice where category = 'offload.wait'"
    questions: dict[str, tuple[str, int]] = {
        "stall": (f"select sum(dur + 1) as n {waits}", report.stall_ns),
        "waits": (f"select count(*) as n {waits}", report.waits),
        "queued": (
            f"select cast(round(1000 * sum(extract_arg(arg_set_id, 'args.queue_us'))) as int) as n {waits}",
            sum(row.queued_ns for row in report.layers),
        ),
        "steps": ("select count(*) as n from slice where category = 'offload.step'", report.steps),
        "forward": (
            "select sum(dur) as n from slice where category = 'offload.step'",
            report.forward_ns,
        ),
        "loaded": (arg.format("nbytes", "category = 'offload.load'"), report.load.nbytes),
        "saved": (arg.format("nbytes", "category = 'offload.backup'"), report.backup.nbytes),
        "load copies": (
            "select count(*) as n from slice where category = 'offload.load'",
            report.load.copies,
        ),
        # One lane, and no two copies of a lane overlap: the union is the sum.
        "load busy": (
            "select sum(dur + 1) as n from slice where category = 'offload.load'",
            report.load.busy_ns,
        ),
        "ops": (arg.format("ops", copies), report.ops),
        "transfers": (arg.format("transfers", copies), report.transfers),
        "requests": (
            "select count(*) as n from slice where category = 'offload.request' and name = 'request'",
            report.requests,
        ),
    }
    for row in report.layers:
        mine = f"extract_arg(arg_set_id, 'args.layer') = {row.layer}"
        questions[f"stall of layer {row.layer}"] = (
            f"select coalesce(sum(dur + 1), 0) as n {waits} and {mine}",
            row.stall_ns,
        )
    answers = ask(path, [sql for sql, _ in questions.values()])
    return [
        f"{what}: {rows[0]['n']}, not {expected}"
        for (what, (_, expected)), rows in zip(questions.items(), answers, strict=True)
        if rows[0]["n"] != expected
    ]


def lanes(path: Path) -> list[str]:
    """The four lanes stand in the order of their thread ids, under a process that names its rank."""
    threads, process = ask(
        path,
        [
            "select tid, name from thread where name is not null order by tid",
            "select pid, name from process where name is not null",
        ],
    )
    wrong = []
    names = ["forward", "load H2D", "backup D2H", "scheduler"]
    if [(row["tid"], row["name"]) for row in threads] != list(enumerate(names, start=1)):
        wrong.append(f"lanes are {threads}")
    if process != [{"pid": 10_000_000, "name": "offload rank0 cuda:0"}]:
        wrong.append(f"process is {process}")
    return wrong
