"""What benchmarks count of a process: bytes it copies, context switches, and system calls where the kernel lets us."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._counters import COPIES, Counters, copies_environment

MIB = 1 << 20
PROGRAM = """
import sys, time
data = bytearray(1 << 20)
for line in sys.stdin:
    for _ in range(int(line)):
        bytes(data)
        time.sleep(0.0001)
    print("done", flush=True)
"""


def test_copies_and_switches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = copies_environment(tmp_path)
    assert bool(environment) == bool(shutil.which("cc") or shutil.which("gcc"))
    monkeypatch.setenv(COPIES, str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def copy(times: int) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{times}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"

        copy(3)
        counters = Counters(child.pid)
        copy(50)
        copy(0)  # a child counts what it sent after it is sent; by now that is done for the line before
        found = counters.close()
        child.stdin.close()
    assert found["switches"] >= 50, "one for each time that it slept"
    if environment:
        assert 50 * MIB <= found["copied"] < 51 * MIB
        assert found["sent"] >= len("done\n")
    if "syscalls" in found:
        assert found["syscalls"] >= 50
