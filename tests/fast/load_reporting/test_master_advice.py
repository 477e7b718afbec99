"""`edl master` says how many teachers are wanted, and which of two masters decides."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from edl.discovery import open_store
from edl.load_reporting import read_wanted


def until(condition: Callable[[], object], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def test_master_writes_what_is_wanted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    since = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    now = {"t": 10.0, "rows": 900, "compute_s": 9.0, "workers": 1, "state": "ready"}
    command = [sys.executable, "-m", "edl", "master", "j", "--store", url, "--stay", "--min-teachers", "2"]
    with open_store(url) as store:
        store.put("load/s/teachers/a", json.dumps({"v": 1, "id": "a", **now, "since": since}).encode())
        master = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: read_wanted(store, "teachers", "s"))
            found = read_wanted(store, "teachers", "s") or {}
            assert (found["count"], found["now"]) == (2, 1), "the least that the command says"
            master.terminate()
            _, log = master.communicate(timeout=30)
        finally:
            master.kill()
            master.wait()
    assert master.returncode == 128 + 15
    assert "Traceback" not in log, log
