"""What `edl run` makes of a Slurm step's environment, as srun of Slurm 22.05 sets it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from edl.collective.agent.command_line.options import parse_options
from edl.collective.agent.command_line.slurm import SlurmStep
from edl.collective.agent.command_line.task_runs import TaskRuns
from edl.collective.agent.signals import StopSignals
from edl.errors import SettingsError

# Of task 3 of `srun --nodes=3 --ntasks=5` on hosts with two tasks, two tasks and one.
TASK = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[003-004,7],login1",
    "SLURM_CPUS_ON_NODE": "8",
}


def step_of(**changes: str) -> SlurmStep:
    step = SlurmStep.of({**TASK, **changes})
    assert step is not None
    return step


def test_a_task_of_a_step() -> None:
    step = step_of(SLURM_RESTART_COUNT="2")
    assert (step.name, step.tasks, step.rank, step.tasks_here, step.hosts) == ("slurm-test-17.1", 5, 3, 2, 3)
    assert (step.cpus, step.workers, step.restarts) == (4, 1, 2)
    assert step.describe() == "Slurm job 17, requeued 2 times, step 1 of 5 tasks on 3 hosts"
    assert step_of(SLURM_NODEID="2").tasks_here == 1
    assert step_of(SLURM_CPUS_PER_TASK="3").cpus == 3


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NNODES": "2"},  # the batch script itself
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # the interactive step of salloc
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "4000"},  # srun --pty bash
    ],
)
def test_no_step(environ: dict[str, str]) -> None:
    assert SlurmStep.of(environ) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[003-004,7],login1", "gpu003"),
        ("login1,gpu[003-004]", "login1"),
        ("rack[1-2]node[08,10]-ib", "rack1node08-ib"),
        ("", ""),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert step_of(SLURM_STEP_NODELIST=hosts).first_host == first


def test_heterogeneous_hosts_are_unordered() -> None:
    """As `srun -w gpu7 : -w gpu3` sets it: host 0 is gpu7, and the list begins with gpu3."""
    hosts = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[3,7]"}
    first = step_of(SLURM_NODEID="1", SLURMD_NODENAME="gpu3", **hosts)
    second = step_of(SLURM_NODEID="0", SLURMD_NODENAME="gpu7", **hosts)
    found = [parse_options(["train.py"], step) for step in (first, second)]
    assert {options.rdzv_endpoint for options in found} == {"gpu3:29418"}
    assert [options.rdzv_conf for options in found] == ["is_host=1", "is_host=0"]


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"SLURM_NODEID": "2", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_NODEID": "2", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 1),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": ""}, 1),
    ],
)
def test_workers(changes: dict[str, str], workers: int) -> None:
    assert step_of(**changes).workers == workers


def test_tasks_that_share_gpus() -> None:
    step = step_of(SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(SettingsError, match=r"2 tasks .* share the 2 GPU.*--gpus-per-task"):
        parse_options(["train.py"], step)
    assert parse_options(["--nproc-per-node", "1", "train.py"], step).nproc_per_node == "1"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), ("5", "1", "slurm-test-17.1")),
        (("--nnodes=1:5",), ("1:5", "1", "slurm-test-17.1")),
        (("--nproc-per-node", "cpu", "--rdzv-id", "mine"), ("5", "4", "mine")),
        (("--standalone",), ("1:1", "1", "none")),
    ],
)
def test_options_that_follow(argv: tuple[str, ...], found: tuple[str, str, str]) -> None:
    options = parse_options([*argv, "train.py", "--nnodes", "9"], step_of())
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == found


def test_repeated_sigterm_does_not_hurry() -> None:
    with StopSignals(lambda: None, slurm=True) as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.stopping
        assert not signals.urgent
        assert signals.number == signal.SIGUSR1
        assert signals.exit_code == 143
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.urgent, "a person at srun"


def meeting_of(*argv: str, **changes: str) -> tuple[str, str]:
    options = parse_options([*argv, "train.py"], step_of(**changes))
    return options.rdzv_endpoint, options.rdzv_conf


def test_several_hosts_meet_at_the_first() -> None:
    assert meeting_of() == ("gpu003:29418", "is_host=0")
    assert meeting_of("--rdzv-conf", "join_timeout=9", SLURM_NODEID="0") == ("gpu003:29418", "join_timeout=9,is_host=1")
    assert meeting_of(SLURM_STEP_NUM_NODES="1") == ("", ""), "a file will do"


def test_a_store_that_is_named_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (("--store", "consul://a"), ("--standalone",), ("--master-addr", "a"), ("--rdzv-endpoint", "a")):
        assert meeting_of(*argv)[0] == ("a" if argv[0] == "--rdzv-endpoint" else "")
    monkeypatch.setenv("EDL_DISCOVERY", "consul://a")
    assert meeting_of()[0] == ""


STEP = step_of(SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_TASK_PID="99")


def name_of(folder: Path, *, ends: bool, step: SlurmStep = STEP, command: str = "a", stored: bool = True) -> str:
    """The name of the next job, which comes to its end or not."""
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
