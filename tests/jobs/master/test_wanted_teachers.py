"""`edl master` as a process writes how many teachers are wanted; `tests/fast/master/scaling` has the decisions."""

from __future__ import annotations

import json
import subprocess
import sys

from edl.discovery import Store
from edl.load_reporting import read_wanted
from tests.waiting import DEADLINE_S, wait_until


def test_master_writes_what_is_wanted(url: str, store: Store) -> None:
    since = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    now = {"t": 10.0, "rows": 900, "compute_s": 9.0, "workers": 1, "state": "ready"}
    command = [sys.executable, "-m", "edl", "master", "j", "--store", url, "--stay", "--min-teachers", "2"]
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
