"""Workers on a GPU that are killed come back with their memory free and the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).with_name("train.py")
KILLS = 20
PAUSE_STEPS = 30


@contextlib.contextmanager
def job(folder: Path, *arguments: str, workers: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """Run `edl run` with `train.py` on one node, its output in `folder`/log."""
    command = [sys.executable, "-m", "edl", "run", "--nproc-per-node", str(workers), "--rdzv-id", "gpu"]
    command += ["--store", f"sqlite:///{folder}/store.sqlite", str(TRAIN), str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps logged so far, without a line whose worker is still writing it or was killed in the middle."""
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(process: subprocess.Popen[bytes], folder: Path, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Wait for a step of the job as its last one; fails with the job's output."""

    def found() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return any(map(reached, steps(folder)[-1:]))

    try:
        wait_until(found, deadline_s=60)
    except TimeoutError as exc:
        raise AssertionError((folder / "log").read_text()) from exc


def weights(folder: Path) -> list[torch.Tensor]:
    loaded: list[torch.Tensor] = torch.load(folder / "weights.pt")
    return loaded


def run_undisturbed(folder: Path, *arguments: str, workers: int = 1) -> list[torch.Tensor]:
    folder.mkdir()
    with job(folder, *arguments, workers=workers) as process:
        assert process.wait(150) == 0, (folder / "log").read_text()
    return weights(folder)


@pytest.mark.timeout(300)
def test_killed_workers_come_back(device: torch.device, tmp_path: Path) -> None:
    """A worker that holds 60% of the GPU's memory is killed 20 times: never out of memory, the same bits at the end.

    Prints the seconds from each kill to the next finished step.
    """
    kills = KILLS if device.type == "cuda" else 2
    arguments = ["--steps", str(PAUSE_STEPS * (kills + 1)), "--device", device.type, "--memory", "0.6"]
    expected = run_undisturbed(tmp_path / "undisturbed", *arguments)
    folder = tmp_path / "killed"
    folder.mkdir()
    recoveries = []
    with job(folder, *arguments, "--pause-every", str(PAUSE_STEPS)) as process:
        for number in range(kills):
            wait_for(process, folder, lambda last, number=number: last["step"] >= PAUSE_STEPS * number + 5)
            last = steps(folder)[-1]
            os.kill(last["pid"], signal.SIGKILL)
            (folder / f"go{number + 1}").touch()
            wait_for(process, folder, lambda new, last=last: new["pid"] != last["pid"])
            first = next(step for step in steps(folder) if step["pid"] == steps(folder)[-1]["pid"])
            recoveries.append(first["time"] - last["time"])
        assert process.wait(150) == 0, (folder / "log").read_text()
    log = (folder / "log").read_text()
    assert "out of memory" not in log
    assert all(torch.equal(found, wanted) for found, wanted in zip(weights(folder), expected, strict=True))
    ordered = sorted(recoveries)
    print(f"{device}: {kills} kills, p50 {statistics.median(ordered):.2f} s, longest {ordered[-1]:.2f} s")


def test_two_workers_share_the_gpu(device: torch.device, tmp_path: Path) -> None:
    arguments = ["--steps", "40", "--device", device.type]
    expected = run_undisturbed(tmp_path / "undisturbed", *arguments, workers=2)
    folder = tmp_path / "killed"
    folder.mkdir()
    with job(folder, *arguments, workers=2) as process:
        wait_for(process, folder, lambda last: last["step"] >= 5)
        os.kill(steps(folder)[-1]["pid"], signal.SIGKILL)
        assert process.wait(150) == 0, (folder / "log").read_text()
    assert all(torch.equal(found, wanted) for found, wanted in zip(weights(folder), expected, strict=True))
