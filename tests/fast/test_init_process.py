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

AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
NEW_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")
START = """
import os, signal, subprocess, sys, time
from edl.init_process import run_init
if (code := run_init()) is not None:
    sys.exit(code)
print("ready", os.getpid(), flush=True)
"""


@contextmanager
def container(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` as the child of an init, in a process namespace of their own."""
    command = [*NEW_PID_NAMESPACE, sys.executable, "-c", START + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            line = process.stdout.readline()
            if "not permitted" in (error := "" if line else process.stderr.read()):
                pytest.skip(f"a process namespace is not permitted here: {error.strip()}")
            assert line == "ready 2\n", error
            yield process
        finally:
            process.kill()
            process.wait(10)


def init_of(process: subprocess.Popen[str]) -> int:
    """The process id, out here, of process 1 in there."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_other_processes_have_no_init() -> None:
    assert run_init() is None


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(0)", 0), ("sys.exit(69)", 69), ("1 / 0", 1)])
def test_exit_code_is_the_programs(code: str, expected: int) -> None:
    with container(code) as process:
        assert process.wait(20) == expected


def test_killed_program_is_128_and_signal() -> None:
    with container("os.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(20) == 128 + signal.SIGKILL


def test_program_without_handler_ends() -> None:
    """As while it is still importing: without an init, SIGTERM would be lost."""
    with container("time.sleep(60)") as process:
        os.kill(init_of(process), signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_signals_reach_the_programs_handler() -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("handlers", flush=True)
while True: time.sleep(60)
"""
    with container(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "handlers\n"
        os.kill(init_of(process), signal.SIGUSR1)
        assert process.stdout.readline() == "usr1\n"
        os.kill(init_of(process), signal.SIGTERM)
        assert process.wait(20) == 7


def test_orphans_leave_no_zombies() -> None:
    """Fifty processes whose parents die before them."""
    code = """
for _ in range(50):
    subprocess.run(["sh", "-c", "sleep 0.2 & exit 0"], check=True)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    if pids == [1, os.getpid()]:
        sys.exit(0)
    time.sleep(0.05)
sys.exit(f"left are {pids}")
"""
    with container(code) as process:
        assert process.stderr is not None
        assert process.wait(50) == 0, process.stderr.read()


def test_program_has_an_empty_signal_mask() -> None:
    with container("sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))") as process:
        assert process.wait(20) == 0


def test_edl_as_process_1_ends_at_once(tmp_path: Path) -> None:
    """`edl teachers --watch` has no handler for SIGTERM, and ends all the same."""
    command = [sys.executable, "-m", "edl", "teachers", "--watch", "--discovery", f"sqlite:///{tmp_path}/d.sqlite"]
    process = subprocess.Popen(
        [*NEW_PID_NAMESPACE, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            line = process.stdout.readline()
            if "not permitted" in line:
                pytest.skip(f"a process namespace is not permitted here: {line.strip()}")
            assert line, "it ended by itself"
            os.kill(init_of(process), signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait(10)
