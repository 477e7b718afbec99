"""The elastic example, as its README says: start it, add a node, kill the first, and watch accuracy go on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.test_examples import EXAMPLES, commands

DEADLINE_S = 90.0
EPOCHS = 100_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_elastic(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the example needs PyTorch")
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    folder = tmp_path / "elastic"
    shutil.copytree(EXAMPLES / "elastic", folder, ignore=shutil.ignore_patterns("__pycache__"))
    # More epochs than anybody waits for, lest the job ends before the second node is there, which imports torch first.
    command = [sys.executable, "-m", *commands(folder / "README.md")[0][:-1], str(EPOCHS)]
    environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{tmp_path}/store.sqlite", "OMP_NUM_THREADS": "1"}

    def start(log: Path) -> subprocess.Popen[bytes]:
        with log.open("w") as file:
            return subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file)

    first, second = tmp_path / "first", tmp_path / "second"
    nodes = [start(first)]
    try:
        wait_for(lambda: "epoch 0" in first.read_text(), first)
        nodes.append(start(second))
        wait_for(lambda: "by 2 workers" in first.read_text(), first)
        nodes[0].kill()
        wait_for(lambda: len(re.findall(r"epoch \d+: .* by one", second.read_text())) >= 15, second)
        nodes[1].terminate()
        assert nodes[1].wait(DEADLINE_S) == 143, second.read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    epochs = re.findall(r"epoch (\d+): ([\d.]+)% right, [\d,]+ images in [\d.]+ s by (\w+)", first.read_text())
    later = re.findall(r"epoch (\d+): ([\d.]+)% right, [\d,]+ images in [\d.]+ s by (\w+)", second.read_text())
    told = [int(epoch) for epoch, _, _ in epochs + later]  # those whose ends were not saved yet are told twice
    assert sorted(set(told)) == list(range(max(told) + 1)), first.read_text() + second.read_text()
    assert len(told) <= len(set(told)) + 4
    assert later[-1][2] == "one"
    assert float(later[-1][1]) > 90


def wait_for(holds: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
