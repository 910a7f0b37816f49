"""Files that are JSON and no traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.cli import main

WEIRD = {
    "no args": '{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "pid": 10000000, "tid": 1, "name": "step"}]}',
    "null events": '{"traceEvents": [null, 1, "a", [], {}]}',
    "huge": '{"traceEvents": [{"ph": "X", "ts": 1e308, "dur": 1e308, "pid": 1, "tid": 2, "name": "a"}]}',
    "metadata": '{"metadata": 5, "traceEvents": []}',
    "deep": '{"traceEvents": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "lists": '{"traceEvents": [{"ph": "X", "ts": "1", "dur": [], "pid": {}, "tid": {}, "name": 3, "args": []}]}',
}


@pytest.mark.parametrize("command", ["report", "check"])
@pytest.mark.parametrize("name", WEIRD)
def test_json_that_is_no_trace_is_one_paragraph(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any JSON file is answered with a report, a list of problems or one paragraph, never a traceback."""
    path = tmp_path / "weird.json"
    path.write_text(WEIRD[name])
    assert main([command, str(path)]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err
