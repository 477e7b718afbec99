"""Several runs of `edl run` in one task of a Slurm step: each has its own job, a requeued task the same ones."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from edl.collective.agent.command_line.slurm import SlurmStep
from edl.collective.agent.command_line.task_runs import TaskRuns
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


def name_of(folder: Path, *, ends: bool, step: SlurmStep | None = STEP, command: str = "a", stored: bool = True) -> str:
    """The name of the next job, which comes to its end or not."""
    assert step is not None
    with TaskRuns(step, command, folder) as runs:
        if ends:
            runs.count(stored=stored)
        return replace(step, run=runs.ended).name


def test_requeued_task_begins_with_the_first(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True, step=replace(STEP, restarts=1, task_pid=7)) == "slurm-test-17.0"
    assert len({replace(STEP, run=run).rendezvous_port for run in range(3)}) == 3, "runs do not meet each other"


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    name_of(tmp_path, ends=True)
    assert STEP is not None
    held, hold = os.pipe()
    child = os.fork()
    if child == 0:
        with TaskRuns(STEP, "a", tmp_path):
            os.write(hold, b"x")
            signal.pause()
    try:
        assert os.read(held, 1) == b"x"
        with pytest.raises(SettingsError, match=r"runs slurm-test-17\.0-2, .*--rdzv-id NAME.*--standalone"):
            name_of(tmp_path, ends=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"


def test_old_files_are_removed(tmp_path: Path) -> None:
    name_of(tmp_path, ends=True)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    name_of(tmp_path, ends=True, step=replace(STEP, job=18))
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["file", "dangling link", "link", "writable"])
def test_folder_of_others_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "edl-slurm-1000"
    if kind == "file":
        folder.touch()
    elif kind == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.symlink_to(tmp_path if kind == "link" else tmp_path / "missing", target_is_directory=True)
    with pytest.raises(SettingsError, match=r"edl-slurm-1000 .*remove .*--rdzv-id NAME"):
        name_of(folder, ends=False)


def test_unstored_job_is_tried_again(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0", "the same command"
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0", "it is stored now"
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"


def test_other_command_is_another_job(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=False, command="b") == "slurm-test-17.0-2", "the first one's end is not this one's"
    assert name_of(tmp_path, ends=True, command="b", stored=False) == "slurm-test-17.0-2", "it failed before"
    assert name_of(tmp_path, ends=True, command="c") == "slurm-test-17.0-3"
