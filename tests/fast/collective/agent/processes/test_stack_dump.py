"""The stacks of processes that really hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from edl.collective.agent.processes.stack_dump import dump_stacks
from tests.waiting import wait_until

HANGS = """
import sys, pathlib, ctypes
from edl.collective.agent.processes.stack_dump import arm_stack_dump
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)

def stuck():  # with the interpreter's lock, in native code
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

arm_stack_dump(pathlib.Path(sys.argv[1]))
print("armed", flush=True)
stuck()
"""


@contextlib.contextmanager
def worker(source: str, *arguments: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "armed\n"
            yield process.pid
        finally:
            process.kill()


def test_a_worker_that_hangs_shows_where(tmp_path: Path) -> None:
    """Also after a stop, in which it says that it is stopped; and it lives, until it has ended."""
    path = tmp_path / "stacks"
    with worker(HANGS, str(path)) as pid:
        wait_until(lambda: "in stuck" in dump_stacks([(pid, path)])[0], "it has come to where it hangs")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "is stopped (SIGSTOP" in dump_stacks([(pid, path)], timeout_s=0.5)[0], "it says so")
        os.kill(pid, signal.SIGCONT)

        def single() -> bool:
            text = dump_stacks([(pid, path)])[0]
            return text.count("Current thread") == 1 and "in stuck" in text

        wait_until(single, "an answer has the stacks of its own request only")
    assert dump_stacks([(pid, path)]) == [f"process {pid} has ended: it has no stack"]


def test_unarmed_worker_is_not_killed(tmp_path: Path) -> None:
    with worker("import time\nprint('armed', flush=True)\ntime.sleep(600)") as pid:
        (text,) = dump_stacks([(pid, tmp_path / "stacks")])
        assert "has not armed" in text
        os.kill(pid, 0)


def test_signal_taken_by_the_script(tmp_path: Path) -> None:
    source = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nprint('armed', flush=True)\n"
    source += "while True: time.sleep(600)"
    with worker(source) as first, worker(source) as second:
        texts = dump_stacks([(first, tmp_path / "1"), (second, tmp_path / "2")], timeout_s=0.3)
        assert all("took SIGUSR2 for itself" in text for text in texts)
