"""Elastic students and teachers that come and go, together: each sample's label once an epoch, over the whole job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from edl.testing import LocalTeacher
from edl.testing.models import fingerprint_of
from tests.jobs.collective.job import Job
from tests.jobs.collective.trainers.student_with_teachers import row
from tests.waiting import wait_until

STUDENT = str(Path(__file__).with_name("student_with_teachers.py"))
SAMPLES, EPOCHS, STEPS = 600, 2, 2 * 38


def entries(folder: Path) -> dict[int, list[dict[int, dict]]]:
    """Generation -> for each of its ranks: step -> what it had to train in it, and whether it got to its end."""
    found: dict[int, list[dict[int, dict]]] = {}
    for path in sorted(folder.glob("[0-9]-*.jsonl")):
        steps: dict[int, dict] = {}
        for line in path.read_text().split("\n")[:-1]:
            told = json.loads(line)
            steps.setdefault(told["step"], {}).update(told)
        found.setdefault(int(path.stem.split("-")[0]), []).append(steps)
    return found


def last_step(folder: Path) -> int:
    return max((step for ranks in entries(folder).values() for rank in ranks for step in rank), default=-1)


@pytest.mark.timeout(300)
def test_worker_and_teacher_die_in_one_epoch(tmp_path: Path) -> None:
    """What counts of a step is the last generation in which a rank got to its end: then every rank's share is in it.

    A step that was begun and not finished, or that an earlier generation made and lost, changed nothing that is left.
    """
    discovery = f"sqlite:///{tmp_path}/discovery.sqlite"
    command = [STUDENT, str(tmp_path), discovery, str(SAMPLES), str(EPOCHS), "0.03"]
    teachers = [LocalTeacher("fingerprint", service="teachers", discovery=discovery, wait=False) for _ in range(2)]
    options = ("--nproc-per-node", "2")
    with teachers[0], teachers[1], Job(tmp_path, options, command, environ={"OMP_NUM_THREADS": "1"}) as job:
        for teacher in teachers:
            teacher.wait_ready()
        node = job.start()
        wait_until(lambda: last_step(tmp_path) >= 10, "ten steps")
        teachers[0].kill()
        os.kill(node.workers[0], signal.SIGKILL)
        (tmp_path / "on").touch()
        assert node.wait() == 0, node.output
    found = entries(tmp_path)
    assert set(found) == {0, 1}, node.output
    trained: dict[int, list[dict]] = {}
    for _, ranks in sorted(found.items()):
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
