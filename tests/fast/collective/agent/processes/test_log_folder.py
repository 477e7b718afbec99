"""Where workers' output goes when the user names no folder."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from edl.collective.agent.processes import log_folder
from edl.collective.agent.processes.log_folder import temporary_log_folder
from edl.errors import SettingsError


def test_no_temporary_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only root has none."""

    def gettempdir() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    with pytest.raises(SettingsError, match=r"emptyDir"), temporary_log_folder():
        pass


def test_young_folder_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent may have made it, be about to lock it, and end if it cannot."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    young, old = (Path(tempfile.mkdtemp(prefix="edl-logs-")) for _ in range(2))
    hours_ago = old.stat().st_mtime - 3 * 3600
    os.utime(old, (hours_ago, hours_ago))
    locked: list[Path] = []
    lock = fcntl.flock

    def flock(file: int, how: int) -> None:
        locked.append(Path(f"/proc/self/fd/{file}").readlink())
        lock(file, how)

    monkeypatch.setattr(log_folder.fcntl, "flock", flock)
    with temporary_log_folder() as own:
        assert locked == [old, Path(own)]
    assert list(tmp_path.iterdir()) == [young]
