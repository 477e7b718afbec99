"""Members come and go between two steps, however long these take."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.jobs.collective.job import IMPATIENT, ROOT, TRAIN_STATE, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_pause_waits_for_long_steps(tmp_path: Path) -> None:
    """A pause that was asked for is waited for as long as the steps take."""
    command = [str(TRAIN_STATE), str(tmp_path), "1.0", "1000"]
    environ = {"PYTHONPATH": str(ROOT)}
    program = (sys.executable, str(IMPATIENT), "pause=0.5")
    with Job(tmp_path, ("--nnodes", "1:2", "--lease-ttl", "10"), command, environ=environ, program=program) as job:
        nodes = [job.start()]
        job.wait_for_world(1)
        nodes.append(job.start())
        job.wait_for_world(2, after=time.monotonic())
        job.end()
        assert [node.wait() for node in nodes] == [0, 0]
        steps = [one.step for one in job.steps() if one.rank == 0]
        assert steps == list(range(len(steps))), "no step is lost, though they are saved at the pause only"
        assert {one.world for one in job.steps()} == {1, 2}
