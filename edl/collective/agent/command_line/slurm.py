"""Reads what Slurm says about a step whose tasks run `edl run` (each task is a node for EDL), and derives defaults.

A task may be a script that calls `edl run` several times. If the job's default name were only the step's name, the
second call would find a job that has ended. So calls that end their job are counted in a file in the host's memory, and
the count becomes part of the default name. The file is locked while an agent runs, because other tasks could not tell
two simultaneous agents apart. If a job's last state was not stored, the next call with the same command retries that
job. A call with another command begins the next job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from edl.errors import SettingsError

_SPECIAL_STEPS = 0xFFFFFFF0  # step ids from here on are not srun's: the batch script, an interactive shell, a container


@dataclass(frozen=True)
class SlurmStep:
    """A task of a step of a Slurm job."""

    cluster: str  # slurm's name of the cluster; empty if it is not set
    job: int  # id of the job, which stays the same when the job is requeued
    step: int  # id of the step in the job, which starts again after a requeue
    restarts: int  # how often the job was requeued or restarted
    tasks: int  # number of tasks of the step, on all hosts
    rank: int  # number of this task among them, from 0
    task_pid: int  # process that Slurm started for this task; 0 if it is not set
    tasks_here: int  # number of the step's tasks on this host
    hosts: int  # number of hosts of the step
    host: int  # number of this task's host among them, from 0
    host_name: str  # slurm's name of that host, as in `host_list`; empty if it is not set
    host_list: str  # names of the hosts in Slurm's notation, such as `gpu[003-004,7],login1`
    cpus: int  # number of CPUs of this task
    gpus: int  # number of this host's GPUs that the step may use; 0 if Slurm gave it none
    visible_gpus: int | None  # number of those that this task may use; None if no variable limits that
    run: int = 0  # number of jobs of `edl run` that have ended in this task before (`TaskRuns`)

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> SlurmStep | None:
        """Read a task's environment. Returns None outside of a step, and in a shell that `srun --pty` opened."""
        environ = os.environ if environ is None else environ
        if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
            return None
        step, tasks = _number(environ, "SLURM_STEP_ID"), _number(environ, "SLURM_STEP_NUM_TASKS", 1)
        if step >= _SPECIAL_STEPS or (tasks == 1 and "SLURM_PTY_PORT" in environ):
            return None
        host_list = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
        tasks_here = _tasks_on(environ, _number(environ, "SLURM_NODEID"))
        cpus_shared = _number(environ, "SLURM_CPUS_ON_NODE", 1) // max(1, tasks_here)
        return cls(
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job=_number(environ, "SLURM_JOB_ID"),
            step=step,
            restarts=_number(environ, "SLURM_RESTART_COUNT"),
            tasks=tasks,
            rank=_number(environ, "SLURM_PROCID"),
            task_pid=_number(environ, "SLURM_TASK_PID"),
            tasks_here=tasks_here,
            hosts=_number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1)),
            host=_number(environ, "SLURM_NODEID"),
            host_name=environ.get("SLURMD_NODENAME", ""),
            host_list=host_list,
            cpus=max(1, _number(environ, "SLURM_CPUS_PER_TASK", cpus_shared)),
            gpus=_number(environ, "SLURM_GPUS_ON_NODE"),
            visible_gpus=_visible_gpus(environ),
        )

    @property
    def name(self) -> str:
        """The name of EDL's job (`--rdzv-id`): the same for all tasks of the step, and after a requeue."""
        run = f"-{self.run + 1}" if self.run else ""
        return "-".join(filter(None, ("slurm", self.cluster.replace("/", "_"), f"{self.job}.{self.step}{run}")))

    @property
    def first_host(self) -> str:
        depth, name = 0, ""
        for letter in self.host_list:
            depth += (letter == "[") - (letter == "]")
            if letter == "," and depth == 0:
                break
            name += letter
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)

    @property
    def is_first_host(self) -> bool:
        """Whether the task is on `first_host` (first by name), which in `srun A : B` need not be host 0 (A's first)."""
        return self.host_name == self.first_host if self.host_name else self.host == 0

    @property
    def rendezvous_port(self) -> int:
        """The port where tasks meet. Each run has a different port: a slow task may still serve the previous run."""
        return 29400 + (self.job + self.step + 1000 * self.run) % 3000  # below ports of outgoing connections (32768)

    @property
    def workers(self) -> int:
        visible = self.gpus if self.visible_gpus is None else self.visible_gpus
        if self.tasks_here > 1 and self.gpus and visible * self.tasks_here > self.gpus:
            raise SettingsError(
                f"{self.tasks_here} tasks of Slurm's step {self.job}.{self.step} share the {self.gpus} GPU(s) of this "
                "host: start one task on each host (srun --ntasks-per-node=1), or give each its own GPUs "
                "(--gpus-per-task=N); --nproc-per-node N overrides this"
            )
        return max(1, visible)

    def describe(self) -> str:
        tasks = f"{self.tasks} task" + "s" * (self.tasks != 1)
        hosts = f"{self.hosts} host" + "s" * (self.hosts != 1)
        again = f", requeued {self.restarts} time" + "s" * (self.restarts != 1) if self.restarts else ""
        return f"Slurm job {self.job}{again}, step {self.step} of {tasks} on {hosts}"


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise SettingsError(f"environment variable {name}={text!r}: expected a whole number, as Slurm sets it")
    return int(text)


def _tasks_on(environ: Mapping[str, str], host: int) -> int:
    """Return how many tasks are on a host. `2(x3),1` means two tasks on each of three hosts, and one on a fourth."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise SettingsError(
                f"environment variable SLURM_STEP_TASKS_PER_NODE={text!r}: expected something like 2(x3),1"
            )
        host -= int(found[2] or 1)
        if host < 0:
            return int(found[1])
    return 1


def _visible_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many devices Slurm lets this task see. Which variable says so depends on the GPU's vendor."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            return sum(1 for device in environ[name].split(",") if device.strip() not in ("", "NoDevFiles", "-1"))
    return None


# --- Counting a task's runs, so that the next run is another job ---


_FORGOTTEN_S: Final = 14 * 86_400.0  # without use, until other tasks remove a file; few sites let a job run longer

_RECORD_NBYTES: Final = 64  # of a task's file: a number, and a digest of 16 digits; one write replaces all of it


class TaskRuns:
    """The earlier runs of this task and, after `__enter__`, the current run. `command` is the current run's digest."""

    def __init__(self, step: SlurmStep, command: str, folder: Path | None = None) -> None:
        self._folder = _default_folder() if folder is None else folder
        self._path = self._folder / f"{step.job}.{step.step}.{step.restarts}.{step.rank}-{step.task_pid}"
        self._step = step
        self._command = command
        self._file = -1
        self.ended = 0

    def __enter__(self) -> TaskRuns:
        _make_private(self._folder)
        self._remove_forgotten()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        locked = _lock(self._file)
        self.ended, unstored = self._read()  # locked before this, since another run may just have ended
        if not locked:
            os.close(self._file)
            raise SettingsError(
                f"another `edl run` in this Slurm task is running {replace(self._step, run=self.ended).name}, and by "
                "default this one would be a node of the same job: give each job a name (--rdzv-id NAME), or use "
                "--standalone if the job belongs to this task alone"
            )
        if unstored not in ("", self._command):
            self.ended += 1
            self._write(self.ended)
        return self

    def count(self, *, stored: bool = True) -> None:
        """Count this run's job as ended. Unless its state is `stored`, the next run with this command retries it."""
        if stored:
            self._write(self.ended + 1)
        else:
            self._write(self.ended, self._command)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _read(self) -> tuple[int, str]:
        """Return how many jobs have ended, and the command of a job whose state is not stored yet, or ""."""
        ended, _, unstored = os.pread(self._file, _RECORD_NBYTES, 0).decode().strip().partition(" ")
        return int(ended or 0), unstored

    def _write(self, ended: int, unstored: str = "") -> None:
        os.pwrite(self._file, f"{ended} {unstored}".ljust(_RECORD_NBYTES).encode(), 0)

    def _remove_forgotten(self) -> None:
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    with path.open("r+") as file:
                        if _lock(file.fileno()):
                            path.unlink()


def _lock(file: int) -> bool:
    """Lock a file until it is closed. Returns False if another process holds the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not `flock`, whose lock forked children would hold too
    except BlockingIOError:
        return False
    return True


def _make_private(folder: Path) -> None:
    """Create `folder` if it is missing, and refuse a folder that another user could have put there."""
    remedy = "give each job a name (--rdzv-id NAME), which does not need that folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be created ({exc.strerror}): remove what is there, or {remedy}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SettingsError(f"{folder} does not belong to this user alone: remove it, or {remedy}")


def _default_folder() -> Path:
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"edl-slurm-{os.getuid()}"
