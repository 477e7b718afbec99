"""What Slurm says of the step that `srun edl run` is a task of, and the defaults that follow from it.

Srun's manual page describes the variables ("OUTPUT ENVIRONMENT VARIABLES"). A task is a node in EDL's words: an agent
with its workers. What does not belong here: what the agent does with signals that Slurm sends (`signals`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from edl.errors import SettingsError

__all__ = ["SlurmStep"]

_SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm's step ids from here on are no steps of srun's: the batch script, an interactive shell, a container."""


@dataclass(frozen=True)
class SlurmStep:
    """A task of a step of a Slurm job.

    Attributes:
        cluster: Slurm's name of the cluster, empty if it is not set.
        job: id of the job; it stays when the job is requeued.
        step: id of the step in the job, which counts anew after a requeue.
        restarts: how often the job was requeued or restarted.
        tasks: how many tasks the step has on all hosts.
        rank: which of them this task is, from 0 on.
        task_pid: the process that Slurm started for this task, 0 if it is not set.
        tasks_here: how many of them are on this host.
        hosts: how many hosts the step has.
        host: which of them this task is on, from 0 on.
        host_name: Slurm's name of that host, as in `host_list`; empty if it is not set.
        host_list: their names in Slurm's notation, such as `gpu[003-004,7],login1`.
        cpus: how many CPUs belong to this task.
        gpus: how many GPUs of this host the step may use, 0 if Slurm gave it none.
        visible_gpus: how many of them this task may use; None if no variable limits that.
        run: how many jobs of `edl run` have ended in this task before (`TaskRuns`).
    """

    cluster: str
    job: int
    step: int
    restarts: int
    tasks: int
    rank: int
    task_pid: int
    tasks_here: int
    hosts: int
    host: int
    host_name: str
    host_list: str
    cpus: int
    gpus: int
    visible_gpus: int | None
    run: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> SlurmStep | None:
        """Read the environment of a task.

        Args:
            environ: None for this process's.

        Returns:
            None outside of a step, and in a shell that `srun --pty` opened: a person's commands there are no tasks of
            one job.

        Raises:
            SettingsError: a variable of Slurm's has a value that Slurm does not give it.
        """
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
        """The name of EDL's job (`--rdzv-id`): the same for all tasks of the step, and after a requeue.

        In a script that calls `edl run` several times the first job is `slurm-CLUSTER-JOB.STEP`, the second
        `slurm-CLUSTER-JOB.STEP-2`, and so on.
        """
        run = f"-{self.run + 1}" if self.run else ""
        return "-".join(filter(None, ("slurm", self.cluster.replace("/", "_"), f"{self.job}.{self.step}{run}")))

    @property
    def first_host(self) -> str:
        """The name of the host that Slurm counts as the first; empty if there is no list of hosts."""
        depth, name = 0, ""
        for letter in self.host_list:
            depth += (letter == "[") - (letter == "]")
            if letter == "," and depth == 0:
                break
            name += letter
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)

    @property
    def is_first_host(self) -> bool:
        """Whether this task is on `first_host`.

        The list of hosts is sorted by name, and numbers need not be: in a heterogeneous step (`srun A : B`), host 0 is
        the first of A.
        """
        return self.host_name == self.first_host if self.host_name else self.host == 0

    @property
    def rendezvous_port(self) -> int:
        """The port at the first host where the step's tasks meet: other jobs and steps there have others, mostly.

        From torchrun's 29400 on, and below those that the system gives to outgoing connections (32768). A task's next
        run has another port, since a slower task may still serve the store of the run before: 1000 further, where jobs
        that Slurm runs at the same time do not meet it by their own numbers.
        """
        return 29400 + (self.job + self.step + 1000 * self.run) % 3000

    @property
    def workers(self) -> int:
        """How many workers this task runs by default: as many as it has GPUs, and 1 if it has none.

        Raises:
            SettingsError: tasks on this host share GPUs; workers of different tasks would use the same ones.
        """
        visible = self.gpus if self.visible_gpus is None else self.visible_gpus
        if self.tasks_here > 1 and self.gpus and visible * self.tasks_here > self.gpus:
            raise SettingsError(
                f"{self.tasks_here} tasks of Slurm's step {self.job}.{self.step} share the {self.gpus} GPU(s) of this "
                "host: start one task on each host (srun --ntasks-per-node=1), or give each its own GPUs "
                "(--gpus-per-task=N); --nproc-per-node N overrides this"
            )
        return max(1, visible)

    def describe(self) -> str:
        """Return in words which step this is."""
        tasks = f"{self.tasks} task" + "s" * (self.tasks != 1)
        hosts = f"{self.hosts} host" + "s" * (self.hosts != 1)
        again = f", requeued {self.restarts} time" + "s" * (self.restarts != 1) if self.restarts else ""
        return f"Slurm job {self.job}{again}, step {self.step} of {tasks} on {hosts}"


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise SettingsError(f"environment variable {name}={text!r}: Slurm sets a whole number there")
    return int(text)


def _tasks_on(environ: Mapping[str, str], host: int) -> int:
    """Return how many tasks are on a host: `2(x3),1` stands for three hosts with two tasks, and a fourth with 1."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise SettingsError(f"environment variable SLURM_STEP_TASKS_PER_NODE={text!r}: wanted is 2(x3),1 or alike")
        host -= int(found[2] or 1)
        if host < 0:
            return int(found[1])
    return 1


def _visible_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many devices Slurm lets this task see; the variable depends on the GPU's vendor."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            return sum(1 for device in environ[name].split(",") if device.strip() not in ("", "NoDevFiles", "-1"))
    return None
