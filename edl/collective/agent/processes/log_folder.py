"""The folder for what workers print and for their errors, where the user names none."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from edl.errors import SettingsError

__all__ = ["kept_log_folder", "temporary_log_folder"]

_LOGS: Final = "edl-logs-"
_KEPT: Final = "edl-output-"
_ABANDONED_S: Final = 3600.0
"""Age of an unlocked folder that is removed: another agent may have made it a moment ago and not locked it yet."""


@contextmanager
def temporary_log_folder() -> Iterator[str]:
    """Make a folder for the files of workers, which is locked while it is in use; remove what killed agents left.

    Yields:
        Its path.

    Raises:
        SettingsError: no folder for temporary files can be written to, as in a container with a read-only root.
    """
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as exc:
        raise SettingsError(
            "no folder for temporary files can be written to, which workers need as well: set TMPDIR, or in a "
            "container with a read-only root mount a folder at /tmp (in Kubernetes an emptyDir)"
        ) from exc
    for path in base.glob(f"{_LOGS}*"):
        # A young folder is not even locked for a look: its agent may be about to lock it, and would find it locked.
        with suppress(OSError):
            if _is_old(path):
                with _locked(path):
                    if _is_old(path):
                        shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_LOGS) as folder, _locked(Path(folder)):
        yield folder


@contextmanager
def kept_log_folder() -> Iterator[str]:
    """Make a folder for the files of workers, which stays, unless nothing came into it.

    Yields:
        Its path.
    """
    folder = tempfile.mkdtemp(prefix=_KEPT)
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            Path(folder).rmdir()


def _is_old(folder: Path) -> bool:
    """Return whether a folder is this user's, and nothing came into it for long."""
    status = folder.stat()
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_S


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    Raises:
        OSError: another process holds it.
    """
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
