"""docs/security.md, from its first block to its last, as somebody who follows it would run it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.jobs.test_readme import BLOCKS, ROOT, blocks
from tests.waiting import wait_until

PAGE = ROOT / "docs" / "security.md"


def test_security_page(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.file_name is not None:
            tmp_path.joinpath(block.file_name).write_text(block.text)
    np.savez(tmp_path / "digits.npz", x=np.zeros((64, 1, 8, 8), np.float32))
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "edl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edl "$@"\n')
    (bin_folder / "edl").chmod(0o755)
    environ = {
        **os.environ,
        "EDL_DISCOVERY": f"sqlite:///{tmp_path}/discovery.sqlite",
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
    }
    ran = []
    with contextlib.ExitStack() as stack:
        for block in blocks(PAGE):
            if block.text.startswith("edl serve"):
                _serve(block.text.strip(), tmp_path, environ, stack)
            else:
                program = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable]
                done = subprocess.run(
                    [*program, "-c", block.text], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
                )
                assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"
            ran.append(block.language)
    assert ran.count("sh") >= 3
    assert "python" in ran


def _serve(line: str, folder: Path, environ: dict[str, str], stack: contextlib.ExitStack) -> None:
    ready, log = folder / "ready.json", folder / "teacher.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {line} --ready-file {ready}"], cwd=folder, env=environ, stdout=file, stderr=file
        )
    stack.callback(process.wait)
    stack.callback(process.kill)

    def serves() -> bool:
        assert process.poll() is None, log.read_text()
        return ready.exists()

    wait_until(serves, f"{line} is ready")
    assert json.loads(ready.read_text())["pid"] == process.pid
