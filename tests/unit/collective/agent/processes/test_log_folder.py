"""Where workers' output goes when the user names no folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from edl.collective.agent.processes.log_folder import temporary_log_folder
from edl.errors import SettingsError


def test_no_temporary_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only root has none."""

    def gettempdir() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    with pytest.raises(SettingsError, match=r"emptyDir"), temporary_log_folder():
        pass


def test_temporary_log_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_log_folder() as folder:
        assert list(tmp_path.iterdir()) == [Path(folder)]
    assert not list(tmp_path.iterdir())
