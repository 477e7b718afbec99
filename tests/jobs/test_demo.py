"""`edl demo`, whole: real teachers killed, started and drained under a real epoch; and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import DEADLINE_S, wait_until

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


@pytest.mark.timeout(280)
def test_page_and_teachers_end_with_it(tmp_path: Path) -> None:
    """The page shows its teachers, its student, and how many teachers would do."""
    pytest.importorskip("aiohttp", reason="the page needs aiohttp")
    with demo(tmp_path, "--dashboard") as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if "A page shows it all" in line).split()[-1]
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"<title>EDL</title>" in answer.read()
        wait_until(lambda: _served(_state(address)), "three teachers serve, and how many would do is said")
        teachers = psutil.Process(process.pid).children(recursive=True)
        assert len(teachers) >= 3
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        wait_until(lambda: not any(_runs(teacher) for teacher in teachers), f"{teachers} end")
        with pytest.raises(OSError):
            _state(address)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _state(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}api/state", timeout=30) as answer:
        state: dict[str, Any] = json.load(answer)
    return state


def _served(state: dict[str, Any]) -> bool:
    """Whether a student has asked three teachers, and how many would do is said."""
    for service in state["services"]:
        served = [teacher for teacher in service["teachers"] if teacher["students"]]
        if service["service"] == "digits" and len(served) >= 3 and service["wanted"] is not None:
            return bool(service["wanted"]["reason"])
    return False
