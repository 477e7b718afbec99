"""`edl master` writes how many teachers are wanted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edl.discovery import open_store
from edl.load_reporting import read_wanted
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDL_LOAD_INTERVAL_S", "0.2")
    monkeypatch.setenv("EDL_LOAD_WINDOW_S", "1.5")
    return f"sqlite:///{tmp_path}/discovery.sqlite"


def test_master_writes_what_is_wanted(url: str) -> None:
    since = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    now = {"t": 10.0, "rows": 900, "compute_s": 9.0, "workers": 1, "state": "ready"}
    command = [sys.executable, "-m", "edl", "master", "j", "--store", url, "--stay", "--min-teachers", "2"]
    with open_store(url) as store:
        store.put("load/s/teachers/a", json.dumps({"v": 1, "id": "a", **now, "since": since}).encode())
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as master:
            try:
                found = wait_until(lambda: read_wanted(store, "teachers", "s")) or {}
                assert (found["count"], found["now"]) == (2, 1), "the least that the command says"
                master.terminate()
                _, log = master.communicate(timeout=DEADLINE_S)
            finally:
                master.kill()
    assert master.returncode == 128 + 15
    assert "Traceback" not in log, log
