"""Several runs of `edl run` in one task of a Slurm step: each has its own job, a requeued task the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edl.collective.agent.slurm import SlurmStep
from edl.collective.agent.task_runs import TaskRuns
from edl.errors import SettingsError

STEP = SlurmStep.of(
    {
        "SLURM_CLUSTER_NAME": "test",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_TASK_PID": "99",
    }
)

HOLDS = """
import sys
from pathlib import Path
from edl.collective.agent.task_runs import TaskRuns
from tests.unit.collective.agent.test_task_runs import STEP
with TaskRuns(STEP, Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def name_of(folder: Path, *, ends: bool, step: SlurmStep | None = STEP) -> str:
    """The name of the next job, which comes to its end or not."""
    assert step is not None
    with TaskRuns(step, folder) as runs:
        if ends:
            runs.count()
        return replace(step, run=runs.ended).name


def test_each_job_of_a_task_has_a_name(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0-2", "it failed, and is tried again"
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0-3"


def test_requeued_task_begins_with_the_first(tmp_path: Path) -> None:
    assert STEP is not None
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True, step=replace(STEP, restarts=1, task_pid=7)) == "slurm-test-17.0"


def test_next_job_has_another_port() -> None:
    assert STEP is not None
    assert len({replace(STEP, run=run).rendezvous_port for run in range(3)}) == 3


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    name_of(tmp_path, ends=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SettingsError, match=r"runs slurm-test-17\.0-2, .*--rdzv-id NAME.*--standalone"):
            name_of(tmp_path, ends=False)
        other.kill()
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"


def test_old_files_are_removed(tmp_path: Path) -> None:
    name_of(tmp_path, ends=True)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    assert STEP is not None
    name_of(tmp_path, ends=True, step=replace(STEP, job=18))
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
