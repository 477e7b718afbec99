"""`edl` as process 1 of a container: signals, exit codes, and processes whose parents are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edl.init_process import run_init
from tests.waiting import DEADLINE_S

AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
NEW_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")
START = """
import os, signal, subprocess, sys
from edl.init_process import run_init
if (code := run_init()) is not None:
    sys.exit(code)
print("ready", os.getpid(), flush=True)
"""


@contextmanager
def container(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python as process 1 of a process namespace of its own, and its first line."""
    command = [*NEW_PID_NAMESPACE, sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "not permitted" in line:
                pytest.skip(f"a process namespace is not permitted here: {line.strip()}")
            yield process, line
        finally:
            process.kill()


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to what is process 1 in there."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), number)


def test_other_processes_have_no_init() -> None:
    assert run_init() is None


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))", 0),  # signals that init blocks are free
        ("sys.exit(69)", 69),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_exit_code_is_the_programs(code: str, expected: int) -> None:
    with container("-c", START + code) as (process, line):
        assert line == "ready 2\n"
        assert process.wait(DEADLINE_S) == expected


def test_signals_reach_the_program() -> None:
    """Its handlers, and a program without one ends: without an init, SIGTERM would be lost."""
    code = """
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("handlers", flush=True)
while True: signal.pause()
"""
    with container("-c", START + code) as (process, line):
        assert process.stdout is not None
        assert line + process.stdout.readline() == "ready 2\nhandlers\n"
        end(process, signal.SIGUSR1)
        assert process.stdout.readline() == "usr1\n"
        end(process)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_orphans_leave_no_zombies() -> None:
    """Processes whose parents die before them."""
    code = """
from tests.waiting import wait_until
for _ in range(10):
    subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"], check=True)
wait_until(lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
"""
    with container("-c", START + code) as (process, _):
        assert process.wait(DEADLINE_S) == 0


def test_edl_as_process_1_ends_at_once(tmp_path: Path) -> None:
    """`edl teachers --watch` has no handler for SIGTERM, and ends all the same."""
    with container("-m", "edl", "teachers", "--watch", "--discovery", f"sqlite:///{tmp_path}/d.sqlite") as (process, _):
        end(process)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
