"""`edl demo`, whole: real teachers killed, started and drained under a real epoch; and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo needs PyTorch")
pytest.importorskip("sklearn", reason="the demo needs scikit-learn")


@contextlib.contextmanager
def demo(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "edl", "demo", "--quick", "--out", str(out), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(280)
def test_the_whole_story(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        text, _ = process.communicate(timeout=270)
        assert process.returncode == 0, text

    told = json.loads((tmp_path / "demo.json").read_text())
    rows = 2 * 400 * 32
    assert told["all_well"]
    assert told["findings"]["checked"] == rows
    assert told["stats"]["rows_asked"] == told["stats"]["rows_received"] == rows

    events = {event["kind"]: event for event in told["events"]}
    assert set(events) == {"kill", "join", "drain"}
    assert told["exit_codes"] == {"teacher-1": -signal.SIGKILL, "teacher-2": 0}
    teachers = told["stats"]["teachers"]
    assert set(teachers) == {"teacher-1", "teacher-2", "teacher-3", "teacher-4"}
    assert all(teacher["rows"] > 0 for teacher in teachers.values())
    assert sum(teacher["rows"] for teacher in teachers.values()) == rows
    assert teachers["teacher-2"]["failures"] == 0, "a drained teacher answers all that it has"

    assert told["teacher"] > 0.97
    assert min(told["alone"]) > 0.8
    assert sum(told["distilled"]) > sum(told["alone"])

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for words in ("student distilled", "Rows by teacher", "KILL  teacher-1", "JOIN  teacher-4", "DRAIN teacher-2"):
        assert words in text
