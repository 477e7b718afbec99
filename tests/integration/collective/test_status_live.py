"""The ledger of a job that really runs, one worker of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

# Trains for a while, slowly enough to be watched.
SCRIPT = """\
import time, torch
from edl.collective import Checkpointer, State

model = torch.nn.Linear(4, 4)
state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
with Checkpointer(state) as checkpointer:
    for step in range(checkpointer.restore() + 1, 60):
        time.sleep(0.05)
        checkpointer.save(step)
"""


def edl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "edl", *arguments]


def status(url: str) -> dict[str, Any] | None:
    """What `edl status --json` says, None while there is no such job."""
    done = subprocess.run(edl("status", "live", "--json", "--store", url), capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "there is no job" in done.stderr
        return None
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def wait_for_step(url: str, step: int) -> dict[str, Any]:
    deadline = time.monotonic() + 80
    while (told := status(url)) is None or told["step"] < step:
        assert time.monotonic() < deadline, told
    return told


@pytest.mark.slow
def test_a_killed_worker_shows_in_status_and_ledger(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    (tmp_path / "train.py").write_text(SCRIPT)
    command = edl("run", "--nnodes", "1", "--nproc-per-node", "1", "--rdzv-id", "live", "--store", url)
    began_s = time.time()
    agent = subprocess.Popen([*command, str(tmp_path / "train.py")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        told = wait_for_step(url, 5)
        assert (told["state"], told["world_size"], told["nodes"][0]["ranks"]) == ("running", 1, [0])
        (zygote,) = psutil.Process(agent.pid).children()
        (worker,) = zygote.children()
        os.kill(worker.pid, signal.SIGKILL)
        _, errors = agent.communicate(timeout=80)
        assert agent.returncode == 0, errors.decode()
    finally:
        agent.kill()
        agent.communicate()
    ended = status(url)
    assert ended is not None
    assert (ended["state"], ended["step"], ended["generation"]) == ("done", 59, 1)
    assert sum(ended["seconds"].values()) == pytest.approx(ended["elapsed_s"])
    assert ended["elapsed_s"] <= time.time() - began_s
    assert ended["seconds"]["train"] >= 30 * 0.05
    assert ended["seconds"]["load"] > 0
    assert 0 < ended["goodput"] < 1
    assert {"join", "generation", "restart"} <= {event["kind"] for event in ended["events"]}
    assert "SIGKILL" in str(ended["events"])
