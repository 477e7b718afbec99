"""A process that is killed while it writes labels, at any line: none is wrong, none that was put is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, threading, time, random
import numpy as np
from edl.distill.cache import CacheKey, SoftLabelCache

KEY, PATH, ROWS = CacheKey("m", "1", ("y",)), sys.argv[1], 20

def labels(ids):
    return {"y": np.repeat(np.asarray(ids, np.float32)[:, None], 100, axis=1)}

def write(first, killed_at):
    '''Put some labels, then others, and be killed before the line of that number.'''
    cache = SoftLabelCache(0, PATH, disk_bytes=1 << 20)
    cache.view(KEY).put(range(first, first + ROWS), labels(range(first, first + ROWS)))
    lines = 0
    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("cache/folder.py", "edl/sqlite_file.py")):
            return None
        lines += 1
        if lines >= killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    threading.settrace(trace)
    sys.settrace(trace)
    other = SoftLabelCache(0, PATH, disk_bytes=1 << 20)
    for start in range(first + ROWS, first + 10 * ROWS, ROWS):
        other.view(KEY).put(range(start, start + ROWS), labels(range(start, start + ROWS)))
        other.flush()
    os._exit(7)  # it has fewer lines

def check(first):
    with SoftLabelCache(0, PATH) as cache:
        ids = cache.view(KEY).ids()
        found = cache.view(KEY).get(ids)
        assert found.complete, f"unreadable: {np.asarray(ids)[~found.mask]}"
        assert (found.outputs["y"] == labels(ids)["y"]).all(), "a label is another sample's"
        assert {*range(first, first + ROWS)} <= {*ids}, "a label is lost"

killed = 0
for number in range(1, 4000, 61):
    if not (child := os.fork()):
        write(number * 1000, number)
    status = os.waitpid(child, 0)[1]
    check(number * 1000)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 7, status
        break
    killed += 1
assert killed > 10, killed
print(killed)
"""


def test_killed_at_any_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "damaged" not in ended.stderr
