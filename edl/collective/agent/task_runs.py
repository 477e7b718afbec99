"""How often `edl run` has come to its job's end in one task of a Slurm step, so that the next one is another job.

A task may be a script that calls `edl run` several times, or a person's notebook. By default all of these would have
the step's name, and the second would find a job of that name which has ended. What does not belong here: names that
users give, which mean one job wherever they are given.

A file in the host's memory counts, named by the task. It is locked while an agent runs: two at once have no order by
which other tasks, or a requeued job, could tell them apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

from edl.collective.agent.slurm import SlurmStep
from edl.errors import SettingsError

__all__ = ["TaskRuns"]

_FORGOTTEN_S: Final = 14 * 86_400.0
"""A task's file is removed by others when it was not used for this long: few sites let a job run longer."""


class TaskRuns:
    """The runs of this task until now; the next one from `__enter__` on.

    Args:
        step: the task's.
        folder: where all tasks of this user on this host count; made if it is not there.

    Attributes:
        ended: how many have come to their job's end.

    Raises:
        SettingsError: another process of the task runs `edl run` at this moment.
    """

    def __init__(self, step: SlurmStep, folder: Path | None = None) -> None:
        self._folder = _default_folder() if folder is None else folder
        self._path = self._folder / f"{step.job}.{step.step}.{step.restarts}.{step.rank}-{step.task_pid}"
        self._step = step
        self._file = -1
        self.ended = 0

    def __enter__(self) -> TaskRuns:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
            raise SettingsError(f"{self._folder} belongs to another user, or is a link: remove it")
        self._remove_forgotten()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.ended = int(os.pread(self._file, 20, 0) or b"0")
        if not _lock(self._file):
            os.close(self._file)
            raise SettingsError(
                f"another `edl run` of this task of Slurm's runs {replace(self._step, run=self.ended).name}, and by "
                "default this one would be a node of the same job: give each job a name (--rdzv-id NAME), or "
                "--standalone if it is of this task alone"
            )
        return self

    def count(self) -> None:
        """The job of this run has ended: the task's next run is another job."""
        os.pwrite(self._file, str(self.ended + 1).encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _remove_forgotten(self) -> None:
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    with path.open("r+") as file:
                        if _lock(file.fileno()):
                            path.unlink()


def _lock(file: int) -> bool:
    """Lock a file until it is closed; False if another process has. Not by flock, which forked processes would keep."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _default_folder() -> Path:
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"edl-slurm-{os.getuid()}"
