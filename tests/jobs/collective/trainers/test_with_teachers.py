"""Elastic students and teachers that come and go, together: each sample's label once an epoch, over the whole job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edl.collective.job_records import World
from edl.discovery import open_store
from edl.testing import LocalTeacher
from edl.testing.models import fingerprint_of
from tests.jobs.collective.trainers.student_with_teachers import row

STUDENT = Path(__file__).with_name("student_with_teachers.py")
SAMPLES, EPOCHS, STEPS = 600, 2, 2 * 38
DEADLINE_S = 100.0


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


def entries(folder: Path) -> dict[int, list[dict[int, dict]]]:
    """Generation -> for each of its ranks: step -> what it had to train in it, and whether it got to its end."""
    found: dict[int, list[dict[int, dict]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        steps: dict[int, dict] = {}
        for line in lines:
            steps.setdefault(line["step"], {}).update(line)
        found.setdefault(int(path.stem.split("-")[0]), []).append(steps)
    return found


def last_step(folder: Path) -> int:
    return max((step for ranks in entries(folder).values() for rank in ranks for step in rank), default=-1)


def pids_of_workers(agent: int) -> list[int]:
    zygote = int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])
    return [int(pid) for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_and_teacher_die_in_one_epoch(tmp_path: Path) -> None:
    """A worker and a teacher die in the same epoch."""
    discovery = f"sqlite:///{tmp_path}/discovery.sqlite"
    command = [sys.executable, "-m", "edl", "run", "--nproc-per-node", "2", "--rdzv-id", "with-teachers"]
    command += ["--store", discovery, str(STUDENT), str(tmp_path), discovery, str(SAMPLES), str(EPOCHS), "0.03"]
    teachers = [LocalTeacher("fingerprint", service="teachers", discovery=discovery, wait=False) for _ in range(2)]
    with teachers[0], teachers[1], (tmp_path / "log").open("w+") as log:
        for teacher in teachers:
            teacher.wait_ready()
        job = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            wait_for("ten steps", lambda: last_step(tmp_path) >= 10)
            teachers[0].kill()
            os.kill(pids_of_workers(job.pid)[0], signal.SIGKILL)
            (tmp_path / "on").touch()
            wait_for("five more", lambda: last_step(tmp_path) >= 20)
            assert job.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()
        finally:
            job.kill()
            job.wait()
    with open_store(discovery) as store:
        entry = store.get("jobs/with-teachers/world")
        assert entry is not None
        assert World.decode(entry.value).generation == 1, (tmp_path / "log").read_text()
    assert_each_sample_once(tmp_path)


def assert_each_sample_once(folder: Path) -> None:
    """What counts of a step is the last generation in which a rank got to its end: then every rank's share is in it.

    A step that was begun and not finished, or that an earlier generation made and lost, changed nothing that is left.
    """
    trained: dict[int, list[dict]] = {}
    for _, ranks in sorted(entries(folder).items()):
        for step in sorted({step for rank in ranks for step in rank}):
            shares = [rank[step] for rank in ranks if step in rank]
            if any("done" in share for share in shares):
                trained[step] = shares
    assert sorted(trained) == list(range(STEPS))
    assert all(len(shares) == 2 for shares in trained.values())
    for epoch in range(EPOCHS):
        shares = [share for shares in trained.values() for share in shares if share["epoch"] == epoch]
        ids = [each for share in shares for each in share["ids"]]
        assert sorted(ids) == list(range(SAMPLES))
        rows = np.stack([row(each).numpy() for each in ids])
        labels = np.array([label for share in shares for label in share["labels"]], np.float32)
        assert np.array_equal(labels, fingerprint_of(rows))
