"""Waiting for processes that hold a GPU. There is no GPU here: a file stands for its device, a module for NVML."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.agent.processes import gpu_holders
from edl.collective.agent.processes.gpu_holders import find_holders, wait_for_release


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, in a group of its own, that has a file open."""
    with (tmp_path / "nvidia3").open("w") as device:
        sleeping = subprocess.Popen(["sleep", "1000"], pass_fds=[device.fileno()], start_new_session=True)
    yield sleeping
    sleeping.kill()
    sleeping.wait()


def test_holders_are_found_by_open_device(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Holders are found by their open device."""
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
