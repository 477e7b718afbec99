"""Every example is run as its README says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.discovery import open_registry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def commands(readme: Path) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line]


@pytest.mark.timeout(400)
def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the example needs PyTorch")
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    folder = tmp_path / "digits"
    shutil.copytree(EXAMPLES / "digits", folder, ignore=shutil.ignore_patterns("__pycache__", "*.pt"))
    environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{tmp_path}/discovery.sqlite", "OMP_NUM_THREADS": "1"}
    train_teacher, serve, train_student = commands(folder / "README.md")

    def run(command: list[str]) -> str:
        command = [sys.executable, *command[1:]]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert right(run(train_teacher)) > 0.95
    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "edl", *serve[1:]], cwd=folder, env=environ, stdout=log, stderr=log
        )
        try:
            wait_for("handwriting", environ["EDL_DISCOVERY"], server, tmp_path / "log")
            told = run(train_student)
        finally:
            server.terminate()
            assert server.wait(30) == 0, (tmp_path / "log").read_text()
    assert right(told) > 0.95
    assert "35,910 rows" in told  # 30 epochs of 1,197 images


def right(told: str) -> float:
    found = re.findall(r"([\d.]+)% right", told)
    assert found, told
    return float(found[-1]) / 100


def wait_for(service: str, url: str, server: subprocess.Popen[bytes], log: Path, wait_s: float = 200) -> None:
    deadline = time.monotonic() + wait_s
    with open_registry(url) as registry:
        while not registry.snapshot(service).instances:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


def test_examples_have_readme_and_test() -> None:
    """Every example has a readme and a test here."""
    tested = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_example*.py"))
    for folder in (path for path in EXAMPLES.iterdir() if path.is_dir()):
        assert (folder / "README.md").exists()
        assert f"def test_{folder.name}(" in tested, f"no test runs examples/{folder.name}"
