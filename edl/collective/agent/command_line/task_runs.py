"""How often `edl run` has come to its job's end in a task of a Slurm step, so that the next run is another job.

A task may be a script that calls `edl run` several times, or a person's notebook. By default all of these would have
the step's name, and the second would find a job of that name which has ended. What does not belong here: names that
users give, which mean the same job wherever they are given.

A job whose last state was not stored is tried again by the next call with the same command; a call with another command
is the next job.

A file in the host's memory counts, named by the task. It is locked while an agent runs: two at once have no order by
which other tasks, or a requeued job, could tell them apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

from edl.collective.agent.command_line.slurm import SlurmStep
from edl.errors import SettingsError

__all__ = ["TaskRuns"]

_FORGOTTEN_S: Final = 14 * 86_400.0
"""A task's file is removed by others when it was not used for this long: few sites let a job run longer."""

_RECORD_NBYTES: Final = 64
"""Of a task's file, the same each time, so that one write replaces all of it: a number, and a digest of 16 digits."""


class TaskRuns:
    """The runs of this task until now, and the next from `__enter__` on.

    Args:
        step: the task's.
        command: a digest of what this run runs.
        folder: where all tasks of this user on this host count; made if it is not there.

    Attributes:
        ended: how many have come to their job's end.

    Raises:
        SettingsError: another process of the task runs `edl run` at this moment, or the folder is not this
            user's alone.
    """

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
        self.ended, unstored = self._read()  # locked before: another run may just have ended
        if not locked:
            os.close(self._file)
            raise SettingsError(
                f"another `edl run` of this task of Slurm's runs {replace(self._step, run=self.ended).name}, and by "
                "default this one would be a node of the same job: give each job a name (--rdzv-id NAME), or "
                "--standalone if it is of this task alone"
            )
        if unstored not in ("", self._command):
            self.ended += 1
            self._write(self.ended)
        return self

    def count(self, *, stored: bool = True) -> None:
        """Count the job of this run, which has ended: the task's next run is another job.

        Args:
            stored: whether its last state is in storage. If not, a next run with the same command is of the same job,
                and stores that state.
        """
        if stored:
            self._write(self.ended + 1)
        else:
            self._write(self.ended, self._command)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _read(self) -> tuple[int, str]:
        """Return how many jobs have ended, and the command of a further job that is not stored yet, "" for none."""
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
    """Lock a file until it is closed; False if another process has. Not by flock, which forked processes would keep."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(folder: Path) -> None:
    """Make `folder` where it is missing; where all may write, another user could have made something else there."""
    remedy = "give each job a name (--rdzv-id NAME), for which nothing is counted there"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be made ({exc.strerror}): remove what is there, or {remedy}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SettingsError(f"{folder} is not this user's alone: remove it, or {remedy}")


def _default_folder() -> Path:
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"edl-slurm-{os.getuid()}"
