"""The stacks of processes that really hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.agent.processes.stack_dump import dump_stacks

HANGS = {
    "sleep": "import time\ndef stuck(): time.sleep(600)",
    "the interpreter's lock, held in native code": (
        "import ctypes\nlibc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
        "def stuck():\n    libc.pthread_mutex_lock(mutex)\n    libc.pthread_mutex_lock(mutex)"
    ),
    "a gloo all-reduce": (
        "import datetime, threading, torch, torch.distributed as dist\n"
        "store, minute = dist.HashStore(), datetime.timedelta(minutes=1)\n"
        "def join(rank): groups[rank] = dist.ProcessGroupGloo(store, rank, 2, minute)\n"
        "groups = {}\n"
        "other = threading.Thread(target=join, args=(1,))\n"
        "other.start(); join(0); other.join()\n"
        "def stuck(): groups[0].allreduce([torch.zeros(8)]).wait()"
    ),
}
WORKER = """
import sys, pathlib
from edl.collective.agent.processes.stack_dump import arm_stack_dump
{body}
arm_stack_dump(pathlib.Path(sys.argv[1]))
print("armed", flush=True)
stuck()
"""


@contextlib.contextmanager
def worker(source: str, *arguments: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stack_with(words: str, pid: int, path: Path) -> str:
    """Ask until `words` are there: the process may not have got to where it hangs."""
    deadline = time.monotonic() + 60
    while words not in (text := dump_stacks([(pid, path)])[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return text


def wait_for_single(pid: int, path: Path) -> None:
    """Ask until an answer has the stacks of a single request."""
    deadline = time.monotonic() + 60
    while (text := dump_stacks([(pid, path)])[0]).count("Current thread") != 1 or "in stuck" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.1)


@pytest.mark.parametrize("how", list(HANGS))
def test_a_worker_that_hangs_shows_where(how: str, tmp_path: Path) -> None:
    with worker(WORKER.format(body=HANGS[how]), str(tmp_path / "stacks")) as pid:
        text = stack_with("in stuck", pid, tmp_path / "stacks")
        assert "in stuck" in text
        # Of this request only, once the process has answered those before, which on a busy machine may come late.
        wait_for_single(pid, tmp_path / "stacks")
        os.kill(pid, 0)  # and it lives


def test_stopped_and_gone_workers_answer(tmp_path: Path) -> None:
    """A stopped worker and one that has gone say so at once."""
    path = tmp_path / "stacks"
    with worker(WORKER.format(body=HANGS["sleep"]), str(path)) as pid:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while "is stopped (SIGSTOP" not in (text := dump_stacks([(pid, path)], timeout_s=0.5)[0]):
            assert time.monotonic() < deadline, text
        os.kill(pid, signal.SIGCONT)
        assert "in stuck" in stack_with("in stuck", pid, path)
    assert dump_stacks([(pid, path)]) == [f"process {pid} has ended: it has no stack"]


def test_unarmed_worker_is_not_killed(tmp_path: Path) -> None:
    """A worker that armed nothing is not killed by the question."""
    with worker("import time\nprint('armed', flush=True)\ntime.sleep(600)") as pid:
        (text,) = dump_stacks([(pid, tmp_path / "stacks")])
        assert "has not armed" in text
        os.kill(pid, 0)


def test_one_deadline_for_all(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nprint('armed', flush=True)\n"
    source = deaf + "while True: time.sleep(600)"
    with worker(source) as first, worker(source) as second:
        texts = dump_stacks([(first, tmp_path / "1"), (second, tmp_path / "2")], timeout_s=0.3)
        assert all("took SIGUSR2 for itself" in text for text in texts)
