"""tools/vllm.sh: what it removes, and what it leaves as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[3] / "tools/vllm.sh"
_INSTALL = """#!/usr/bin/env bash
set -e
mkdir -p "$1/bin" "$1/lib"
printf '#!/bin/sh\nfor last; do :; done\n[ "$1" = -m ] || mkdir "$last"\n' > "$1/bin/python"
chmod +x "$1/bin/python"
touch "$1/installed"
"""


class Installation:
    """The script in a repository with a source whose installation takes nothing.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / "shared/vllm"
        self.home = folder / "home"
        self._script = folder / "repository/tools/vllm.sh"
        self._programs = folder / "programs"
        for made in (self.source, self._script.parent, self._programs):
            made.mkdir(parents=True)
        shutil.copy(_SCRIPT, self._script)
        (self.source / "install").write_text(_INSTALL)
        (self.source / "install").chmod(0o755)
        df = self._programs / "df"
        df.write_text("#!/bin/sh\necho Filesystem 1024-blocks Used Available\necho disk 1 1 100000000 1% /\n")
        df.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        env = {**os.environ, "EDL_VLLM_HOME": str(self.home), "PATH": f"{self._programs}:{os.environ['PATH']}"}
        return subprocess.run(["bash", self._script], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.mark.parametrize("file", ["pyvenv.cfg", "installed", "notes.txt"])
def test_foreign_folders_are_left(installation: Installation, file: str) -> None:
    installation.home.mkdir()
    (installation.home / file).write_text("mine")
    (installation.home / "my-work.txt").write_text("mine")
    for _ in range(2):
        ended = installation.run()
        assert (ended.returncode, "another folder" in ended.stderr) == (1, True), ended.stderr
        assert sorted(path.name for path in installation.home.iterdir()) == sorted([file, "my-work.txt"])


def test_a_killed_installation_begins_again(installation: Installation) -> None:
    (installation.home / "lib").mkdir(parents=True)
    (installation.home / ".begun-by-edl").write_text("")
    (installation.home / "lib/half").write_text("")
    ended = installation.run()
    assert ended.returncode == 0, ended.stderr
    assert not (installation.home / "lib/half").exists()
    assert (installation.home / "complete").exists()
    assert (installation.home / "tiny").is_dir()
    assert not (installation.home / ".begun-by-edl").exists(), "what is in the folder later is its user's"
    assert "is there" in installation.run().stdout
