"""What an agent does around worker processes: logs, stacks, and GPUs that are not free yet."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.agent.processes import gpu_holders
from edl.collective.agent.processes.gpu_holders import find_holders, wait_for_release
from edl.collective.agent.processes.log_folder import temporary_log_folder
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.errors import SettingsError
from tests.waiting import wait_until


def test_no_temporary_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only root has none."""

    def gettempdir() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    with pytest.raises(SettingsError, match=r"emptyDir"), temporary_log_folder():
        pass


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
    with worker("import signal\nprint('armed', flush=True)\nsignal.pause()") as pid:
        (text,) = dump_stacks([(pid, tmp_path / "stacks")])
        assert "has not armed" in text
        os.kill(pid, 0)


def test_signal_taken_by_the_script(tmp_path: Path) -> None:
    source = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nprint('armed', flush=True)\n"
    source += "while True: signal.pause()"
    with worker(source) as first, worker(source) as second:
        texts = dump_stacks([(first, tmp_path / "1"), (second, tmp_path / "2")], timeout_s=0.3)
        assert all("took SIGUSR2 for itself" in text for text in texts)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, in a group of its own, that has a file open."""
    with (tmp_path / "nvidia3").open("w") as device:
        sleeping = subprocess.Popen(["sleep", "1000"], pass_fds=[device.fileno()], start_new_session=True)
    yield sleeping
    sleeping.kill()
    sleeping.wait()


def test_holders_are_found_by_open_device(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    devices = (f"{tmp_path}/nvidia[0-9]*",)
    holders = find_holders([process.pid], devices)
    assert list(holders) == [process.pid]
    assert find_holders([os.getpgrp() + 1_000_000], devices) == {}
    assert find_holders([process.pid], (f"{tmp_path}/kfd",)) == {}, "a host without a GPU"
    assert not wait_for_release(holders, 0.0), "it holds it as long as it lives"
    process.kill()
    assert wait_for_release(holders, math.inf), "a zombie holds nothing"
    assert wait_for_release({process.pid: "1"}, 0.0), "another process of the same number is not meant"


class FakeNVML(types.ModuleType):
    """The functions of pynvml that are used, over a list of processes for each question."""

    NVMLError = RuntimeError

    def __init__(self, *answers: list[int]) -> None:
        super().__init__("pynvml")
        self.answers = list(answers)
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=pid) for pid in self.answers.pop(0)]


def test_nvml_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {2**22 + 1: "1"}  # no pid is that large
    fake = FakeNVML([2**22 + 1, 7], [2**22 + 1], [7])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_holders, "_INITIAL_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    assert wait_for_release(ended, math.inf)
    assert (fake.answers, fake.open) == ([], 0)
    monkeypatch.setattr(gpu_holders, "_INITIAL_PID_NAMESPACE", 0)
    fake.answers = [[2**22 + 1]]
    assert wait_for_release(ended, 0.0), "in a container the numbers are not the same"
    assert fake.answers
