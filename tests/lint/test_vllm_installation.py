"""tools/vllm.sh leaves a folder alone that it has not made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/vllm.sh"


@pytest.mark.parametrize("file", ["pyvenv.cfg", "installed", "notes.txt"])
def test_foreign_folders_are_left(tmp_path: Path, file: str) -> None:
    """In a repository beside which there is a source, on a disk with room."""
    script, install, df = (tmp_path / name for name in ("repository/tools/vllm.sh", "shared/vllm/install", "bin/df"))
    for program in (script, install, df):
        program.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    install.write_text("#!/bin/sh\n")
    df.write_text("#!/bin/sh\necho Filesystem 1024-blocks Used Available\necho disk 1 1 100000000 1% /\n")
    for program in (install, df):
        program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    for name in (file, "my-work.txt"):
        (home / name).write_text("mine")
    env = {**os.environ, "EDL_VLLM_HOME": str(home), "PATH": f"{df.parent}:{os.environ['PATH']}"}
    for _ in range(2):
        ended = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, "another folder" in ended.stderr) == (1, True), ended.stderr
        assert sorted(path.name for path in home.iterdir()) == sorted([file, "my-work.txt"])
