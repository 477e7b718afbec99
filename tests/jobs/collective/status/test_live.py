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

from tests.jobs.collective.job import Job

# Trains until it is told that it is enough.
SCRIPT = """\
import itertools, os, pathlib, sys, time, torch
from edl.collective import Checkpointer, State

model = torch.nn.Linear(4, 4)
state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
with Checkpointer(state) as checkpointer:
    for step in itertools.count(checkpointer.restore() + 1):
        time.sleep(0.05)
        new = pathlib.Path(f"{sys.argv[1]}.new")
        new.write_text(str(step))
        new.replace(f"{sys.argv[1]}.{os.environ['EDL_GENERATION']}")  # whole, whenever it is killed
        checkpointer.save(step)
        if pathlib.Path(sys.argv[1]).exists():
            break
"""


# The first step is saved, and none after it.
SAVES_ONCE = SCRIPT.replace("Checkpointer(state)", "Checkpointer(state, interval_steps=10**6)")


def edl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "edl", *arguments]


def status(url: str, job: str = "live") -> dict[str, Any] | None:
    """What `edl status --json` says, None while there is no such job."""
    done = subprocess.run(edl("status", job, "--json", "--store", url), capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "there is no job" in done.stderr
        return None
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def wait_for(url: str, generation: int, step: int, job: str = "live") -> dict[str, Any]:
    """Until the job finished `step` or a later one in `generation`."""
    deadline = time.monotonic() + 120
    while True:
        told = status(url, job)
        # A world is told of before the first node has said something of itself.
        if told is not None and told["nodes"] and told["generation"] >= generation and told["nodes"][0]["step"] >= step:
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_worker_shows_in_status(tmp_path: Path) -> None:
    """A killed worker shows in status and ledger."""
    url, enough = f"sqlite:///{tmp_path}/discovery.sqlite", tmp_path / "enough"
    (tmp_path / "train.py").write_text(SCRIPT)
    command = edl("run", "--nnodes", "1", "--nproc-per-node", "1", "--rdzv-id", "live", "--store", url)
    command += [str(tmp_path / "train.py"), str(enough)]
    began_s = time.time()
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        told = wait_for(url, generation=0, step=20)
        assert (told["state"], told["world_size"], told["nodes"][0]["ranks"]) == ("running", 1, [0])
        (zygote,) = psutil.Process(agent.pid).children()
        (worker,) = zygote.children()
        os.kill(worker.pid, signal.SIGKILL)
        psutil.wait_procs([worker], 20)
        last = int((tmp_path / "enough.0").read_text())  # further than what `edl status` had seen
        again = wait_for(url, generation=1, step=last + 20)
        enough.touch()
        _, errors = agent.communicate(timeout=80)
        assert agent.returncode == 0, errors.decode()
    finally:
        agent.kill()
        agent.communicate()
    ended = status(url)
    assert ended is not None
    assert (ended["state"], ended["generation"]) == ("done", 1)
    assert ended["step"] >= again["step"]
    assert sum(ended["seconds"].values()) == pytest.approx(ended["elapsed_s"])
    assert ended["elapsed_s"] <= time.time() - began_s
    assert ended["seconds"]["train"] >= 30 * 0.05
    assert ended["seconds"]["load"] > 0
    assert 0 < ended["goodput"] < 1
    assert {"join", "generation", "restart"} <= {event["kind"] for event in ended["events"]}
    assert "SIGKILL" in str(ended["events"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_finished_steps_are_rollback_later(tmp_path: Path) -> None:
    """With the agent its status pages are gone: what was finished before is known by the store."""
    (tmp_path / "train.py").write_text(SAVES_ONCE)
    enough = tmp_path / "enough"
    with Job(tmp_path / "job", options=("--nnodes", "1:1"), command=[str(tmp_path / "train.py"), str(enough)]) as job:
        lost = job.start()
        finished = wait_for(job.url, 0, 60, job.name)["nodes"][0]["step"]
        lost.signal_all(signal.SIGKILL)
        lost.process.wait()
        again = job.start()
        wait_for(job.url, 1, finished + 20, job.name)
        enough.touch()
        assert again.wait() == 0
        seconds = (status(job.url, job.name) or {})["seconds"]
    assert seconds["rollback"] >= 0.9 * finished * 0.05
    assert seconds["train"] >= (finished + 20) * 0.05
